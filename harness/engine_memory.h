#pragma once
/// \file
/// The KV cache of a CPU engine, and a pool mapped as a client maps it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"

namespace pegaflow::harness {

/// A mapping, unmapped by its destructor. Movable; thread-bound, but any thread may use the bytes.
class Mapping {
 public:
  /// Zeroed private memory with every page present. Errors: the kernel's.
  static Result<Mapping> anonymous(std::size_t bytes);
  /// A shared mapping of a memfd. Errors: the kernel's.
  static Result<Mapping> shared(int fd, std::size_t bytes);

  Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes_;
};

/// The blocks of an engine in one allocation per segment, as an engine has one or two per layer.
/// Block i lies at i * segment_bytes of each.
class EngineMemory {
 public:
  /// Errors: the kernel's when there is no memory; as PageLayout::create().
  static Result<EngineMemory> create(std::uint64_t page_bytes, std::uint64_t segment_bytes,
                                     std::uint64_t blocks);

  [[nodiscard]] const PageLayout& layout() const noexcept { return layout_; }

  /// Fills every block with bytes that differ from those of other blocks and other salts.
  void write_pattern(std::uint64_t salt);
  /// Whether `block` holds the bytes that write_pattern(salt) wrote to block `origin`.
  [[nodiscard]] bool has_pattern(std::uint32_t block, std::uint32_t origin,
                                 std::uint64_t salt) const;
  void clear();

  /// Copies a block to or from a page with memcpy: the bound of a device.
  void copy(std::uint32_t block, std::byte* page, Device::Direction direction) const;

 private:
  EngineMemory(std::vector<Mapping> allocations, PageLayout layout)
      : allocations_(std::move(allocations)), layout_(std::move(layout)) {}
  std::vector<Mapping> allocations_;
  PageLayout layout_;
};

/// Whether a page of the pool holds the segments that write_pattern(salt) wrote to block `origin`.
bool page_has_pattern(const PageLayout& layout, std::span<const std::byte> page,
                      std::uint32_t origin, std::uint64_t salt);

}  // namespace pegaflow::harness
