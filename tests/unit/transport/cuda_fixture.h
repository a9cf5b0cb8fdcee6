#pragma once
/// \file
/// A CudaDevice over the driver that the program was built for.

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include <doctest/doctest.h>

#include "tests/support/device_memory.h"
#include "transport/cuda/cuda_device.h"
#include "transport/cuda/kernel_image.h"

namespace pegaflow::testing {

/// The software driver, or the real one: each program has its own.
std::shared_ptr<cuda::Driver> driver_under_test();

/// Collects completions and lets a test wait for them.
class CudaCompletions {
 public:
  Device::CompletionSink sink() {
    return [this](Device::Completion&& completion) {
      const std::lock_guard lock(mutex_);
      all_.push_back(std::move(completion));
      changed_.notify_all();
    };
  }
  std::vector<Device::Completion> wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    REQUIRE(
        changed_.wait_for(lock, std::chrono::seconds(60), [&] { return all_.size() >= count; }));
    return all_;
  }
  [[nodiscard]] std::size_t count() {
    const std::lock_guard lock(mutex_);
    return all_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Device::Completion> all_;
};

/// Page-aligned memory, like the mapping of a pool.
class PoolMemory {
 public:
  explicit PoolMemory(std::size_t bytes) {
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    bytes_ = {static_cast<std::byte*>(memory), bytes};
  }
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;
  ~PoolMemory() { ::munmap(bytes_.data(), bytes_.size()); }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

struct CudaShape {
  std::size_t segments = 3;
  std::size_t segment_bytes = 512;
  std::size_t blocks = 16;
  std::size_t gap_bytes = 64;
};

/// Small staging and ranges, so that a few pages go through all of them.
inline CudaDevice::Options small_options() {
  return {.staging_bytes = 256 << 10, .slice_bytes = 64 << 10, .register_bytes = 64 << 10};
}

/// The same with so many batches in each direction.
inline CudaDevice::Options limited_options(std::size_t max_batches) {
  CudaDevice::Options options = small_options();
  options.max_batches = max_batches;
  return options;
}

struct CudaFixture {
  explicit CudaFixture(const CudaShape& shape = {},
                       const CudaDevice::Options& options = small_options(),
                       std::shared_ptr<cuda::Driver> over = driver_under_test())
      : driver(std::move(over)),
        memory(driver, shape.segments, shape.segment_bytes, shape.blocks, shape.gap_bytes),
        page_bytes(memory.layout().page_bytes()),
        slot_bytes(slot_bytes_for(page_bytes)),
        pool(slot_bytes * shape.blocks),
        device(CudaDevice::create(options, driver).value()) {
    REQUIRE(device->attach(memory.layout(), pool.bytes(), completions.sink()));
  }

  [[nodiscard]] Device::Batch batch(std::uint64_t ticket, Device::Direction direction,
                                    const std::vector<std::uint32_t>& blocks) const {
    Device::Batch batch{ticket, direction, Device::Event::kNow, {}};
    for (const std::uint32_t block : blocks) batch.copies.push_back({block, block * slot_bytes});
    return batch;
  }
  [[nodiscard]] std::span<std::byte> page(std::uint32_t slot) const {
    return pool.bytes().subspan(slot * slot_bytes, page_bytes);
  }

  std::shared_ptr<cuda::Driver> driver;
  DeviceMemory memory;
  std::uint64_t page_bytes;
  std::uint64_t slot_bytes;
  PoolMemory pool;
  CudaCompletions completions;
  std::unique_ptr<CudaDevice> device;
};

inline bool has_kernels() { return !cuda::kernel_image().empty(); }

}  // namespace pegaflow::testing
