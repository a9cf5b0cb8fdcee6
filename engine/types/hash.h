#pragma once
/// \file
/// The hashes of what outlives a process, on disks and in kept tables: XXH3.

#include <cstddef>
#include <cstdint>
#include <span>

namespace pegaflow::engine {

[[nodiscard]] std::uint64_t hash64(std::span<const std::byte> bytes,
                                   std::uint64_t seed = 0) noexcept;

/// The checksum of a record: XXH3-128.
struct Checksum {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const Checksum&) const = default;
};
[[nodiscard]] Checksum hash128(std::span<const std::byte> bytes) noexcept;

}  // namespace pegaflow::engine
