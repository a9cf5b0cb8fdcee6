#pragma once
/// \file
/// The bytes of the pool, as far as lies about them can be found: who may write each slot, and what
/// its page says.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/block_store.h"

namespace pegaflow::sim {

/// Names the bytes of one page that one copy writes; never used twice. 0: nothing was written yet.
enum class Stamp : std::uint64_t {};

/// Thread-bound. Every method throws Mismatch when the store let two sides touch one slot.
class PageMemory {
 public:
  explicit PageMemory(std::uint32_t slot_count) : pages_(slot_count) {}

  /// A copy into the slot may begin; it writes until end_write().
  void begin_write(SlotIndex slot, Stamp stamp);
  /// The copy writes some bytes: until it ends the page is torn.
  void write(SlotIndex slot, Stamp stamp);
  /// The copy is over. `whole`: all of its bytes arrived.
  void end_write(SlotIndex slot, Stamp stamp, bool whole);

  /// A copy out of the slot may begin; it reads until end_read().
  void begin_read(SlotIndex slot) { ++pages_[slot].readers; }
  void end_read(SlotIndex slot) { --pages_[slot].readers; }
  /// The bytes now are whole and those of `expected`, and nobody is writing them.
  void verify(SlotIndex slot, Stamp expected) const;

  /// Nobody touches any page.
  [[nodiscard]] bool is_quiet() const;

 private:
  struct Page {
    Stamp bytes{};
    bool whole = false;
    Stamp writer{};  ///< The copy that may write, or is still writing, it.
    std::uint32_t readers = 0;
  };
  std::vector<Page> pages_;
};

}  // namespace pegaflow::sim
