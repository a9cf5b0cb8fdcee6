#pragma once
/// \file
/// The invariants between the tables of the store, for tests and simulations.

#include "base/error.h"
#include "engine/rights/claim_table.h"
#include "engine/rights/holder_table.h"
#include "engine/rights/job_table.h"
#include "engine/rights/lease_table.h"
#include "engine/rights/pin_table.h"
#include "engine/store/resident_blocks.h"
#include "engine/store/work_queue.h"

namespace pegaflow::engine {

/// Compares what each table counts with the rows of the others, in O(frames). Only reads.
class StoreCheck {
 public:
  struct Tables {
    const HolderTable& holders;
    const ClaimTable& claims;
    const PinTable& pins;
    const JobTable& jobs;
    const LeaseTable& leases;
    const ResidentBlocks& blocks;
    const WorkQueue& queue;
  };
  explicit StoreCheck(const Tables& tables) : store_(tables) {}

  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] Result<void> run() const;

 private:
  [[nodiscard]] Result<void> check_holds() const;
  [[nodiscard]] Result<void> check_jobs() const;
  [[nodiscard]] Result<void> check_leases() const;
  [[nodiscard]] Result<void> check_shares() const;

  const Tables store_;
};

}  // namespace pegaflow::engine
