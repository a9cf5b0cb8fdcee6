#pragma once
/// \file
/// Which part of the staging memory is whose: arithmetic only.

#include <cstdint>
#include <deque>

namespace pegaflow::cuda {

/// Hands out contiguous ranges of a ring, over and over. Ranges are over in the order they were
/// given; one that lies where an earlier one is not over yet says behind which it has to wait, and
/// the waiting is done on the device. Thread-bound.
class StagingRing {
 public:
  /// Ranges begin at multiples of it.
  static constexpr std::uint64_t kAlignment = 4096;

  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t number = 0;  ///< Rises by one with each.
    std::uint64_t behind = 0;  ///< The newest one that has to be over before; 0: none.
  };

  explicit StagingRing(std::uint64_t bytes) : bytes_(bytes) {}

  /// A range of `bytes`. More than the ring has room for at all is the caller's mistake.
  Range take(std::uint64_t bytes);

  /// The oldest range is over.
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
