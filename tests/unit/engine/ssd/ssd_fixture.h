#pragma once
/// \file
/// Small disks in memory, for tests of the format.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "engine/ssd/format.h"

namespace pegaflow::engine::ssd {

inline constexpr Id128 kDisk{11, 12};

inline BlockKey key_of(std::uint64_t number) {
  BlockKey key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

inline SpaceName name_of(std::uint8_t number) {
  SpaceName name{};
  name[0] = std::byte{number};
  return name;
}

inline Superblock small_disk(std::uint32_t segments = 4) {
  return divide(kDisk, kLogOffset + segments * kLeastSegment, kLeastSegment).value();
}

/// The bytes of a whole disk.
struct Image {
  explicit Image(const Superblock& superblock) : bytes(superblock.end()) {}
  [[nodiscard]] std::span<std::byte> at(std::uint64_t offset, std::uint64_t size) {
    return std::span(bytes).subspan(offset, size);
  }
  [[nodiscard]] std::span<std::byte, kSector> page(std::uint64_t offset) {
    return std::span(bytes).subspan(offset).first<kSector>();
  }
  std::vector<std::byte> bytes;
};

}  // namespace pegaflow::engine::ssd
