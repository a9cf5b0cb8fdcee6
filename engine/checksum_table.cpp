#include "engine/checksum_table.h"

#include <algorithm>

#include "base/log.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"cache"};

}  // namespace

void ChecksumTable::set(SlotIndex slot, std::uint64_t checksum) {
  if (slot >= slots_ || has_failed_) return;
  if (!checksums_) {
    if (checksum == kNone) return;
    Result<ZeroPages<std::uint64_t>> made = ZeroPages<std::uint64_t>::create(slots_);
    if (!made) {
      has_failed_ = true;
      kLog.warn("no memory for checksums, pages are not verified error=\"{}\"",
                to_string(made.error()));
      return;
    }
    checksums_.emplace(std::move(*made));
  }
  (*checksums_)[slot] = checksum;
  touched_ = std::max<std::uint64_t>(touched_, std::uint64_t{slot} + 1);
}

}  // namespace pegaflow
