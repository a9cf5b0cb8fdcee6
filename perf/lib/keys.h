#pragma once
/// \file
/// Block keys computed from their number.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
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

  /// Keys `first` to `first + count`, back to back as on the wire.
  [[nodiscard]] std::vector<std::byte> packed(std::uint64_t first, std::size_t count) const {
    std::vector<std::byte> bytes(count * BlockKey::kMaxBytes);
    for (std::size_t i = 0; i < count; ++i) write(first + i, bytes, i);
    return bytes;
  }

  /// `count` keys drawn from the first `population`, back to back; `draw` numbers the draw.
  [[nodiscard]] std::vector<std::byte> drawn(std::uint64_t population, std::size_t count,
                                             std::uint64_t draw) const {
    std::vector<std::byte> bytes(count * BlockKey::kMaxBytes);
    for (std::size_t i = 0; i < count; ++i) {
      write(mix(~seed_ + (draw * count + i) * kStep) % population, bytes, i);
    }
    return bytes;
  }

 private:
  static constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ULL;

  /// SplitMix64's finalizer: as uniform as the hashes of an engine.
  static std::uint64_t mix(std::uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  void write(std::uint64_t number, std::span<std::byte> bytes, std::size_t at) const {
    const BlockKey key = this->key(number);
    std::memcpy(bytes.data() + at * BlockKey::kMaxBytes, key.bytes.data(), key.bytes.size());
  }

  std::uint64_t seed_;
};

}  // namespace pegaflow::perf
