#pragma once
/// \file
/// Block keys computed from their number.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/block_key.h"

namespace pegaflow::perf {

/// An endless sequence of keys like an engine's hashes: 32 uniform bytes each. Immutable.
class KeySource {
 public:
  explicit KeySource(std::uint64_t seed) : seed_(seed) {}

  /// Key `number`; equal seeds give equal keys.
  [[nodiscard]] BlockKey key(std::uint64_t number) const noexcept {
    BlockKey key;
    std::array<std::uint64_t, 4> words{};
    for (std::uint64_t i = 0; i < words.size(); ++i)
      words[i] = mix(seed_ + (number * 4 + i) * kStep);
    std::memcpy(key.bytes.data(), words.data(), key.bytes.size());
    return key;
  }

  /// Keys `first` to `first + count`.
  [[nodiscard]] std::vector<BlockKey> range(std::uint64_t first, std::size_t count) const {
    std::vector<BlockKey> keys(count);
    for (std::size_t i = 0; i < count; ++i) keys[i] = key(first + i);
    return keys;
  }

  /// `count` keys drawn from the first `population`; `draw` numbers the draw.
  [[nodiscard]] std::vector<BlockKey> drawn(std::uint64_t population, std::size_t count,
                                            std::uint64_t draw) const {
    std::vector<BlockKey> keys(count);
    for (std::size_t i = 0; i < count; ++i) {
      keys[i] = key(mix(~seed_ + (draw * count + i) * kStep) % population);
    }
    return keys;
  }

 private:
  static constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ULL;

  /// SplitMix64's finalizer: as uniform as the hashes of an engine.
  static std::uint64_t mix(std::uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  std::uint64_t seed_;
};

}  // namespace pegaflow::perf
