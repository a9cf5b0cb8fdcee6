#pragma once
/// \file
/// The factors of a namespace: the properties that decide whether two engines compute the same
/// bytes.

#include <compare>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace pegaflow::engine {

/// One property that decides whether two engines compute the same bytes, for example
/// {"kv_cache_dtype", "float16"}.
struct NamespaceFactor {
  std::string name;
  std::string value;
  auto operator<=>(const NamespaceFactor&) const = default;
};

/// Sorts factors by name, so that lists with equal content are equal.
/// Errors: kInvalidArgument when the list is empty, exceeds the limits below, or a name is empty or
/// occurs twice.
Result<std::vector<NamespaceFactor>> canonical_factors(std::vector<NamespaceFactor> factors);

inline constexpr std::size_t kMaxNamespaceFactors = 256;
inline constexpr std::size_t kMaxNamespaceBytes = 64 * 1024;  ///< All names and values together.

/// XXH3-128 over a canonical list, 32 hexadecimal digits. A name for people only: whether two
/// namespaces are the same is decided by comparing the lists.
std::string namespace_hash(std::span<const NamespaceFactor> canonical);

}  // namespace pegaflow::engine
