#include "engine/eviction.h"

#include <utility>

#include "engine/eviction_lru.h"
#include "engine/eviction_s3_fifo.h"
#include "engine/eviction_slru.h"
#include "engine/eviction_weighted.h"

namespace pegaflow {

std::string_view to_string(EvictionKind kind) {
  switch (kind) {
    case EvictionKind::kLru:
      return "lru";
    case EvictionKind::kSlru:
      return "slru";
    case EvictionKind::kS3Fifo:
      return "s3-fifo";
    case EvictionKind::kWeightedLru:
      return "weighted-lru";
  }
  return "?";
}

std::string eviction_names() {
  std::string all;
  for (std::size_t i = 0; i < kEvictionKinds.size(); ++i) {
    if (i != 0) all += i + 1 == kEvictionKinds.size() ? " or " : ", ";
    all += to_string(kEvictionKinds[i]);
  }
  return all;
}

Result<EvictionKind> eviction_kind(std::string_view name) {
  for (const EvictionKind kind : kEvictionKinds) {
    if (to_string(kind) == name) return kind;
  }
  return fail(Errc::kInvalidArgument, "there is no eviction policy \"{}\", but {}", name,
              eviction_names());
}

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

}  // namespace pegaflow
