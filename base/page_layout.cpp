#include "base/page_layout.h"

#include <utility>

namespace pegaflow {

Result<PageLayout> PageLayout::create(std::vector<Segment> segments, std::uint64_t block_count) {
  if (segments.empty() || block_count == 0) {
    return fail(Errc::kInvalidArgument, "a layout needs segments and blocks, not {} and {}",
                segments.size(), block_count);
  }
  PageLayout layout;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    if (segment.base == nullptr || segment.size_bytes == 0) {
      return fail(Errc::kInvalidArgument, "segment {} has {} bytes at {}", i, segment.size_bytes,
                  static_cast<const void*>(segment.base));
    }
    if (block_count > 1 && segment.block_stride_bytes < segment.size_bytes) {
      return fail(Errc::kInvalidArgument,
                  "segment {}: blocks of {} bytes overlap at a stride of {}", i, segment.size_bytes,
                  segment.block_stride_bytes);
    }
    layout.page_bytes_ += segment.size_bytes;
    if (segment.size_bytes > kMaxPageBytes || layout.page_bytes_ > kMaxPageBytes) {
      return fail(Errc::kInvalidArgument,
                  "a page of more than 1 GiB is not cached (segment {} of {}); use a smaller block",
                  i, segments.size());
    }
  }
  layout.segments_ = std::move(segments);
  layout.block_count_ = block_count;
  return layout;
}

}  // namespace pegaflow
