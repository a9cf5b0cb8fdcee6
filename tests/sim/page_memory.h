#pragma once
/// \file
/// The bytes of the pool, as far as the store's claims about them can be checked: the copy that may
/// write each page, and the page's content.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/block_store.h"

namespace pegaflow::sim {

/// Identifies the bytes of one page that one copy writes; never used twice. 0: nothing written yet.
enum class Stamp : std::uint64_t {};

/// The place of a page: cells of 4 KiB of the pool.
struct Place {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// Thread-bound. Every method throws Mismatch if the store allowed conflicting accesses to a cell.
class PageMemory {
 public:
  explicit PageMemory(std::uint32_t cells) : cells_(cells) {}

  /// A copy into the page may begin; it writes until end_write().
  void begin_write(Place place, Stamp stamp);
  /// The copy writes some bytes: until it ends the page is torn.
  void write(Place place, Stamp stamp);
  /// The copy has ended. `whole`: all of its bytes arrived.
  void end_write(Place place, Stamp stamp, bool whole);

  /// A copy out of the page may begin; it reads until end_read().
  void begin_read(Place place);
  void end_read(Place place);
  /// Checks that the bytes are complete and those of `expected`, and that no copy is writing them.
  void verify(Place place, Stamp expected) const;

  /// True if no copy accesses any page.
  [[nodiscard]] bool is_quiet() const;

 private:
  struct Cell {
    Stamp bytes{};
    bool whole = false;
    Stamp writer{};  ///< The copy that may write, or is still writing, it.
    std::uint32_t readers = 0;
  };
  [[nodiscard]] std::span<Cell> at(Place place);
  std::vector<Cell> cells_;
};

}  // namespace pegaflow::sim
