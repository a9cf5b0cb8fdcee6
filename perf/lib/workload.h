#pragma once
/// \file
/// What several subcommands do to a server before they measure it.

#include <cstdint>

#include "base/error.h"
#include "harness/wire_client.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {

/// The page of runs that are about the index and not about bytes: a million blocks fit a small
/// machine's memory.
inline constexpr std::uint64_t kSmallPageBytes = 4096;

/// Keys of one reserve call, and blocks of one job: 64 Ki tokens in blocks of 16.
inline constexpr std::size_t kJobBlocks = 4096;

/// A pool that holds `blocks` pages of kSmallPageBytes, with some room so that none is evicted.
[[nodiscard]] std::uint64_t pool_bytes_for(std::uint64_t blocks);

/// Seals keys 0 to `blocks` of `keys` without writing a byte of them. `next_job` is counted up.
/// Errors: the server's; kOutOfCapacity when a key got no slot.
Result<void> fill(harness::WireClient& client, const KeySource& keys, std::uint64_t blocks,
                  std::uint64_t& next_job);

}  // namespace pegaflow::perf
