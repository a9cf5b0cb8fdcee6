#include "engine/frames/checksum_table.h"

#include <utility>

#include "base/log.h"

namespace pegaflow::engine {
namespace {

constexpr Log kLog{"cache"};

}  // namespace

void ChecksumTable::set(std::uint32_t page, std::uint64_t checksum) {
  if (page >= pages_ || has_failed_) return;
  if (checksum == kNone && *kept_ == 0) return;
  if (!checksums_) {
    Result<ZeroPages<std::uint64_t>> made = ZeroPages<std::uint64_t>::create(pages_);
    if (!made) {
      has_failed_ = true;
      kLog.warn("no memory for checksums, pages are not verified error=\"{}\"",
                to_string(made.error()));
      return;
    }
    checksums_.emplace(std::move(*made));
  }
  std::uint64_t& kept = (*checksums_)[page];
  if (kept == checksum) return;  // An entry that was never written is none: it needs no memory.
  *kept_ += kept == kNone ? 1 : 0;
  *kept_ -= checksum == kNone ? 1 : 0;
  kept = checksum;
}

}  // namespace pegaflow::engine
