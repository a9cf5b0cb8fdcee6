#include "harness/engine_memory.h"

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include <sys/mman.h>

#include "harness/pattern.h"

namespace pegaflow::harness {
namespace {

constexpr std::byte kGap{0xEE};
/// Page-aligned, as an engine's large allocations are.
constexpr std::align_val_t kAlignment{4096};

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

void EngineMemory::Free::operator()(std::byte* bytes) const noexcept {
  ::operator delete[](bytes, kAlignment);
}

Result<EngineMemory> EngineMemory::create(const Options& options) {
  const std::size_t stride = options.segment_bytes + options.gap_bytes;
  std::vector<Allocation> allocations;
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < options.segments; ++i) {
    const std::size_t size = stride * options.blocks;
    Allocation allocation(
        static_cast<std::byte*>(::operator new[](size, kAlignment, std::nothrow)));
    if (!allocation) {
      return fail(Errc::kOutOfCapacity, "no memory for {} bytes of an engine's blocks", size);
    }
    std::memset(allocation.get(), std::to_integer<int>(kGap), size);
    segments.push_back({.base = allocation.get(),
                        .block_stride_bytes = stride,
                        .size_bytes = options.segment_bytes});
    allocations.push_back(std::move(allocation));
  }
  PEGA_TRY_LET(PageLayout layout, PageLayout::create(std::move(segments), options.blocks));
  return EngineMemory(options, std::move(allocations), std::move(layout));
}

std::span<std::byte> EngineMemory::piece(std::size_t segment, std::uint32_t block) const {
  return {allocations_[segment].get() + block * stride(), options_.segment_bytes};
}

void EngineMemory::fill(std::uint32_t block, std::uint64_t seed) {
  std::vector<std::byte> page(layout_.page_bytes());
  write_pattern(page, seed);
  copy(block, page.data(), Device::Direction::kLoad);
}

void EngineMemory::fill_all(std::uint64_t salt) {
  for (std::uint32_t block = 0; block < options_.blocks; ++block) {
    fill(block, pattern_seed(salt, block));
  }
}

bool EngineMemory::holds(std::uint32_t block, std::uint64_t seed) const {
  std::vector<std::byte> page(layout_.page_bytes());
  copy(block, page.data(), Device::Direction::kSave);
  return is_pattern(page, seed);
}

bool EngineMemory::gaps_are_whole() const {
  for (std::size_t i = 0; i < options_.segments; ++i) {
    for (std::uint32_t block = 0; block < options_.blocks; ++block) {
      const std::byte* const gap = piece(i, block).data() + options_.segment_bytes;
      for (std::size_t at = 0; at < options_.gap_bytes; ++at) {
        if (gap[at] != kGap) return false;
      }
    }
  }
  return true;
}

void EngineMemory::clear() {
  for (const Allocation& allocation : allocations_) {
    std::memset(allocation.get(), 0, stride() * options_.blocks);
  }
}

void EngineMemory::copy(std::uint32_t block, std::byte* page, Device::Direction direction) const {
  const bool is_save = direction == Device::Direction::kSave;
  for (std::size_t i = 0; i < options_.segments; ++i) {
    std::byte* const bytes = piece(i, block).data();
    std::memcpy(is_save ? page : bytes, is_save ? bytes : page, options_.segment_bytes);
    page += options_.segment_bytes;
  }
}

}  // namespace pegaflow::harness
