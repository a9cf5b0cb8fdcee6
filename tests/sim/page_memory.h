#pragma once
/// \file
/// The bytes of the pool, as far as lies about them can be found: who may write each page, and what
/// it says.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/block_store.h"

namespace pegaflow::sim {

/// Names the bytes of one page that one copy writes; never used twice. 0: nothing was written yet.
enum class Stamp : std::uint64_t {};

/// Where a page lies: cells of 4 KiB of the pool.
struct Place {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// Thread-bound. Every method throws Mismatch when the store let two sides touch one cell.
class PageMemory {
 public:
  explicit PageMemory(std::uint32_t cells) : cells_(cells) {}

  /// A copy into the page may begin; it writes until end_write().
  void begin_write(Place place, Stamp stamp);
  /// The copy writes some bytes: until it ends the page is torn.
  void write(Place place, Stamp stamp);
  /// The copy is over. `whole`: all of its bytes arrived.
  void end_write(Place place, Stamp stamp, bool whole);

  /// A copy out of the page may begin; it reads until end_read().
  void begin_read(Place place);
  void end_read(Place place);
  /// The bytes now are whole and those of `expected`, and nobody is writing them.
  void verify(Place place, Stamp expected) const;

  /// Nobody touches any page.
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
