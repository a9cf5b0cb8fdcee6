#pragma once
/// \file
/// Which blocks engines requested lately, and the hit rate of a pool that loses nothing.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "engine/demand/sliding_sketch.h"
#include "engine/types/ids.h"

namespace pegaflow::engine {

/// Observes lookups and saves over sliding windows, in bounded memory.
///
/// The *ceiling* of a window's hit rate is the share of the requested blocks that were present, or
/// had been requested or saved before within the window: the hit rate of a pool that loses nothing
/// for that long. A SlidingSketch estimates, without bias, whether a missing block is new; over a
/// window in which n blocks were new the standard error is about 1.3 % of n. The ceiling is never
/// below the real hit rate. A block that many requests need at once, before the first has saved it,
/// counts as present for all but the first.
///
/// A window has 60 parts and covers the last 60 whole parts and the current one: it is up to 1/60
/// longer than its nominal length. A block costs some 4 ns, 10 with cold caches.
/// Thread-bound.
class Demand {
 public:
  /// Allowed lengths of windows, in whole seconds.
  static constexpr std::chrono::seconds kMinWindow{60};
  static constexpr std::chrono::seconds kMaxWindow{7 * 24 * 3600};

  /// Errors: kInvalidArgument for no window, more than SlidingSketch::kMaxWindows, one out of its
  /// bounds or two equal ones.
  static Result<void> check(std::vector<std::chrono::seconds> windows);
  /// Sorts `windows` by length. `clock` outlives it.
  /// Errors: those of check(); kOutOfCapacity.
  static Result<std::unique_ptr<Demand>> create(std::vector<std::chrono::seconds> windows,
                                                const Clock& clock);

  /// A lookup requested `keys`; the first `found` of them were present. A block has `block_bytes`.
  void requested(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                 std::uint64_t block_bytes);
  /// A save offered `keys`: from now on they are known.
  void saved(SpaceId space, std::span<const BlockKey> keys, std::uint64_t block_bytes);

  struct Window {
    std::chrono::seconds length{};
    std::uint64_t requested = 0;  ///< Blocks.
    std::uint64_t found = 0;
    double fresh =
        0;  ///< Estimate of the requested blocks neither present nor seen before in the window.
    double distinct = 0;  ///< Estimate of the different blocks requested or saved.
    double bytes =
        0;  ///< Bytes of the distinct blocks: a pool of this size would have lost nothing.

    /// Both 0 while nothing was requested.
    [[nodiscard]] double hit_rate() const;
    [[nodiscard]] double ceiling() const;
  };
  /// The shortest first.
  [[nodiscard]] std::vector<Window> windows();

  [[nodiscard]] std::uint64_t memory_bytes() const;

 private:
  static constexpr std::uint32_t kParts = 60;
  /// The events of one part of a window.
  struct Part {
    std::uint64_t requested = 0;
    std::uint64_t found = 0;
    double fresh = 0;
    std::uint64_t blocks = 0;  ///< Requested or saved, and their bytes.
    std::uint64_t bytes = 0;
  };
  struct Track {
    std::uint32_t length_s = 0;
    std::uint32_t part_s = 0;
    std::uint32_t part = 0;  ///< The number of the current part, counted from the start.
    std::vector<Part> parts;
    Part& now() { return parts[part % parts.size()]; }
  };

  Demand(const std::vector<std::chrono::seconds>& windows, const Clock& clock,
         SlidingSketch sketch);
  /// Returns the seconds since a minute before construction, so that 0 never occurs, and drops what
  /// has left the windows.
  std::uint32_t advance();

  const Clock& clock_;
  TimePoint begin_;
  std::vector<Track> tracks_;
  SlidingSketch sketch_;
};

}  // namespace pegaflow::engine
