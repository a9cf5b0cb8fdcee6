#pragma once
/// \file
/// Memory that a Fabric registers: where it lies, and which device owns it.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/error.h"

namespace pegaflow {

enum class MemoryKind : std::uint8_t {
  kHost,  ///< Ordinary memory of this process.
  kCuda,  ///< An allocation on an NVIDIA GPU: its bytes are not for the processor.
};

/// A contiguous range of memory of one kind. A plain value; host memory converts to it.
struct Memory {
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;
  int device = 0;  ///< With kCuda: the GPU, by CUDA's number in this process.

  Memory() = default;
  template <typename Bytes>
    requires std::convertible_to<Bytes, std::span<std::byte>>
  // A host caller passes what it has. NOLINTNEXTLINE(google-explicit-constructor,*-forwarding-*)
  Memory(Bytes&& host) {
    const std::span<std::byte> span = host;
    base = span.data();
    bytes = span.size();
  }

  /// `size` bytes at the device address `address`.
  static Memory cuda(std::uint64_t address, std::size_t size, int device) {
    Memory memory;
    // UCX takes addresses of all kinds as pointers. NOLINTNEXTLINE(performance-no-int-to-ptr)
    memory.base = reinterpret_cast<std::byte*>(address);
    memory.bytes = size;
    memory.kind = MemoryKind::kCuda;
    memory.device = device;
    return memory;
  }
};

/// A GPU for a Fabric. The creator of the Fabric has CUDA's driver and keeps the context; a backend
/// needs neither.
struct GpuContext {
  int device = 0;  ///< The GPU, by CUDA's number in this process.
  /// Makes the GPU's context current on the calling thread, for good.
  std::function<Result<void>()> make_current;
};

}  // namespace pegaflow
