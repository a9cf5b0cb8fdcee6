#pragma once
/// \file
/// Random 128-bit names: incarnations of processes, connections, claim tokens.

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace pegaflow {

/// A random name, unique by its length. The zero id means "none". Immutable.
struct Id128 {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  /// From the kernel's random source. Never the zero id.
  static Id128 random();

  [[nodiscard]] bool is_none() const noexcept { return high == 0 && low == 0; }
  auto operator<=>(const Id128&) const noexcept = default;
};

/// 32 hexadecimal digits.
std::string to_string(const Id128& id);

}  // namespace pegaflow

template <>
struct std::hash<pegaflow::Id128> {
  std::size_t operator()(const pegaflow::Id128& id) const noexcept {
    return static_cast<std::size_t>(id.high ^ (id.low * 0x9E3779B97F4A7C15ULL));
  }
};
