#include "engine/eviction/kind.h"

namespace pegaflow::engine {

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
    case EvictionKind::kAdaptive:
      return "adaptive";
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
  return fail(Errc::kInvalidArgument, "unknown eviction policy \"{}\"; use {}", name,
              eviction_names());
}

}  // namespace pegaflow::engine
