#include "transport/cuda/staging_ring.h"

#include <algorithm>

#include "base/assert.h"

namespace pegaflow::cuda {

StagingRing::Range StagingRing::take(std::uint64_t bytes) {
  const std::uint64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  PEGA_ASSERT(bytes != 0 && size <= bytes_, "{} bytes of a ring of {}", bytes, bytes_);
  const std::uint64_t begin = taken_.empty() || bytes_ - next_ < size ? 0 : next_;
  const std::uint64_t end = begin + size;
  const auto newest = std::find_if(taken_.rbegin(), taken_.rend(), [&](const Taken& other) {
    return other.begin < end && begin < other.end;
  });
  const Range range{begin, ++last_number_, newest == taken_.rend() ? 0 : newest->number};
  next_ = end;
  taken_.push_back({begin, end, range.number});
  return range;
}

void StagingRing::give_back() {
  PEGA_ASSERT(!taken_.empty(), "nothing was taken");
  taken_.pop_front();
}

}  // namespace pegaflow::cuda
