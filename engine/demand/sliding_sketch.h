#pragma once
/// \file
/// Estimates the count of different values seen lately from a few hundred KiB: HyperLogLog whose
/// registers keep times.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// HyperLogLog over several sliding windows at once.
///
/// HyperLogLog keeps the highest rank (leading zeros of the hash) that each register ever saw. This
/// one keeps for each register and rank the second in which it was last seen, so that the highest
/// rank *of any window* is still known when older ones have left it: one store per hash, however
/// many windows there are. Each window also has the ranks themselves, brought up to date by
/// slide().
///
/// Two estimates are derived from them. count() is the number of different hashes that a window saw
/// (Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017: no table of
/// corrections), with a standard error of 1.04 / sqrt(kRegisters) = 1.6 %. add() returns the number
/// of *new* hashes that one that changed a register stands for: 1 over the chance that a new one
/// changes something (the HIP estimator of Cohen and of Ting, 2014). A hash that the window has
/// seen never changes a register, so the sum over some of the hashes is an unbiased estimate of the
/// number of new ones *among them*. In a window that has seen n, each weighs about n / kRegisters;
/// a sum of n has the error of a count.
///
/// Thread-bound.
class SlidingSketch {
 public:
  static constexpr std::uint32_t kRegisters = 4096;
  static constexpr std::uint32_t kRanks = 40;  ///< Enough for 2^50 different hashes.
  static constexpr std::size_t kMaxWindows = 8;
  using Weights = std::array<double, kMaxWindows>;

  /// For `windows` windows, the shortest first; all empty.
  /// Errors: kInvalidArgument for none or more than kMaxWindows; kOutOfCapacity.
  static Result<SlidingSketch> create(std::size_t windows);

  /// `hash` was seen in second `now_s` of 1 to 2^31, which never decreases. `hash` has 64
  /// well-mixed bits. Adds to `fresh[w]` the number of new hashes that this one stands for in
  /// window w: 0 if it changed nothing there.
  void add(std::uint64_t hash, std::uint32_t now_s, Weights& fresh) noexcept {
    const auto at = static_cast<std::uint32_t>(hash >> (64 - kRegisterBits));
    const auto zeros = static_cast<std::uint32_t>(std::countl_zero((hash << kRegisterBits) | 1));
    const std::uint32_t rank = std::min(zeros, kRanks - 1) + 1;
    last_seen_[(rank - 1) * kRegisters + at] = static_cast<std::int32_t>(now_s);
    // A long window saw all that a short one saw, so most hashes are done after the first.
    std::array<std::uint8_t, kMaxWindows>& tops = tops_[at];
    for (std::size_t window = 0; window < windows_ && rank > tops[window]; ++window) {
      fresh[window] += 1 / chance_[window];
      chance_[window] -= chance_of(tops[window]) - chance_of(rank);
      tops[window] = static_cast<std::uint8_t>(rank);
    }
  }

  /// Drops from `window` what it saw before second `since_s`. Takes some 30 us.
  void slide(std::size_t window, std::uint32_t since_s) noexcept;

  /// Estimates the number of different hashes that the window saw.
  [[nodiscard]] double count(std::size_t window) const noexcept;

  [[nodiscard]] std::size_t memory_bytes() const noexcept {
    return last_seen_.size_bytes() + tops_.size_bytes();
  }

 private:
  static constexpr std::uint32_t kRegisterBits = std::countr_zero(kRegisters);

  SlidingSketch(ZeroPages<std::int32_t> last_seen,
                ZeroPages<std::array<std::uint8_t, kMaxWindows>> tops,
                std::size_t windows) noexcept;
  /// The chance that a new hash falls on one register and has a rank above `top`.
  static double chance_of(std::uint32_t top) noexcept {
    constexpr auto kChances = [] {
      std::array<double, kRanks + 1> chances{};
      double chance = 1.0 / kRegisters;
      for (std::uint32_t rank = 0; rank < kRanks; ++rank, chance /= 2) chances[rank] = chance;
      return chances;  // The last one is 0: nothing ranks above it.
    }();
    return kChances[top];
  }

  ZeroPages<std::int32_t> last_seen_;  ///< kRanks rows of kRegisters; 0 is never.
  /// The highest rank of each register in each window; 0 is none.
  ZeroPages<std::array<std::uint8_t, kMaxWindows>> tops_;
  std::size_t windows_ = 0;
  std::array<double, kMaxWindows> chance_{};  ///< The chance that a new hash changes a register.
};

}  // namespace pegaflow::engine
