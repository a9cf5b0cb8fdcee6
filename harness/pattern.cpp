#include "harness/pattern.h"

#include <cstring>

namespace pegaflow::harness {
namespace {

/// The word at `at` (in words) of segment `segment` of block `block`.
std::uint64_t pattern(std::uint64_t salt, std::uint32_t block, std::size_t segment,
                      std::size_t at) {
  // Odd multipliers: neighbors in any dimension differ, and only neighbors can a copy confuse.
  return (salt + 1) * 0x9E3779B97F4A7C15ULL ^ block * 0xC2B2AE3D27D4EB4FULL ^
         segment * 0x165667B19E3779F9ULL ^ at * 0xD6E8FEB86659FD93ULL;
}

}  // namespace

void write_pattern(std::span<std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                   std::size_t segment) {
  for (std::size_t at = 0; at < bytes.size() / 8; ++at) {
    const std::uint64_t word = pattern(salt, block, segment, at);
    std::memcpy(bytes.data() + at * 8, &word, 8);
  }
}

bool is_pattern(std::span<const std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                std::size_t segment, std::uint64_t offset) {
  for (std::size_t at = 0; at < bytes.size() / 8; ++at) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at * 8, 8);
    if (word != pattern(salt, block, segment, offset / 8 + at)) return false;
  }
  return true;
}

}  // namespace pegaflow::harness
