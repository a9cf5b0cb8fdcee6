#include "harness/pattern.h"

#include <algorithm>
#include <cstring>

namespace pegaflow::harness {
namespace {

/// Splitmix64: the word at `index` of the pattern of `seed`.
std::uint64_t word(std::uint64_t seed, std::size_t index) {
  std::uint64_t z = seed * 0x9E3779B97F4A7C15ULL + (index + 1) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace

void write_pattern(std::span<std::byte> bytes, std::uint64_t seed, std::uint64_t offset) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t value = word(seed, (offset + at) / sizeof value);
    std::memcpy(bytes.data() + at, &value, std::min(sizeof value, bytes.size() - at));
  }
}

bool is_pattern(std::span<const std::byte> bytes, std::uint64_t seed, std::uint64_t offset) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t value = word(seed, (offset + at) / sizeof value);
    const std::size_t size = std::min(sizeof value, bytes.size() - at);
    if (std::memcmp(bytes.data() + at, &value, size) != 0) return false;
  }
  return true;
}

std::uint64_t pattern_seed(std::uint64_t salt, std::uint64_t block) {
  return salt * 0x9E3779B97F4A7C15ULL + block;
}

}  // namespace pegaflow::harness
