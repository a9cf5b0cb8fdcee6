// Separate from the interface, which knows none of its implementations.
#include <utility>

#include "engine/eviction/eviction.h"
#include "engine/eviction/lru.h"
#include "engine/eviction/s3_fifo.h"
#include "engine/eviction/slru.h"
#include "engine/eviction/weighted.h"

namespace pegaflow::engine {

Result<std::unique_ptr<EvictionPolicy>> EvictionPolicy::create(EvictionKind kind, BlockRows& rows,
                                                               std::uint32_t row_count) {
  switch (kind) {
    case EvictionKind::kLru:
      return std::make_unique<LruPolicy>(rows);
    case EvictionKind::kSlru:
      return std::make_unique<SlruPolicy>(rows);
    case EvictionKind::kS3Fifo:
      return S3FifoPolicy::create(rows, row_count);
    case EvictionKind::kWeightedLru:
      return WeightedLruPolicy::create(rows, row_count);
  }
  return fail(Errc::kInternal, "an eviction policy without a name");
}

}  // namespace pegaflow::engine
