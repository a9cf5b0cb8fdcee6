#pragma once
/// \file
/// The memory of one end of `pegaflow-perf net`: the host's or a GPU's.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "harness/engine_memory.h"
#include "transport/cuda/driver.h"
#include "transport/memory.h"

namespace pegaflow::perf {

/// Reads "host", "cuda" or "cuda:1": the number of the GPU, or no value for the host.
/// Errors: kInvalidArgument for another text.
Result<std::optional<int>> parse_memory(std::string_view text);

/// A GPU whose primary context is retained as long as this lives. Thread-safe.
class NetGpu {
 public:
  /// Errors: kRefused without a driver or without this GPU; CUDA's.
  static Result<std::shared_ptr<NetGpu>> open(int ordinal);
  /// The same with another driver, for tests.
  static Result<std::shared_ptr<NetGpu>> open(std::shared_ptr<cuda::Driver> driver, int ordinal);
  ~NetGpu();
  NetGpu(const NetGpu&) = delete;
  NetGpu& operator=(const NetGpu&) = delete;

  /// Makes its context current on the calling thread, for good. Errors: CUDA's.
  Result<void> make_current();
  [[nodiscard]] cuda::Driver& driver() const noexcept { return *driver_; }
  [[nodiscard]] cuda::Context context() const noexcept { return context_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

 private:
  NetGpu(std::shared_ptr<cuda::Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {}
  const std::shared_ptr<cuda::Driver> driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
};

/// An allocation, freed by its destructor. Thread-bound, but a Fabric accesses its bytes.
class NetMemory {
 public:
  /// Zeroed memory of the host, or of `gpu` unless it is null. Errors: the kernel's; CUDA's.
  static Result<std::unique_ptr<NetMemory>> create(std::shared_ptr<NetGpu> gpu, std::size_t bytes);
  ~NetMemory();
  NetMemory(const NetMemory&) = delete;
  NetMemory& operator=(const NetMemory&) = delete;

  /// The range, for Fabric::register_region().
  [[nodiscard]] Memory memory() const;
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  /// The bytes of host memory; empty with a GPU.
  [[nodiscard]] std::span<std::byte> host_bytes() const noexcept { return host_.bytes(); }

  Result<void> clear();
  /// Fills it with bytes that differ between places and between seeds. Errors: CUDA's.
  Result<void> fill(std::uint64_t seed);
  /// Compares the first `bytes` with those of fill(). Errors: kCorrupt, which names the first byte
  /// that differs; CUDA's.
  Result<void> compare(std::uint64_t seed, std::size_t bytes);

 private:
  explicit NetMemory(std::shared_ptr<NetGpu> gpu, std::size_t bytes)
      : gpu_(std::move(gpu)), size_bytes_(bytes) {}
  Result<void> allocate();
  Result<void> copy(cuda::Direction direction, std::span<std::byte> host, std::uint64_t at);
  template <typename Use>
  Result<void> for_each_part(std::size_t bytes, const Use& use);

  const std::shared_ptr<NetGpu> gpu_;
  const std::size_t size_bytes_;
  harness::Mapping host_;
  cuda::DeviceAddress on_gpu_ = 0;
  cuda::Stream stream_ = nullptr;
};

}  // namespace pegaflow::perf
