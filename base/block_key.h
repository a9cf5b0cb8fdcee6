#pragma once
/// \file
/// The name of a block inside a namespace.

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>

#include "base/error.h"

namespace pegaflow {

/// The engine's own chained hash at the end of a block, 1 to 32 bytes, zero-padded to 32.
///
/// The padding is unambiguous because the hash algorithm, and with it the length, is a factor of
/// the namespace. Chained: equal keys mean equal tokens from the start of the prompt on.
struct BlockKey {
  static constexpr std::size_t kMaxBytes = 32;
  std::array<std::byte, kMaxBytes> bytes{};

  /// Errors: kInvalidArgument when `raw` has no byte or more than 32.
  static Result<BlockKey> from_bytes(std::span<const std::byte> raw);

  /// The first 8 bytes. The engine's hash is uniform, so they need no further hashing.
  [[nodiscard]] std::uint64_t hash() const noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof word);
    return word;
  }
  /// The low 64 bits of the engine's hash, which is as long as the key without its padding: 8, 16
  /// or 32 bytes, the most significant first.
  [[nodiscard]] std::uint64_t low_bits() const noexcept;
  /// The first 64 bits of the engine's hash, the most significant byte first.
  [[nodiscard]] std::uint64_t first_bits() const noexcept;
  /// Uses memcmp: the defaulted operator compares the bytes one by one, in 25 ns instead of 2.
  bool operator==(const BlockKey& other) const noexcept {
    return std::memcmp(bytes.data(), other.bytes.data(), kMaxBytes) == 0;
  }
  auto operator<=>(const BlockKey&) const noexcept = default;
};

/// Hexadecimal digits of all 32 bytes.
std::string to_string(const BlockKey& key);

}  // namespace pegaflow

template <>
struct std::hash<pegaflow::BlockKey> {
  std::size_t operator()(const pegaflow::BlockKey& key) const noexcept { return key.hash(); }
};
