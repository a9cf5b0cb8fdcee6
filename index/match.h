#pragma once
/// \file
/// How much of a chain each holder has.

#include <cstdint>
#include <span>
#include <vector>

#include "index/holders.h"
#include "index/key.h"

namespace pegaflow::index {

struct Tables;

/// How much of a chain each holder has. Sized once; a match fills it without an allocation.
struct Match {
  explicit Match(std::uint32_t max_holders) : own(max_holders), near(max_holders) {}

  /// Blocks from the start of the chain that have a holder, not all the same one.
  std::uint32_t longest = 0;
  /// By holder: blocks from the start that it holds itself. 0 for numbers that are no holders.
  std::vector<std::uint32_t> own;
  /// By engine: blocks from the start that its GPU cache or its node's pool holds, mixed.
  std::vector<std::uint32_t> near;

  /// Blocks from the start of the chain in the GPU cache of `engine`.
  [[nodiscard]] std::uint32_t gpu(HolderId engine) const { return own[engine]; }
  /// Blocks from the start of the chain in the GPU cache of `engine` or in its node's pool.
  [[nodiscard]] std::uint32_t local(HolderId engine) const { return near[engine]; }
  /// Blocks from the start of the chain in the pool of `node`.
  [[nodiscard]] std::uint32_t pool(HolderId node) const { return own[node]; }
};

/// Follows a chain through the cells. Keeps its rows between calls. Thread-bound.
class Matcher {
 public:
  /// To be called when the rows of the sets became wider.
  void widen(std::size_t row_words) {
    own_.resize(row_words);
    near_.resize(row_words);
  }

  void match(const Tables& tables, std::span<const Key> chain, Match& out);

 private:
  void begin(const Tables& tables, std::uint32_t set);
  void narrow(const Tables& tables, std::uint32_t set, std::uint32_t length, Match& out);
  void end(const Tables& tables, std::uint32_t length, Match& out) const;

  std::vector<std::uint64_t> own_;   ///< By bit: the holders that had all blocks so far.
  std::vector<std::uint64_t> near_;  ///< By number: the engines for which they were all local.
};

}  // namespace pegaflow::index
