#include "engine/types/shape.h"

#include <algorithm>

#include "base/page_layout.h"
#include "base/units.h"

namespace pegaflow::engine {

Result<FrameLayout> FrameLayout::create(const Shape& shape) {
  if (shape.shards.empty() || shape.shards.size() > kMaxShards) {
    return fail(Errc::kInvalidArgument, "a block has 1 to {} shards, not {}", kMaxShards,
                shape.shards.size());
  }
  FrameLayout layout;
  for (const Shape::Shard& shard : shape.shards) {
    if (shard.page_bytes == 0) {
      layout.places_.push_back({});
      continue;
    }
    if (shard.page_bytes > kMaxPageBytes) {
      return fail(Errc::kRefused, "a page of {} passes the limit of {}",
                  format_bytes(shard.page_bytes), format_bytes(kMaxPageBytes));
    }
    auto part = std::find_if(layout.parts_.begin(), layout.parts_.end(),
                             [&](const Part& each) { return each.numa_node == shard.numa_node; });
    if (part == layout.parts_.end()) {
      layout.parts_.push_back({.numa_node = shard.numa_node});
      part = layout.parts_.end() - 1;
    }
    layout.places_.push_back({.part = static_cast<std::uint32_t>(part - layout.parts_.begin()),
                              .offset = part->bytes,
                              .number = part->pages++});
    part->bytes += slot_bytes_for(shard.page_bytes);
    layout.frame_bytes_ += slot_bytes_for(shard.page_bytes);
  }
  if (layout.parts_.empty()) {
    return fail(Errc::kInvalidArgument, "a block whose pages have 0 bytes");
  }
  return layout;
}

}  // namespace pegaflow::engine
