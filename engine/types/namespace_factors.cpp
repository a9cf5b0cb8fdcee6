#include "engine/types/namespace_factors.h"

#include <algorithm>
#include <utility>

#include <xxhash.h>

#include "base/id128.h"

namespace pegaflow::engine {

Result<std::vector<NamespaceFactor>> canonical_factors(std::vector<NamespaceFactor> factors) {
  if (factors.empty() || factors.size() > kMaxNamespaceFactors) {
    return fail(Errc::kInvalidArgument, "a namespace has 1 to {} factors, not {}",
                kMaxNamespaceFactors, factors.size());
  }
  std::size_t bytes = 0;
  for (const NamespaceFactor& factor : factors) {
    if (factor.name.empty()) return fail(Errc::kInvalidArgument, "a factor without a name");
    bytes += factor.name.size() + factor.value.size();
  }
  if (bytes > kMaxNamespaceBytes) {
    return fail(Errc::kInvalidArgument, "a namespace has at most {} bytes, not {}",
                kMaxNamespaceBytes, bytes);
  }
  std::sort(factors.begin(), factors.end());
  const auto twice =
      std::adjacent_find(factors.begin(), factors.end(),
                         [](const NamespaceFactor& left, const NamespaceFactor& right) {
                           return left.name == right.name;
                         });
  if (twice != factors.end()) {
    return fail(Errc::kInvalidArgument, "the factor {} comes twice", twice->name);
  }
  return factors;
}

std::string namespace_hash(std::span<const NamespaceFactor> canonical) {
  // Lengths go in too: {"ab", "c"} and {"a", "bc"} are not the same.
  std::string text;
  for (const NamespaceFactor& factor : canonical) {
    text += fmt::format("{}:{}={}:{};", factor.name.size(), factor.name, factor.value.size(),
                        factor.value);
  }
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return to_string(Id128{hash.high64, hash.low64});
}

}  // namespace pegaflow::engine
