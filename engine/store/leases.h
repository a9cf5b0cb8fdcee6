#pragma once
/// \file
/// Blocks lent to other nodes.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/rights/lease_table.h"
#include "engine/rights/space_table.h"
#include "engine/store/reclaimer.h"
#include "engine/store/resident_blocks.h"

namespace pegaflow::engine {

/// Owns the leases. Thread-bound.
///
/// Functions with the name of one of BlockStore's are its implementation.
class Leases {
 public:
  /// All of them outlive it.
  Leases(const BlockStore::Options& options, const Clock& clock, ResidentBlocks& blocks,
         SpaceTable& spaces, Reclaimer& reclaimer);

  Result<BlockStore::Lent> lend(SpaceId space, std::span<const BlockKey> keys, Duration time);
  void end_lease(LeaseId lease);
  [[nodiscard]] bool is_lent(LeaseId lease) const;

  /// Ends expired leases, at most `slice_blocks`.
  void expire();
  /// When expire() has something to do; no value while nothing is lent.
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;

  /// Adds its part of the statistics.
  void report(BlockStore::Stats& stats) const;
  /// For checks and the memory of the tables.
  [[nodiscard]] const LeaseTable& table() const noexcept { return leases_; }

 private:
  struct Counters {
    std::uint64_t leases_made = 0;
    std::uint64_t leases_expired = 0;
    std::uint64_t leases_shortened = 0;
  };

  void end(std::uint32_t row);

  const BlockStore::Options& options_;
  const Clock& clock_;
  ResidentBlocks& blocks_;
  SpaceTable& spaces_;
  Reclaimer& reclaimer_;
  const std::uint64_t lend_limit_;  ///< Bytes of lent blocks: `lend_share`.
  LeaseTable leases_;
  Counters counted_;
};

}  // namespace pegaflow::engine
