#pragma once
/// \file
/// The numbers that /metrics prints. Plain values without KJ.

#include <cstdint>
#include <optional>

#include "server/cache/cache_stats.h"
#include "server/chains/prompt_chains.h"
#include "server/direct/direct_stats.h"
#include "server/http/http_counters.h"
#include "server/http/nodes_report.h"
#include "server/pool/kept_report.h"
#include "server/prefetch/prefetch_types.h"
#include "server/rpc/rpc_counters.h"
#include "server/ssd/ssd_report.h"

namespace pegaflow::server {

/// Everything that /metrics prints.
struct Snapshot {
  CacheStats cache;
  RpcCounters rpc;
  std::uint64_t pool_bytes = 0;
  std::uint64_t pool_page_bytes = 0;   ///< Size of the memory's pages: 4 KiB or huge.
  std::uint64_t pool_huge_bytes = 0;   ///< Bytes on huge pages, reserved or not.
  double oldest_pin_seconds = 0;       ///< 0 without a pin.
  double oldest_lease_seconds = 0;     ///< 0 without a lease.
  std::optional<NodesReport> nodes{};  ///< With other nodes only.
  std::optional<SsdReport> ssd{};      ///< With an SSD tier only.
  std::optional<KeptReport> kept{};    ///< With --keep only.
  PrefetchStats prefetches{};
  DirectStats direct{};
  std::size_t journal_readers = 0;  ///< Requests that wait for the journal.
  PromptChains::Stats chains{};
  HttpCounters http{};  ///< Filled in by the HTTP thread.
};

}  // namespace pegaflow::server
