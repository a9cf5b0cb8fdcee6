#pragma once
/// \file
/// Which anchors of a prompt are asked for: few, in two rounds.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/block_key.h"

namespace pegaflow::directory {

/// A block of a prompt that may be an anchor.
struct Candidate {
  std::uint32_t place = 0;  ///< The place of its key in the prompt.
  bool is_sure = false;     ///< Its owners announce it, wherever it is in their prompts.
  BlockKey key;
};

/// The possible anchors among `keys`, at most `most`: of a longer prompt the first ones.
std::vector<Candidate> candidates_of(std::span<const BlockKey> keys, std::size_t most = 512);

/// Limits of one lookup.
inline constexpr std::size_t kFirstProbes = 8;
inline constexpr std::size_t kMostProbes = 32;

/// The candidates of the first round, by index and in order: the first ones, then at doubling
/// distances, and the last one.
std::vector<std::size_t> first_probes(std::span<const Candidate> candidates);

/// Those of the second round, when `probed` were asked for and `found` says which have owners: the
/// ones behind the last that was found and before the next sure one that was not, spread evenly if
/// they are more than the limit. Empty: there is nothing more to learn.
std::vector<std::size_t> second_probes(std::span<const Candidate> candidates,
                                       std::span<const std::size_t> probed,
                                       const std::vector<bool>& found);

}  // namespace pegaflow::directory
