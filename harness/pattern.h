#pragma once
/// \file
/// Bytes that tell blocks, segments and rounds apart, for checks of what was copied.

#include <cstddef>
#include <cstdint>
#include <span>

namespace pegaflow::harness {

/// What segment `segment` of block `block` holds in the round of `salt`: as bytes of no other.
void write_pattern(std::span<std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                   std::size_t segment);
/// Whether these are the bytes from `offset` on of such a segment. Both are in whole words of 8.
bool is_pattern(std::span<const std::byte> bytes, std::uint64_t salt, std::uint32_t block,
                std::size_t segment, std::uint64_t offset = 0);

}  // namespace pegaflow::harness
