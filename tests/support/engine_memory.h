#pragma once
/// \file
/// Memory like an engine's KV cache: some allocations, with a piece of each block in each.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/page_layout.h"

namespace pegaflow::testing {

/// Owns the memory. Thread-bound, but for the bytes, which devices copy.
class EngineMemory {
 public:
  /// `segments` pieces of `segment_bytes` a block, one allocation a segment; between two blocks of
  /// an allocation lie `gap_bytes` that no copy may touch.
  EngineMemory(std::size_t segments, std::size_t segment_bytes, std::size_t blocks,
               std::size_t gap_bytes = 64);

  [[nodiscard]] PageLayout layout() const;
  [[nodiscard]] std::size_t blocks() const noexcept { return blocks_; }

  /// Fills a block with bytes that follow from `seed`: equal seeds, equal bytes.
  void fill(std::uint32_t block, std::uint64_t seed);
  /// Whether a block holds what fill() wrote for `seed`.
  [[nodiscard]] bool holds(std::uint32_t block, std::uint64_t seed) const;
  /// Whether all bytes between the blocks are as they were.
  [[nodiscard]] bool gaps_are_whole() const;

 private:
  [[nodiscard]] std::byte* piece(std::size_t segment, std::uint32_t block) const;

  std::size_t segments_;
  std::size_t segment_bytes_;
  std::size_t blocks_;
  std::size_t stride_;
  std::vector<std::unique_ptr<std::byte[]>> allocations_;
};

/// Writes what fill() writes into any page: the same bytes in the same order.
void fill_page(std::byte* page, std::size_t bytes, std::uint64_t seed);

}  // namespace pegaflow::testing
