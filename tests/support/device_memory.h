#pragma once
/// \file
/// Memory like an engine's KV cache, on a GPU: allocations that each hold a segment of every block.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/page_layout.h"
#include "transport/cuda/driver.h"

namespace pegaflow::testing {

/// Owns the memory, and a context to access it. Thread-bound; every call waits for its copies.
class DeviceMemory {
 public:
  /// As EngineMemory: `segments` segments of `segment_bytes` for each block, one allocation for
  /// each segment, and `gap_bytes` between two blocks that must stay unchanged.
  DeviceMemory(std::shared_ptr<cuda::Driver> driver, std::size_t segments,
               std::size_t segment_bytes, std::size_t blocks, std::size_t gap_bytes = 64);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  [[nodiscard]] PageLayout layout() const;

  /// All bytes of one allocation, with the gaps.
  [[nodiscard]] std::vector<std::byte> read(std::size_t segment) const;
  void write(std::size_t segment, std::span<const std::byte> bytes);

  /// Fills a block with the bytes of fill_page() for `seed`.
  void fill(std::uint32_t block, std::uint64_t seed);
  /// The blocks that do not hold fill_page(seeds[block]).
  [[nodiscard]] std::vector<std::uint32_t> wrong(const std::vector<std::uint64_t>& seeds) const;
  /// True if all bytes between the blocks are unchanged.
  [[nodiscard]] bool gaps_are_whole() const;

 private:
  const std::shared_ptr<cuda::Driver> driver_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  std::size_t segment_bytes_;
  std::size_t blocks_;
  std::size_t stride_;
  std::vector<cuda::DeviceAddress> allocations_;
};

}  // namespace pegaflow::testing
