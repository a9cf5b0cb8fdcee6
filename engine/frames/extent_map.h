#pragma once
/// \file
/// The units of the pool: which of them form an extent, and which shape its frames have.

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"
#include "engine/kept/kept_extent.h"
#include "engine/tables/block_row.h"
#include "engine/tables/free_runs.h"
#include "engine/tables/index_list.h"
#include "engine/tables/prefetch.h"
#include "engine/types/numa_ranges.h"
#include "engine/types/shape.h"
#include "engine/types/unit_run.h"

namespace pegaflow::engine {

/// An extent is named by the first unit of its first part.
using ExtentId = std::uint32_t;

/// Contiguous units, one run on each NUMA node that the shape's frames have a part on, divided into
/// equal frames: part p of frame k begins k parts after the beginning of run p.
struct alignas(64) Extent {
  // The members that each use of a block touches come first: one cache line.
  std::uint32_t shape_plus_1 = 0;  ///< 0: this entry is no extent.
  std::uint32_t frames = 0;
  std::uint32_t touched = 0;  ///< Frames from here on were not used since the extent was made.
  std::uint32_t used = 0;     ///< Frames that are not free.
  std::uint32_t busy = 0;     ///< Frames that are written or held: a busy extent stays.
  bool is_leaving = false;    ///< Its blocks are being evicted for another shape's extent.
  std::uint64_t made = 0;     ///< In uses of blocks, as BlockTable counts them.
  /// Sum of the last use of all frames; a frame that is not sealed counts as used when the extent
  /// was made.
  std::uint64_t use_sum = 0;
  IndexList<&Block::place> freed;
  IndexLink with_free;  ///< Its place among the extents of its shape that have a free frame.

  std::uint64_t serial = 0;  ///< Rising; distinguishes it from a later extent of that name.
  std::uint32_t run_count = 0;
  std::array<UnitRun, kMaxNumaNodes> runs{};

  [[nodiscard]] ShapeId shape() const noexcept { return ShapeId{shape_plus_1 - 1}; }
  [[nodiscard]] bool has_free() const noexcept {
    return shape_plus_1 != 0 && !is_leaving && used < frames;
  }
};

/// Owns the units and extents. The callers decide which extent is made or dropped, and when.
///
/// Thread-bound. The search for a run of free units takes steps that grow with the logarithm of the
/// units, whatever the other NUMA nodes have: reserve() searches once per block. oldest_of_others()
/// visits kLook places in each of the shape's NUMA nodes, or all of them when requested.
class ExtentMap {
 public:
  /// `numa_nodes` is 1 to kMaxNumaNodes.
  ExtentMap(std::uint64_t pool_bytes, std::uint32_t numa_nodes);

  /// The units of an extent in each part: the fewest that leave at most 6 % of the fullest part
  /// unused; where the NUMA node has fewer, those that hold the most frames.
  /// Errors: kRefused when a part does not fit its NUMA node.
  [[nodiscard]] Result<std::vector<std::uint32_t>> units_for(const FrameLayout& layout) const;

  /// Makes an extent of free units. If no run is long enough, it uses the longest that holds a
  /// frame: an extent with fewer frames is better than unused memory.
  std::optional<ExtentId> make(ShapeId shape, const FrameLayout& layout,
                               const std::vector<std::uint32_t>& units, std::uint64_t now);
  /// Frees the units of an extent.
  void release(ExtentId extent);
  /// Makes the extent that a former process had, for `shape` now, with all frames free.
  /// Errors: kCorrupt when it does not fit the pool, the layout or the extents restored before it.
  Result<void> restore(ExtentId id, const KeptExtent& kept, ShapeId shape,
                       const FrameLayout& layout);

  struct Choice {
    std::vector<ExtentId> extents{};
    std::uint64_t mean_use = 0;  ///< When their frames were used last, on average.
  };
  /// Places that one search visits in a NUMA node: all of a pool of 30 GiB, which has 480 units.
  static constexpr std::uint32_t kLook = 512;
  /// The extents of other shapes whose units would make room for one of this shape: without a busy
  /// frame, and among these the ones used longest ago on average. In NUMA nodes with more than
  /// kLook places, only those of part `part` are visited, counted modulo their number; all places
  /// without it.
  [[nodiscard]] std::optional<Choice> oldest_of_others(ShapeId shape, const FrameLayout& layout,
                                                       const std::vector<std::uint32_t>& units,
                                                       std::optional<std::uint32_t> part) const;

  /// The extent that a unit belongs to, or no value.
  [[nodiscard]] std::optional<ExtentId> owner(std::uint32_t unit) const noexcept {
    if (owner_plus_1_[unit] == 0) return std::nullopt;
    return owner_plus_1_[unit] - 1;
  }
  /// The same for a unit that belongs to an extent.
  [[nodiscard]] ExtentId known_owner(std::uint32_t unit) const noexcept {
    return owner_plus_1_[unit] - 1;
  }
  void prefetch(ExtentId extent) const noexcept { prefetch_to_write(&extents_[extent]); }
  [[nodiscard]] Extent& operator[](ExtentId extent) noexcept { return extents_[extent]; }
  [[nodiscard]] const Extent& operator[](ExtentId extent) const noexcept {
    return extents_[extent];
  }

  [[nodiscard]] std::uint64_t unit_bytes() const noexcept { return unit_bytes_; }
  /// 1 where the pool is too small to be divided.
  [[nodiscard]] std::uint32_t numa_node_count() const noexcept {
    return static_cast<std::uint32_t>(ranges_.size());
  }
  [[nodiscard]] std::uint32_t unit_count() const noexcept {
    return static_cast<std::uint32_t>(owner_plus_1_.size());
  }
  [[nodiscard]] std::uint32_t free_units() const noexcept { return free_units_; }
  /// Steps of the searches for free runs and for extents of others, and of updating the runs, since
  /// the start.
  [[nodiscard]] std::uint64_t visited() const noexcept;
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept;

 private:
  /// The units of one NUMA node.
  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    FreeRuns free;
  };
  [[nodiscard]] std::uint64_t bytes_of(UnitRun run) const noexcept;
  [[nodiscard]] bool is_free_run(UnitRun run, std::uint32_t numa_node) const;
  void take_units(ExtentId id);
  [[nodiscard]] const Range& range_of(std::uint32_t numa_node) const noexcept {
    return ranges_[numa_node < ranges_.size() ? numa_node : 0];
  }
  [[nodiscard]] Range& range_of(std::uint32_t numa_node) noexcept {
    return ranges_[numa_node < ranges_.size() ? numa_node : 0];
  }
  [[nodiscard]] Range& range_with(std::uint32_t unit) noexcept;
  [[nodiscard]] std::optional<UnitRun> free_run(Range& range, std::uint32_t count,
                                                std::uint64_t part_bytes) const;
  [[nodiscard]] std::optional<UnitRun> any_free_run(const Range& range, std::uint32_t count,
                                                    std::uint64_t part_bytes) const;
  [[nodiscard]] std::optional<Choice> oldest_window(ShapeId shape, const Range& range,
                                                    std::uint32_t count, std::uint64_t part_bytes,
                                                    std::optional<std::uint32_t> part) const;

  std::uint64_t pool_bytes_;
  std::uint64_t unit_bytes_;
  std::vector<Range> ranges_;
  std::vector<std::uint32_t> owner_plus_1_;  ///< By unit.
  std::vector<Extent> extents_;              ///< By first unit.
  std::uint32_t free_units_;
  std::uint64_t next_serial_ = 1;
  mutable std::uint64_t looked_ = 0;  ///< Units visited by oldest_of_others().
};

}  // namespace pegaflow::engine
