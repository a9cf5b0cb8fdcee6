#pragma once
/// \file
/// What engines asked for lately, and what share of it a pool that loses nothing would have had.

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

/// Watches lookups and saves over sliding windows, in bounded memory.
///
/// The hit rate's *ceiling* of a window is the share of the blocks asked for that were there, or
/// had been asked for or saved before within the window: what a pool that loses nothing for so long
/// would have found. Whether a missing block is new is estimated by a SlidingSketch, without bias;
/// over a window in which n blocks were new the standard error is about 1.3 % of n. It is never
/// below the real hit rate. A block that many requests ask for at once, before the first has saved
/// it, counts as there for all but the first.
///
/// A window has 60 parts and covers the last 60 whole ones and the present one: it is up to 1/60
/// longer than it says. A block costs some 4 ns, 10 with cold caches.
/// Thread-bound.
class Demand {
 public:
  /// Allowed lengths of windows, in whole seconds.
  static constexpr std::chrono::seconds kMinWindow{60};
  static constexpr std::chrono::seconds kMaxWindow{7 * 24 * 3600};

  /// Errors: kInvalidArgument for none, more than SlidingSketch::kMaxWindows, one out of its bounds
  /// or two that are the same.
  static Result<void> check(std::vector<std::chrono::seconds> windows);
  /// `windows` are sorted by length afterwards. `clock` outlives it.
  /// Errors: as check(); kOutOfCapacity.
  static Result<std::unique_ptr<Demand>> create(std::vector<std::chrono::seconds> windows,
                                                const Clock& clock);

  /// A lookup asked for `keys`; the first `found` of them were there. A block has `block_bytes`.
  void asked(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
             std::uint64_t block_bytes);
  /// A save offered `keys`: from now on they are known.
  void saved(SpaceId space, std::span<const BlockKey> keys, std::uint64_t block_bytes);

  struct Window {
    std::chrono::seconds length{};
    std::uint64_t asked = 0;  ///< Blocks.
    std::uint64_t found = 0;
    double fresh = 0;     ///< Of the asked, about: neither there nor seen before in the window.
    double distinct = 0;  ///< Different blocks asked for or saved, about.
    double bytes = 0;     ///< Of the distinct ones: a pool of this size would have lost nothing.

    /// Both 0 while nothing was asked for.
    [[nodiscard]] double hit_rate() const;
    [[nodiscard]] double ceiling() const;
  };
  /// The shortest first.
  [[nodiscard]] std::vector<Window> windows();

  [[nodiscard]] std::uint64_t memory_bytes() const;

 private:
  static constexpr std::uint32_t kParts = 60;
  /// What happened in one part of a window.
  struct Part {
    std::uint64_t asked = 0;
    std::uint64_t found = 0;
    double fresh = 0;
    std::uint64_t blocks = 0;  ///< Asked for or saved, and their bytes.
    std::uint64_t bytes = 0;
  };
  struct Track {
    std::uint32_t length_s = 0;
    std::uint32_t part_s = 0;
    std::uint32_t part = 0;  ///< The number of the present one, counted from the start.
    std::vector<Part> parts;
    Part& now() { return parts[part % parts.size()]; }
  };

  Demand(const std::vector<std::chrono::seconds>& windows, const Clock& clock,
         SlidingSketch sketch);
  /// Seconds since a minute before it was made, so that 0 never comes. Lets what is old leave.
  std::uint32_t advance();

  const Clock& clock_;
  TimePoint begin_;
  std::vector<Track> tracks_;
  SlidingSketch sketch_;
};

}  // namespace pegaflow::engine
