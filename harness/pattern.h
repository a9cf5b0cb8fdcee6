#pragma once
/// \file
/// Test patterns: bytes that follow from a seed, for checks of copies.

#include <cstddef>
#include <cstdint>
#include <span>

namespace pegaflow::harness {

/// Fills `bytes` with the pattern of `seed` from `offset` on; `offset` is a multiple of 8. Equal
/// seeds give equal bytes.
void write_pattern(std::span<std::byte> bytes, std::uint64_t seed, std::uint64_t offset = 0);

/// Whether `bytes` are the pattern of `seed` from `offset` on.
bool is_pattern(std::span<const std::byte> bytes, std::uint64_t seed, std::uint64_t offset = 0);

/// A seed for block `block` in the round `salt`; it differs between blocks and between rounds.
std::uint64_t pattern_seed(std::uint64_t salt, std::uint64_t block);

}  // namespace pegaflow::harness
