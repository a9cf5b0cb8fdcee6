#pragma once
/// \file
/// Assigns ranges of the staging memory: arithmetic only.

#include <cstdint>
#include <deque>

namespace pegaflow::cuda {

/// Hands out contiguous ranges of a ring. Ranges end in the order in which they were taken. A range
/// that overlaps unfinished earlier ones names the newest of them; the device waits for it.
/// Thread-bound.
class StagingRing {
 public:
  /// The alignment of ranges.
  static constexpr std::uint64_t kAlignment = 4096;

  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t number = 0;  ///< Increases by one with each range.
    std::uint64_t behind = 0;  ///< The newest range that must end before; 0: none.
  };

  explicit StagingRing(std::uint64_t bytes) : bytes_(bytes) {}

  /// Takes a range of `bytes`, at most size_bytes().
  Range take(std::uint64_t bytes);

  /// Ends the oldest range.
  void give_back();

  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return bytes_; }

 private:
  struct Taken {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t number;
  };
  std::uint64_t bytes_;
  std::uint64_t next_ = 0;  ///< Where the next range begins, if it fits there.
  std::uint64_t last_number_ = 0;
  std::deque<Taken> taken_;  ///< Oldest first.
};

}  // namespace pegaflow::cuda
