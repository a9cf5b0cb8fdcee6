#include "transport/host/page_copy.h"

#include <cstring>

namespace pegaflow {

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

}  // namespace pegaflow
