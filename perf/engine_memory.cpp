#include "perf/engine_memory.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/mman.h>

namespace pegaflow::perf {
namespace {

/// The word at `at` (in words) of segment `segment` of block `block`.
std::uint64_t pattern(std::uint64_t salt, std::uint32_t block, std::size_t segment,
                      std::size_t at) {
  // Odd multipliers far apart: neighbors in any direction differ, which is all a copy can confuse.
  return (salt + 1) * 0x9E3779B97F4A7C15ULL ^ block * 0xC2B2AE3D27D4EB4FULL ^
         segment * 0x165667B19E3779F9ULL ^ at * 0xD6E8FEB86659FD93ULL;
}

void write_segment(std::span<std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                   std::size_t segment) {
  for (std::size_t at = 0; at < bytes.size() / 8; ++at) {
    const std::uint64_t word = pattern(salt, block, segment, at);
    std::memcpy(bytes.data() + at * 8, &word, 8);
  }
}

bool segment_is(std::span<const std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                std::size_t segment) {
  for (std::size_t at = 0; at < bytes.size() / 8; ++at) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at * 8, 8);
    if (word != pattern(salt, block, segment, at)) return false;
  }
  return true;
}

std::span<std::byte> piece_of(const Segment& segment, std::uint32_t block) {
  return {segment.base + block * segment.block_stride_bytes, segment.size_bytes};
}

}  // namespace

Result<Mapping> Mapping::anonymous(std::size_t bytes) {
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (base == MAP_FAILED) return fail_errno(errno, "get memory for an engine's blocks");
  return Mapping({static_cast<std::byte*>(base), bytes});
}

Result<Mapping> Mapping::shared(int fd, std::size_t bytes) {
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return fail_errno(errno, "map the pool");
  return Mapping({static_cast<std::byte*>(base), bytes});
}

Mapping::~Mapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Result<EngineMemory> EngineMemory::create(std::uint64_t page_bytes, std::uint64_t segment_bytes,
                                          std::uint64_t blocks) {
  std::vector<Mapping> allocations;
  std::vector<Segment> segments;
  for (std::uint64_t at = 0; at < page_bytes; at += segment_bytes) {
    PEGA_TRY_LET(Mapping allocation, Mapping::anonymous(segment_bytes * blocks));
    segments.push_back({.base = allocation.bytes().data(),
                        .block_stride_bytes = segment_bytes,
                        .size_bytes = segment_bytes});
    allocations.push_back(std::move(allocation));
  }
  PEGA_TRY_LET(PageLayout layout, PageLayout::create(std::move(segments), blocks));
  return EngineMemory(std::move(allocations), std::move(layout));
}

void EngineMemory::write_pattern(std::uint64_t salt) {
  for (std::uint32_t block = 0; block < layout_.block_count(); ++block) {
    for (std::size_t i = 0; i < layout_.segments().size(); ++i) {
      write_segment(piece_of(layout_.segments()[i], block), salt, block, i);
    }
  }
}

bool EngineMemory::has_pattern(std::uint32_t block, std::uint32_t origin,
                               std::uint64_t salt) const {
  for (std::size_t i = 0; i < layout_.segments().size(); ++i) {
    if (!segment_is(piece_of(layout_.segments()[i], block), salt, origin, i)) return false;
  }
  return true;
}

void EngineMemory::clear() {
  for (const Mapping& allocation : allocations_) {
    std::memset(allocation.bytes().data(), 0, allocation.bytes().size());
  }
}

bool page_has_pattern(const PageLayout& layout, std::span<const std::byte> page,
                      std::uint32_t origin, std::uint64_t salt) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < layout.segments().size(); ++i) {
    const std::uint64_t size = layout.segments()[i].size_bytes;
    if (!segment_is(page.subspan(at, size), salt, origin, i)) return false;
    at += size;
  }
  return true;
}

}  // namespace pegaflow::perf
