#include "harness/engine_memory.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/mman.h>

#include "harness/pattern.h"

namespace pegaflow::harness {
namespace {

std::span<std::byte> piece_of(const Segment& segment, std::uint32_t block) {
  return {segment.base + block * segment.block_stride_bytes, segment.size_bytes};
}

}  // namespace

Result<Mapping> Mapping::anonymous(std::size_t bytes) {
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (base == MAP_FAILED) return fail_errno(errno, "map memory for an engine's blocks");
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
      harness::write_pattern(piece_of(layout_.segments()[i], block), salt, block, i);
    }
  }
}

bool EngineMemory::has_pattern(std::uint32_t block, std::uint32_t origin,
                               std::uint64_t salt) const {
  for (std::size_t i = 0; i < layout_.segments().size(); ++i) {
    if (!is_pattern(piece_of(layout_.segments()[i], block), salt, origin, i)) return false;
  }
  return true;
}

void EngineMemory::copy(std::uint32_t block, std::byte* page, Device::Direction direction) const {
  for (const Segment& segment : layout_.segments()) {
    std::byte* const piece = piece_of(segment, block).data();
    const bool is_save = direction == Device::Direction::kSave;
    std::memcpy(is_save ? page : piece, is_save ? piece : page, segment.size_bytes);
    page += segment.size_bytes;
  }
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
    if (!is_pattern(page.subspan(at, size), salt, origin, i)) return false;
    at += size;
  }
  return true;
}

}  // namespace pegaflow::harness
