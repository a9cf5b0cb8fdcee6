#include "transport/host/page_copy.h"

#include <algorithm>
#include <cstring>

namespace pegaflow {
namespace {

/// Small enough for a second-level cache, large enough that the cost of the calls is negligible.
constexpr std::uint64_t kPieceBytes = 32 * 1024;

}  // namespace

void copy_page(const PageLayout& layout, Device::Direction direction, std::uint32_t block,
               std::byte* page) noexcept {
  for (const Segment& segment : layout.segments()) {
    std::byte* const piece = segment.base + block * segment.block_stride_bytes;
    if (direction == Device::Direction::kSave) {
      std::memcpy(page, piece, segment.size_bytes);
    } else {
      std::memcpy(piece, page, segment.size_bytes);
    }
    page += segment.size_bytes;
  }
}

std::uint64_t copy_page(const PageLayout& layout, Device::Direction direction, std::uint32_t block,
                        std::byte* page, PageChecksum& checksum) noexcept {
  checksum.reset();
  for (const Segment& segment : layout.segments()) {
    std::byte* at = segment.base + block * segment.block_stride_bytes;
    for (std::uint64_t left = segment.size_bytes; left != 0;) {
      const std::uint64_t bytes = std::min(left, kPieceBytes);
      if (direction == Device::Direction::kSave) {
        std::memcpy(page, at, bytes);
      } else {
        std::memcpy(at, page, bytes);
      }
      checksum.add({at, bytes});
      at += bytes;
      page += bytes;
      left -= bytes;
    }
  }
  return checksum.value();
}

}  // namespace pegaflow
