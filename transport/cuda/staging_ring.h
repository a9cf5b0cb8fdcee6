#pragma once
/// \file
/// Which part of the staging memory is whose: arithmetic only.

#include <cstdint>
#include <deque>
#include <optional>

namespace pegaflow::cuda {

/// Hands out contiguous ranges of a ring, which come back in the order they were given.
/// Thread-bound.
class StagingRing {
 public:
  /// Ranges begin at multiples of it.
  static constexpr std::uint64_t kAlignment = 4096;

  explicit StagingRing(std::uint64_t bytes) : bytes_(bytes) {}

  /// Where a range of `bytes` begins. No value: not before give_back().
  /// More than the ring has room for at all is the caller's mistake.
  std::optional<std::uint64_t> take(std::uint64_t bytes);

  /// The oldest range is free again.
  void give_back();

  [[nodiscard]] bool is_empty() const noexcept { return taken_.empty(); }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return bytes_; }

 private:
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
  };
  std::uint64_t bytes_;
  std::deque<Range> taken_;  ///< Oldest first.
};

}  // namespace pegaflow::cuda
