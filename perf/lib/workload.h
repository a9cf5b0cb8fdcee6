#pragma once
/// \file
/// Filling a server with blocks before it is measured.

#include <cstdint>
#include <span>

#include "base/error.h"
#include "harness/wire_client.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {

/// Page size of runs that measure the index, not bytes: a million blocks fit into the memory of a
/// small machine.
inline constexpr std::uint64_t kSmallPageBytes = 4096;

/// Keys of one reserve call, and blocks of one job: 64 Ki tokens in blocks of 16.
inline constexpr std::size_t kJobBlocks = 4096;

/// Size of a pool that holds `blocks` pages of kSmallPageBytes without evicting one.
[[nodiscard]] std::uint64_t pool_bytes_for(std::uint64_t blocks);

/// Seals keys 0 to `blocks` of `keys` without writing their pages. Increments `next_job`.
/// Errors: the server's; kOutOfCapacity when a key got no slot.
Result<void> fill(harness::WireClient& client, const KeySource& keys, std::uint64_t blocks,
                  std::uint64_t& next_job);

/// The length of the sealed prefix of `keys`. Errors: the server's; kRefused while the instance is
/// not complete, so that this is not measured as a miss.
Result<std::uint32_t> lookup(harness::WireClient& client, std::span<const BlockKey> keys);

}  // namespace pegaflow::perf
