#pragma once
/// \file
/// Blocks that engines will have because requests were placed there, before their events arrive.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "index/placement/record.h"

namespace pegaflow::index {

/// Remembers for some seconds which engine a prompt was sent to, so that requests with the same
/// beginning follow it although its blocks are not announced yet. It is a guess for the engine's
/// own caches only: other engines cannot pull blocks that are still being computed.
///
/// Two generations: entries live between `lifetime` and twice that, and beyond `max_blocks` in one
/// generation the older one is dropped early. A cell holds the two engines that were last chosen.
///
/// Thread-bound; allocates in create() only.
class ExpectedBlocks {
 public:
  struct Options {
    std::size_t max_blocks = 1U << 17;  ///< Cells of each generation; 1,024 to 2^26.
    /// A prompt has cells for its first 16 blocks, which others may share, for each stride-th one
    /// behind them, and for its last one; 8 blocks of 16 tokens are fine enough.
    std::size_t stride = 8;
    Duration lifetime = std::chrono::seconds(60);  ///< Above the longest wait of a request.
  };
  /// Errors: kInvalidArgument that names the option and its range.
  static Result<ExpectedBlocks> create(const Options& options);

  /// The blocks of a prompt that was placed on an engine, in chain order, as keys of the index.
  void placed(EngineId engine, std::span<const std::uint64_t> chain, TimePoint now);
  /// The engine announced that it evicted these blocks.
  void erased(EngineId engine, std::span<const std::uint64_t> keys);
  /// Drops what was expected of an engine: it restarted, failed, or is gone.
  void forget(EngineId engine);

  /// Raises `blocks[e]` to the length of the prefix of `chain` that engine e is expected to hold.
  void match(std::span<const std::uint64_t> chain, TimePoint now,
             std::span<std::uint32_t> blocks) const;

 private:
  struct Cell {
    std::uint64_t key = 0;
    std::uint32_t newer = kNoEngine;
    std::uint32_t older = kNoEngine;
  };
  struct Generation {
    std::vector<Cell> cells;
    std::vector<std::uint32_t> used;  ///< Cells in use.
    TimePoint began{};
  };
  explicit ExpectedBlocks(const Options& options);
  /// The cell of a key, or the empty one where it belongs.
  [[nodiscard]] std::size_t place(const Generation& generation, std::uint64_t key) const noexcept;
  static void drop(Cell& cell, EngineId engine) noexcept;
  void turn(TimePoint now);

  Options options_;
  Generation current_;
  Generation previous_;
  std::size_t mask_ = 0;
};

}  // namespace pegaflow::index
