#pragma once
/// \file
/// The KV cache of a CPU engine, and a pool mapped as a client maps it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
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

  Mapping() = default;  ///< Empty.
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
/// Movable. Thread-bound, but devices copy the bytes.
class EngineMemory {
 public:
  struct Options {
    std::size_t segments = 1;       ///< Allocations, each with one segment of every block.
    std::size_t segment_bytes = 0;  ///< Bytes of a block in each allocation.
    std::size_t blocks = 0;
    std::size_t gap_bytes = 0;  ///< Between two blocks of an allocation; no copy may touch them.
  };
  /// Every page of the memory is present.
  /// Errors: kOutOfCapacity without memory; as PageLayout::create().
  static Result<EngineMemory> create(const Options& options);

  [[nodiscard]] const PageLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::size_t blocks() const noexcept { return options_.blocks; }

  /// Fills a block with the pattern of `seed`.
  void fill(std::uint32_t block, std::uint64_t seed);
  /// Fills every block with the pattern of pattern_seed(salt, block).
  void fill_all(std::uint64_t salt);
  /// Whether a block holds the pattern of `seed`.
  [[nodiscard]] bool holds(std::uint32_t block, std::uint64_t seed) const;
  /// Whether all bytes between the blocks are unchanged.
  [[nodiscard]] bool gaps_are_whole() const;
  /// Sets all blocks and gaps to zero.
  void clear();

  /// Copies a block to or from a page with memcpy: the bound of a device.
  void copy(std::uint32_t block, std::byte* page, Device::Direction direction) const;

 private:
  struct Free {
    void operator()(std::byte* bytes) const noexcept;
  };
  using Allocation = std::unique_ptr<std::byte[], Free>;

  EngineMemory(const Options& options, std::vector<Allocation> allocations, PageLayout layout)
      : options_(options), allocations_(std::move(allocations)), layout_(std::move(layout)) {}
  [[nodiscard]] std::span<std::byte> piece(std::size_t segment, std::uint32_t block) const;
  [[nodiscard]] std::size_t stride() const { return options_.segment_bytes + options_.gap_bytes; }

  Options options_;
  std::vector<Allocation> allocations_;
  PageLayout layout_;
};

}  // namespace pegaflow::harness
