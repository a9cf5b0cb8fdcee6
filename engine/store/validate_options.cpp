#include "engine/store/validate_options.h"

#include <cstdint>

#include "base/page_layout.h"
#include "engine/rights/lease_table.h"
#include "engine/tables/block_row.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

namespace {

constexpr std::uint32_t kMaxRows = std::uint32_t{1} << 31;
constexpr std::uint64_t kMaxPoolBytes = kMaxRows * kSlotAlignment;

bool is_share(double share) noexcept { return share > 0.0 && share <= 1.0; }

}  // namespace

Result<void> validate_options(const BlockStore::Options& options) {
  if (options.pool_bytes < kSlotAlignment || options.pool_bytes > kMaxPoolBytes) {
    return fail(Errc::kInvalidArgument, "a pool has {} to {} bytes, not {}", kSlotAlignment,
                kMaxPoolBytes, options.pool_bytes);
  }
  if (options.numa_nodes == 0 || options.numa_nodes > kMaxNumaNodes) {
    return fail(Errc::kInvalidArgument, "a pool lies on 1 to {} NUMA nodes, not {}", kMaxNumaNodes,
                options.numa_nodes);
  }
  if (!is_share(options.instance_share) || !is_share(options.server_share)) {
    return fail(Errc::kInvalidArgument, "a share is above 0 and at most 1, not {} and {}",
                options.instance_share, options.server_share);
  }
  if (options.reservation_timeout <= Duration::zero() || options.claim_grace < Duration::zero()) {
    return fail(Errc::kInvalidArgument,
                "reservation_timeout is positive, and claim_grace is not negative");
  }
  if (options.slice_blocks == 0) return fail(Errc::kInvalidArgument, "a slice has 1 block or more");
  for (const double share : {options.fetch_share, options.save_reserve, options.lend_share}) {
    if (share != 0.0 && !is_share(share)) {
      return fail(Errc::kInvalidArgument, "shares of fetches and leases are 0 to 1, not {}", share);
    }
  }
  if (options.longest_lease <= Duration::zero() || options.lease_margin < Duration::zero()) {
    return fail(Errc::kInvalidArgument,
                "longest_lease is positive, and lease_margin is not negative");
  }
  if (options.max_leases == 0 || options.max_leases > 1U << LeaseTable::kRowBits) {
    return fail(Errc::kInvalidArgument, "there are 1 to {} leases, not {}",
                1U << LeaseTable::kRowBits, options.max_leases);
  }
  for (const std::uint32_t rows :
       {options.max_claims, options.max_pins, options.max_reservations}) {
    if (rows == 0 || rows > kMaxRows) {
      return fail(Errc::kInvalidArgument, "a table has 1 to {} rows, not {}", kMaxRows, rows);
    }
  }
  if (std::uint64_t{options.max_claims} + options.max_pins + options.max_leases > kMaxHolds) {
    return fail(Errc::kInvalidArgument,
                "there are at most {} claims, pins and leases, not {}, {} and {}", kMaxHolds,
                options.max_claims, options.max_pins, options.max_leases);
  }
  return {};
}

}  // namespace pegaflow::engine
