// In a file of its own: the hash of a row has a fixed length, for which the compiler folds the
// branches of XXH3 if it has the functions here instead of in the library. Each publish and
// adoption computes it for each block.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define XXH_INLINE_ALL  // NOLINT(readability-identifier-naming)
#include <xxhash.h>

#include "engine/kept/kept_tables.h"

namespace pegaflow::engine {

std::uint64_t row_proof(const Block& block, std::uint32_t row,
                        std::uint64_t extent_serial) noexcept {
  // Whole words: the hash reads words, and two halves that were just stored are not forwarded to
  // it.
  struct Covered {
    BlockKey key;
    std::uint64_t extent = 0;
    std::uint64_t row_and_space = 0;
    std::uint64_t owner_and_second = 0;
  };
  static_assert(sizeof(Covered) == 56 && std::has_unique_object_representations_v<Covered>);
  const auto pair = [](std::uint32_t first, std::uint32_t second) {
    return std::uint64_t{second} << 32U | first;
  };
  const Covered covered{.key = block.key,
                        .extent = extent_serial,
                        .row_and_space = pair(row, static_cast<std::uint32_t>(block.space)),
                        .owner_and_second = pair(block.owner, block.sealed_s)};
  return std::max<std::uint64_t>(1, XXH3_64bits_withSeed(&covered, sizeof covered, 0));
}

}  // namespace pegaflow::engine
