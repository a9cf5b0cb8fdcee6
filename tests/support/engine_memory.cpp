#include "tests/support/engine_memory.h"

#include <algorithm>
#include <cstring>

namespace pegaflow::testing {
namespace {

constexpr std::byte kGap{0xEE};

/// Splitmix64: the word at `index` of the page of `seed`.
std::uint64_t word(std::uint64_t seed, std::size_t index) {
  std::uint64_t z = seed * 0x9E3779B97F4A7C15ULL + (index + 1) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace

void fill_page(std::byte* page, std::size_t bytes, std::uint64_t seed) {
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t value = word(seed, at / sizeof value);
    std::memcpy(page + at, &value, std::min(sizeof value, bytes - at));
  }
}

EngineMemory::EngineMemory(std::size_t segments, std::size_t segment_bytes, std::size_t blocks,
                           std::size_t gap_bytes)
    : segments_(segments),
      segment_bytes_(segment_bytes),
      blocks_(blocks),
      stride_(segment_bytes + gap_bytes) {
  for (std::size_t i = 0; i < segments; ++i) {
    allocations_.push_back(std::make_unique<std::byte[]>(stride_ * blocks));
    std::memset(allocations_.back().get(), static_cast<int>(kGap), stride_ * blocks);
  }
}

PageLayout EngineMemory::layout() const {
  std::vector<Segment> segments;
  for (const auto& allocation : allocations_) {
    segments.push_back({allocation.get(), stride_, segment_bytes_});
  }
  return PageLayout::create(std::move(segments), blocks_).value();
}

std::byte* EngineMemory::piece(std::size_t segment, std::uint32_t block) const {
  return allocations_[segment].get() + block * stride_;
}

void EngineMemory::fill(std::uint32_t block, std::uint64_t seed) {
  std::vector<std::byte> page(segments_ * segment_bytes_);
  fill_page(page.data(), page.size(), seed);
  for (std::size_t i = 0; i < segments_; ++i) {
    std::memcpy(piece(i, block), page.data() + i * segment_bytes_, segment_bytes_);
  }
}

bool EngineMemory::holds(std::uint32_t block, std::uint64_t seed) const {
  std::vector<std::byte> page(segments_ * segment_bytes_);
  fill_page(page.data(), page.size(), seed);
  for (std::size_t i = 0; i < segments_; ++i) {
    if (std::memcmp(piece(i, block), page.data() + i * segment_bytes_, segment_bytes_) != 0) {
      return false;
    }
  }
  return true;
}

bool EngineMemory::gaps_are_whole() const {
  for (std::size_t i = 0; i < segments_; ++i) {
    for (std::uint32_t block = 0; block < blocks_; ++block) {
      const std::byte* const gap = piece(i, block) + segment_bytes_;
      for (std::size_t at = 0; at < stride_ - segment_bytes_; ++at) {
        if (gap[at] != kGap) return false;
      }
    }
  }
  return true;
}

}  // namespace pegaflow::testing
