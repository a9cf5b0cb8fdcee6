#pragma once
/// \file
/// The statistics of fetches, for metrics: plain values without KJ.

#include <cstdint>

namespace pegaflow::server {

/// Counts since the start of the server; see Fetches.
struct FetchStats {
  std::uint64_t claims = 0;         ///< Claims that queried the source.
  std::uint64_t claims_coming = 0;  ///< Those of `claims` that got blocks from it.
  std::uint64_t lookups = 0;        ///< Lookups that queried the source.
  std::uint64_t blocks = 0;         ///< Blocks that arrived.
  std::uint64_t bytes = 0;          ///< Bytes of `blocks`.
  std::uint64_t restored_blocks =
      0;                            ///< Blocks that disks of this node delivered, not in `blocks`.
  std::uint64_t staged_blocks = 0;  ///< Blocks that those delivered for other nodes.
  std::uint64_t given_up = 0;       ///< Blocks that were to be fetched and did not arrive.
  std::uint64_t declined = 0;       ///< Blocks not fetched: computing should be faster.
  std::uint64_t hinted = 0;         ///< Searches at the nodes that a router named.
  std::uint64_t wrong_hints = 0;    ///< Those of `hinted` that found nothing there.
  std::uint64_t unwanted = 0;  ///< Blocks not read because no claim waited for them any longer.
  std::uint64_t retried = 0;   ///< Blocks requested from another owner.
  /// Those of `given_up` whose frames a device could still write to: they were quarantined.
  std::uint64_t unquiesced = 0;

  // Blocks that workers read out of the pools of other nodes themselves.
  std::size_t pool_claims = 0;           ///< Claims with such blocks, now.
  std::size_t pool_reads = 0;            ///< Reads of workers in flight, now.
  std::uint64_t pool_blocks = 0;         ///< Blocks that they read and their owner confirmed,
  std::uint64_t pool_bytes = 0;          ///< and their bytes.
  std::uint64_t pool_unconfirmed = 0;    ///< Blocks that they read and their owner did not confirm.
  std::uint64_t pool_through_local = 0;  ///< Blocks that were then fetched into this node's pool.
};

}  // namespace pegaflow::server
