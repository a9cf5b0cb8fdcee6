#include "index/same_run.h"

#include <algorithm>
#include <cstddef>

namespace pegaflow::index {
namespace {

// Vectors as wide as the processor's, in memory that is aligned to its elements only.
using Keys4 [[gnu::vector_size(32), gnu::aligned(8), gnu::may_alias]] = std::uint64_t;
using Words8 [[gnu::vector_size(32), gnu::aligned(4), gnu::may_alias]] = std::uint32_t;

constexpr std::size_t kAtOnce = 32;

/// How many cells of the whole groups of 32 in `count` agree.
[[gnu::always_inline]] inline std::size_t same_groups(const Key* keys, const CellWord* words,
                                                      const Key* chain, std::size_t count,
                                                      SetId set) {
  std::size_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    Keys4 other_keys = {};
    Words8 other_sets = {};
    for (std::size_t j = i; j < i + kAtOnce; j += 4) {
      other_keys |=
          *reinterpret_cast<const Keys4*>(keys + j) ^ *reinterpret_cast<const Keys4*>(chain + j);
    }
    for (std::size_t j = i; j < i + kAtOnce; j += 8) {
      other_sets |= *reinterpret_cast<const Words8*>(words + j) ^ set;
    }
    other_keys |= reinterpret_cast<Keys4>(other_sets & CellWord::kSetMask);
    if ((other_keys[0] | other_keys[1] | other_keys[2] | other_keys[3]) != 0) break;
  }
  return i;
}

std::size_t same_groups_anywhere(const Key* keys, const CellWord* words, const Key* chain,
                                 std::size_t count, SetId set) {
  return same_groups(keys, words, chain, count, set);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] std::size_t same_groups_avx2(const Key* keys, const CellWord* words,
                                                     const Key* chain, std::size_t count,
                                                     SetId set) {
  return same_groups(keys, words, chain, count, set);
}

const auto kSameGroupsHere =
    __builtin_cpu_supports("avx2") ? same_groups_avx2 : same_groups_anywhere;
#else
constexpr auto kSameGroupsHere = same_groups_anywhere;
#endif

}  // namespace

std::uint32_t same_run(const Cells& cells, Place place, std::span<const Key> chain, SetId set) {
  const Key* const keys = cells.keys() + place;
  const CellWord* const words = cells.words() + place;
  const std::size_t most = std::min<std::size_t>(chain.size(), cells.last_place() - place + 1);
  std::size_t i = kSameGroupsHere(keys, words, chain.data(), most, set);
  while (i < most && keys[i] == chain[i] && words[i].set() == set) ++i;
  return static_cast<std::uint32_t>(i);
}

}  // namespace pegaflow::index
