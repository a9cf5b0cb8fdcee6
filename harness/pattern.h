#pragma once
/// \file
/// Test patterns that differ between blocks, segments and rounds.

#include <cstddef>
#include <cstdint>
#include <span>

namespace pegaflow::harness {

/// Writes the pattern of one segment of one block in the round `salt`; no other has these bytes.
void write_pattern(std::span<std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                   std::size_t segment);
/// Whether `bytes` are those of such a segment from `offset` on. Sizes and offsets are multiples
/// of 8 bytes.
bool is_pattern(std::span<const std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                std::size_t segment, std::uint64_t offset = 0);

}  // namespace pegaflow::harness
