#include "transport/disk/hooks.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/assert.h"
#include "transport/checksum.h"

namespace pegaflow::disk {
namespace {

/// Moves along the spans of a request.
class Cursor {
 public:
  explicit Cursor(std::span<const std::span<std::byte>> memory) : memory_(memory) {}

  /// The next bytes, at most `most` and never none: the caller has checked that there are enough.
  std::span<const std::byte> next(std::uint64_t most) {
    while (at_ == memory_[index_].size()) {
      ++index_;
      at_ = 0;
    }
    const std::span<std::byte> rest = memory_[index_].subspan(at_);
    const std::size_t size = std::min<std::uint64_t>(most, rest.size());
    at_ += size;
    return rest.first(size);
  }

 private:
  std::span<const std::span<std::byte>> memory_;
  std::size_t index_ = 0;
  std::size_t at_ = 0;
};

std::vector<std::uint64_t> checksums_of(std::span<const std::span<std::byte>> memory,
                                        std::span<const std::uint64_t> page_bytes) {
  std::vector<std::uint64_t> checksums;
  checksums.reserve(page_bytes.size());
  Cursor cursor(memory);
  PageChecksum checksum;
  for (const std::uint64_t page : page_bytes) {
    std::span<const std::byte> bytes = page == 0 ? std::span<const std::byte>() : cursor.next(page);
    if (bytes.size() == page) {  // The usual case needs no state.
      checksums.push_back(PageChecksum::of(bytes));
      continue;
    }
    checksum.reset();
    std::uint64_t left = page;
    for (;;) {
      checksum.add(bytes);
      left -= bytes.size();
      if (left == 0) break;
      bytes = cursor.next(left);
    }
    checksums.push_back(checksum.value());
  }
  return checksums;
}

}  // namespace

Disk::Hook take_checksums(std::vector<std::span<std::byte>> memory,
                          std::vector<std::uint64_t> page_bytes) {
  std::uint64_t present = 0;
  for (const std::span<std::byte> span : memory) present += span.size();
  const std::uint64_t wanted =
      std::accumulate(page_bytes.begin(), page_bytes.end(), std::uint64_t{0});
  PEGA_ASSERT(wanted <= present, "pages of {} bytes in memory of {}", wanted, present);
  return [memory = std::move(memory),
          page_bytes = std::move(page_bytes)](Disk::Completion& completion) -> Result<void> {
    completion.checksums = checksums_of(memory, page_bytes);
    return {};
  };
}

}  // namespace pegaflow::disk
