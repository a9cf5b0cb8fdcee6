#include "tests/sim/page_memory.h"

#include <algorithm>

#include <fmt/format.h>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

namespace {

std::uint64_t number(Stamp stamp) { return static_cast<std::uint64_t>(stamp); }

}  // namespace

void PageMemory::begin_write(SlotIndex slot, Stamp stamp) {
  Page& page = pages_[slot];
  if (page.writer != Stamp{}) {
    throw Mismatch{fmt::format("slot {} was lent to copy {} while copy {} may still write it", slot,
                               number(stamp), number(page.writer))};
  }
  if (page.readers != 0) {
    throw Mismatch{fmt::format("slot {} was lent to copy {} while {} readers may still read it",
                               slot, number(stamp), page.readers)};
  }
  page = {.bytes = stamp, .writer = stamp};
}

void PageMemory::write(SlotIndex slot, Stamp stamp) {
  Page& page = pages_[slot];
  if (page.writer != stamp || page.readers != 0) {
    throw Mismatch{fmt::format("copy {} writes into slot {}, which copy {} owns and {} read",
                               number(stamp), slot, number(page.writer), page.readers)};
  }
  page.bytes = stamp;
  page.whole = false;
}

void PageMemory::end_write(SlotIndex slot, Stamp stamp, bool whole) {
  write(slot, stamp);
  pages_[slot].whole = whole;
  pages_[slot].writer = Stamp{};
}

void PageMemory::verify(SlotIndex slot, Stamp expected) const {
  const Page& page = pages_[slot];
  if (page.bytes != expected || !page.whole || page.writer != Stamp{}) {
    throw Mismatch{fmt::format("a reader of slot {} expects bytes {} and sees {}, {}", slot,
                               number(expected), number(page.bytes),
                               page.whole ? "whole" : "torn")};
  }
}

bool PageMemory::is_quiet() const {
  return std::all_of(pages_.begin(), pages_.end(),
                     [](const Page& page) { return page.writer == Stamp{} && page.readers == 0; });
}

}  // namespace pegaflow::sim
