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
#include "transport/cuda/gpu.h"
#include "transport/memory.h"

namespace pegaflow::perf {

/// Reads "host", "cuda" or "cuda:1": the number of the GPU, or no value for the host.
/// Errors: kInvalidArgument for another text.
Result<std::optional<int>> parse_memory(std::string_view text);

/// Opens a GPU of this machine. Errors: kRefused without a driver or without this GPU; CUDA's.
Result<std::shared_ptr<cuda::Gpu>> open_gpu(int ordinal);

/// An allocation, freed by its destructor. Thread-bound, but a Fabric accesses its bytes.
class NetMemory {
 public:
  /// Zeroed memory of the host, or of `gpu` unless it is null. Errors: the kernel's; CUDA's.
  static Result<std::unique_ptr<NetMemory>> create(std::shared_ptr<cuda::Gpu> gpu,
                                                   std::size_t bytes);

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
  explicit NetMemory(std::size_t bytes) : size_bytes_(bytes) {}
  template <typename Use>
  Result<void> for_each_part(std::size_t bytes, const Use& use);

  const std::size_t size_bytes_;
  harness::Mapping host_;
  std::unique_ptr<cuda::GpuMemory> gpu_;  ///< Null: it is the host's.
};

}  // namespace pegaflow::perf
