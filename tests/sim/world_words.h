#pragma once
/// \file
/// Names of things in the worlds' histories and mismatches.

#include <cstdint>
#include <string>

#include "base/error.h"

namespace pegaflow::sim {

template <typename Enum>
std::uint64_t number(Enum value) {
  return static_cast<std::uint64_t>(value);
}

template <typename T>
std::string outcome(const Result<T>& result) {
  return result ? "ok" : std::string(to_string(result.error().code));
}

template <typename Left, typename Right>
bool same_outcome(const Result<Left>& left, const Result<Right>& right) {
  return left.has_value() == right.has_value() &&
         (left.has_value() || left.error().code == right.error().code);
}

}  // namespace pegaflow::sim
