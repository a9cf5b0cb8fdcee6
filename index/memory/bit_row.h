#pragma once
/// \file
/// Rows of bits, as spans of 64-bit words.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pegaflow::index {

using Row = std::span<std::uint64_t>;
using ConstRow = std::span<const std::uint64_t>;

inline bool has_bit(ConstRow row, std::uint32_t bit) {
  return (row[bit / 64] >> bit % 64 & 1U) != 0;
}
inline void set_bit(Row row, std::uint32_t bit) { row[bit / 64] |= std::uint64_t{1} << bit % 64; }
inline void clear_bit(Row row, std::uint32_t bit) {
  row[bit / 64] &= ~(std::uint64_t{1} << bit % 64);
}

/// Calls `use(bit)` for each bit of `word`, the 64 bits from `first` on.
template <typename Use>
void each_bit(std::uint64_t word, std::uint32_t first, const Use& use) {
  for (; word != 0; word &= word - 1) {
    use(first + static_cast<std::uint32_t>(std::countr_zero(word)));
  }
}

/// Calls `use(bit)` for each bit of `row`.
template <typename Use>
void each_bit(ConstRow row, const Use& use) {
  for (std::size_t i = 0; i < row.size(); ++i)
    each_bit(row[i], static_cast<std::uint32_t>(i * 64), use);
}

}  // namespace pegaflow::index
