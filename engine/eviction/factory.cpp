// Separate from the interface, which knows none of its implementations.
#include <utility>

#include "engine/eviction/adaptive.h"
#include "engine/eviction/eviction.h"
#include "engine/eviction/lru.h"
#include "engine/eviction/s3_fifo.h"
#include "engine/eviction/slru.h"
#include "engine/eviction/weighted.h"

namespace pegaflow::engine {

Result<std::unique_ptr<EvictionPolicy>> EvictionPolicy::create(EvictionKind kind, BlockRows& rows,
                                                               std::uint32_t row_count,
                                                               PolicyMemory memory) {
  memory.begin(PolicyMemory::kMeaning << 48U | (static_cast<std::uint64_t>(kind) + 1) << 32U |
               row_count);
  switch (kind) {
    case EvictionKind::kLru:
      return std::make_unique<LruPolicy>(rows);
    case EvictionKind::kSlru:
      return std::make_unique<SlruPolicy>(rows);
    case EvictionKind::kS3Fifo:
      return S3FifoPolicy::create(rows, row_count, memory);
    case EvictionKind::kWeightedLru:
      return WeightedLruPolicy::create(rows, row_count, memory);
    case EvictionKind::kAdaptive:
      return AdaptivePolicy::create(rows, row_count, memory);
  }
  return fail(Errc::kInternal, "an eviction policy without a name");
}

}  // namespace pegaflow::engine
