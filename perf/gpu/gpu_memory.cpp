#include "perf/gpu/gpu_memory.h"

#include <algorithm>
#include <chrono>

#include "harness/pattern.h"
#include "transport/cuda/cuda_error.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kCopyBytes = std::uint64_t{64} << 20;

}  // namespace

Result<std::unique_ptr<GpuMemory>> GpuMemory::create(std::shared_ptr<cuda::Driver> driver,
                                                     int ordinal, std::span<const GpuGroup> groups,
                                                     std::uint64_t blocks) {
  std::unique_ptr<GpuMemory> memory(new GpuMemory(std::move(driver), ordinal));
  PEGA_TRY(memory->make(groups, blocks));
  return memory;
}

Result<std::unique_ptr<GpuMemory>> GpuMemory::create(std::shared_ptr<cuda::Driver> driver,
                                                     int ordinal, std::uint64_t page_bytes,
                                                     std::uint64_t segment_bytes,
                                                     std::uint64_t blocks) {
  const GpuGroup group{.segments = page_bytes / segment_bytes, .segment_bytes = segment_bytes};
  return create(std::move(driver), ordinal, std::span(&group, 1), blocks);
}

Result<void> GpuMemory::make(std::span<const GpuGroup> groups, std::uint64_t blocks) {
  cuda::Driver& driver = *driver_;
  PEGA_TRY(cuda::check(driver, driver.retain_primary_context(ordinal_, context_), "use the GPU"));
  const cuda::CurrentContext current(driver, context_);
  for (cuda::Stream& stream : streams_) {
    PEGA_TRY(cuda::check(driver, driver.create_stream(0, stream), "make a stream"));
  }
  for (cuda::DeviceAddress& target : targets_) {
    PEGA_TRY(cuda::check(driver, driver.allocate(kCopyBytes, target), "allocate GPU memory"));
  }
  std::uint64_t segments = 0;
  std::uint64_t stride = 0;
  for (const GpuGroup& group : groups) {
    segments = std::max(segments, group.segments);
    stride = std::max(stride, group.segment_bytes);
  }
  allocation_bytes_ = stride * blocks;
  for (std::uint64_t i = 0; i < segments; ++i) {
    cuda::DeviceAddress& address = allocations_.emplace_back(0);
    PEGA_TRY(
        cuda::check(driver, driver.allocate(allocation_bytes_, address), "allocate GPU memory"));
  }
  for (const GpuGroup& group : groups) {
    std::vector<Segment> places;
    for (std::uint64_t i = 0; i < group.segments; ++i) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): a layout has addresses of any kind of memory.
      auto* const base = reinterpret_cast<std::byte*>(allocations_[i]);
      places.push_back({base, stride, group.segment_bytes});
    }
    PEGA_TRY_LET(PageLayout layout, PageLayout::create(std::move(places), blocks));
    layouts_.push_back(std::move(layout));
  }
  return clear();
}

GpuMemory::~GpuMemory() {
  if (context_ == nullptr) return;
  {
    const cuda::CurrentContext current(*driver_, context_);
    for (const cuda::DeviceAddress address : allocations_) driver_->release(address);
    for (const cuda::DeviceAddress address : targets_) driver_->release(address);
    for (const cuda::Stream stream : streams_) driver_->destroy_stream(stream);
  }
  driver_->release_primary_context(ordinal_);
}

Result<void> GpuMemory::clear() {
  const cuda::CurrentContext current(*driver_, context_);
  for (const cuda::DeviceAddress address : allocations_) {
    PEGA_TRY(cuda::check(*driver_, driver_->fill(address, 0x5A, allocation_bytes_, streams_[0]),
                         "fill GPU memory"));
  }
  return cuda::check(*driver_, driver_->synchronize(streams_[0]), "fill GPU memory");
}

Result<void> GpuMemory::check(std::span<const Expected> pages, std::uint64_t salt) {
  const cuda::CurrentContext current(*driver_, context_);
  std::vector<std::byte> bytes(allocation_bytes_);
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    // Reads the whole allocation without the device that is checked.
    const cuda::Transfer all{bytes.data(), allocations_[i], bytes.size()};
    PEGA_TRY(cuda::check(*driver_, driver_->copy(cuda::Direction::kToHost, &all, 1, streams_[0]),
                         "read GPU memory"));
    PEGA_TRY(cuda::check(*driver_, driver_->synchronize(streams_[0]), "read GPU memory"));
    for (const Expected& page : pages) {
      const auto segments = layouts_[page.layout].segments();
      if (i >= segments.size()) continue;
      const Segment& segment = segments[i];
      const auto piece =
          std::span(bytes).subspan(page.block * segment.block_stride_bytes, segment.size_bytes);
      if (!harness::is_pattern(piece, harness::pattern_seed(salt, page.origin),
                               i * segment.size_bytes)) {
        return fail(Errc::kCorrupt, "segment {} of block {} differs from the page of {}", i,
                    page.block, page.origin);
      }
    }
  }
  return {};
}

Result<double> GpuMemory::contiguous_rate(std::span<std::byte> host, Directions directions,
                                          double seconds) {
  const cuda::CurrentContext current(*driver_, context_);
  const std::uint64_t copy_bytes = std::min<std::uint64_t>(kCopyBytes, host.size() / 2);
  if (copy_bytes == 0) return fail(Errc::kInvalidArgument, "the pool is empty");
  const std::uint64_t places = host.size() / copy_bytes / 2;
  std::uint64_t bytes = 0;
  const auto begin = Clock::now();
  while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    for (std::uint64_t i = 0; i < 8; ++i) {
      const std::uint64_t place = i % places * copy_bytes;
      if (directions != Directions::kToDevice) {
        const cuda::Transfer out{host.data() + place, targets_[0], copy_bytes};
        PEGA_TRY(cuda::check(*driver_,
                             driver_->copy(cuda::Direction::kToHost, &out, 1, streams_[0]),
                             "copy to the host"));
        bytes += copy_bytes;
      }
      if (directions != Directions::kToHost) {
        const cuda::Transfer in{host.data() + host.size() / 2 + place, targets_[1], copy_bytes};
        PEGA_TRY(cuda::check(*driver_,
                             driver_->copy(cuda::Direction::kToDevice, &in, 1, streams_[1]),
                             "copy to the GPU"));
        bytes += copy_bytes;
      }
    }
    for (const cuda::Stream stream : streams_) {
      PEGA_TRY(cuda::check(*driver_, driver_->synchronize(stream), "copy"));
    }
  }
  const std::chrono::duration<double> took = Clock::now() - begin;
  return static_cast<double>(bytes) / took.count() / 1e9;
}

}  // namespace pegaflow::perf
