#include "perf/gpu/gpu_memory.h"

#include <chrono>

#include "harness/pattern.h"
#include "transport/cuda/cuda_error.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kCopyBytes = std::uint64_t{64} << 20;

}  // namespace

Result<std::unique_ptr<GpuMemory>> GpuMemory::create(std::shared_ptr<cuda::Driver> driver,
                                                     int ordinal, std::uint64_t page_bytes,
                                                     std::uint64_t segment_bytes,
                                                     std::uint64_t blocks) {
  std::unique_ptr<GpuMemory> memory(new GpuMemory(std::move(driver), ordinal));
  PEGA_TRY(memory->make(page_bytes, segment_bytes, blocks));
  return memory;
}

Result<void> GpuMemory::make(std::uint64_t page_bytes, std::uint64_t segment_bytes,
                             std::uint64_t blocks) {
  cuda::Driver& driver = *driver_;
  PEGA_TRY(cuda::check(driver, driver.retain_primary_context(ordinal_, context_), "use the GPU"));
  const cuda::CurrentContext current(driver, context_);
  for (cuda::Stream& stream : streams_) {
    PEGA_TRY(cuda::check(driver, driver.create_stream(0, stream), "make a stream"));
  }
  for (cuda::DeviceAddress& target : targets_) {
    PEGA_TRY(cuda::check(driver, driver.allocate(kCopyBytes, target), "allocate GPU memory"));
  }
  allocation_bytes_ = segment_bytes * blocks;
  std::vector<Segment> segments;
  for (std::uint64_t i = 0; i < page_bytes / segment_bytes; ++i) {
    cuda::DeviceAddress& address = allocations_.emplace_back(0);
    PEGA_TRY(
        cuda::check(driver, driver.allocate(allocation_bytes_, address), "allocate GPU memory"));
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a layout has addresses of any kind of memory.
    segments.push_back({reinterpret_cast<std::byte*>(address), segment_bytes, segment_bytes});
  }
  PEGA_TRY_LET(PageLayout layout, PageLayout::create(std::move(segments), blocks));
  layout_ = std::make_unique<PageLayout>(std::move(layout));
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

Result<void> GpuMemory::check(std::span<const std::uint32_t> blocks,
                              std::span<const std::uint32_t> origins, std::uint64_t salt) {
  const cuda::CurrentContext current(*driver_, context_);
  const std::uint64_t segment = layout_->segments().front().size_bytes;
  std::vector<std::byte> bytes(allocation_bytes_);
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    // Reads the whole allocation without the device that is checked.
    const cuda::Transfer all{bytes.data(), allocations_[i], bytes.size()};
    PEGA_TRY(cuda::check(*driver_, driver_->copy(cuda::Direction::kToHost, &all, 1, streams_[0]),
                         "read GPU memory"));
    PEGA_TRY(cuda::check(*driver_, driver_->synchronize(streams_[0]), "read GPU memory"));
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      const auto piece = std::span(bytes).subspan(blocks[k] * segment, segment);
      if (!harness::is_pattern(piece, harness::pattern_seed(salt, origins[k]), i * segment)) {
        return fail(Errc::kCorrupt, "segment {} of block {} differs from the page of {}", i,
                    blocks[k], origins[k]);
      }
    }
  }
  return {};
}

Result<double> GpuMemory::contiguous_rate(std::span<std::byte> host, Directions directions,
                                          double seconds) {
  const cuda::CurrentContext current(*driver_, context_);
  const std::uint64_t places = host.size() / kCopyBytes / 2;
  if (places == 0) return fail(Errc::kInvalidArgument, "the pool is smaller than 128 MiB");
  std::uint64_t bytes = 0;
  const auto begin = Clock::now();
  while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    for (std::uint64_t i = 0; i < 8; ++i) {
      const std::uint64_t place = i % places * kCopyBytes;
      if (directions != Directions::kToDevice) {
        const cuda::Transfer out{host.data() + place, targets_[0], kCopyBytes};
        PEGA_TRY(cuda::check(*driver_,
                             driver_->copy(cuda::Direction::kToHost, &out, 1, streams_[0]),
                             "copy to the host"));
        bytes += kCopyBytes;
      }
      if (directions != Directions::kToHost) {
        const cuda::Transfer in{host.data() + host.size() / 2 + place, targets_[1], kCopyBytes};
        PEGA_TRY(cuda::check(*driver_,
                             driver_->copy(cuda::Direction::kToDevice, &in, 1, streams_[1]),
                             "copy to the GPU"));
        bytes += kCopyBytes;
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
