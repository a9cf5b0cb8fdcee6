#include "transport/cuda/staging_ring.h"

#include "base/assert.h"

namespace pegaflow::cuda {

std::optional<std::uint64_t> StagingRing::take(std::uint64_t bytes) {
  const std::uint64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  PEGA_ASSERT(bytes != 0 && size <= bytes_, "{} bytes of a ring of {}", bytes, bytes_);
  if (taken_.empty()) {
    taken_.push_back({0, size});
    return 0;
  }
  const std::uint64_t oldest = taken_.front().begin;
  const std::uint64_t newest = taken_.back().end;
  std::uint64_t begin = newest;
  if (newest > oldest) {  // Free: from the newest to the end, and from 0 to the oldest.
    if (bytes_ - newest < size) begin = 0;
    if (begin == 0 && oldest < size) return std::nullopt;
  } else if (oldest - newest < size) {
    return std::nullopt;
  }
  taken_.push_back({begin, begin + size});
  return begin;
}

void StagingRing::give_back() {
  PEGA_ASSERT(!taken_.empty(), "nothing was taken");
  taken_.pop_front();
}

}  // namespace pegaflow::cuda
