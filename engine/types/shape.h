#pragma once
/// \file
/// The layout of a block in the pool: one page per shard, all of them in one frame.

#include <cstdint>
#include <vector>

#include "base/error.h"

namespace pegaflow::engine {

/// A shape that the store knows.
enum class ShapeId : std::uint32_t {};

/// The pages of a block, and where they should lie. Namespaces of equal shape share their extents.
struct Shape {
  struct Shard {
    std::uint64_t page_bytes = 0;  ///< 0: the shard has no page, and no holder reads or writes it.
    std::uint32_t numa_node = 0;   ///< Index of its range in numa_ranges().
    bool operator==(const Shard&) const = default;
  };
  std::vector<Shard> shards;
  bool operator==(const Shape&) const = default;
};

inline constexpr std::uint32_t kMaxShards = 1024;
/// The NUMA nodes that one pool may lie on.
inline constexpr std::uint32_t kMaxNumaNodes = 8;

/// Where each page lies within its frame.
///
/// A frame has one contiguous *part* per NUMA node. In a part the pages of its shards lie one
/// behind the other, in the order of shards, each rounded up to 4 KiB. A shard of 0 bytes has none.
class FrameLayout {
 public:
  struct Part {
    std::uint32_t numa_node = 0;
    std::uint64_t bytes = 0;
    std::uint32_t pages = 0;
  };
  struct Place {
    std::uint32_t part = 0;
    std::uint64_t offset = 0;  ///< Within the part.
    std::uint32_t number = 0;  ///< The count of pages before it in the part.
  };

  /// Errors: kInvalidArgument without a shard, with more than kMaxShards, or when all pages are
  /// empty; kRefused for a page above kMaxPageBytes.
  static Result<FrameLayout> create(const Shape& shape);

  [[nodiscard]] const std::vector<Part>& parts() const noexcept { return parts_; }
  [[nodiscard]] const Place& place(std::uint32_t shard) const noexcept { return places_[shard]; }
  [[nodiscard]] std::uint32_t shard_count() const noexcept {
    return static_cast<std::uint32_t>(places_.size());
  }
  /// The bytes of all parts together.
  [[nodiscard]] std::uint64_t frame_bytes() const noexcept { return frame_bytes_; }

 private:
  FrameLayout() = default;

  std::vector<Part> parts_;
  std::vector<Place> places_;
  std::uint64_t frame_bytes_ = 0;
};

}  // namespace pegaflow::engine
