#pragma once
/// \file
/// The load that an engine reports in its page /metrics.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "index/placement/decision.h"

namespace pegaflow::router {

/// The maximum size of an engine's page: vLLM's has some 60 KB for each rank.
inline constexpr std::size_t kMaxEngineMetrics = std::size_t{4} << 20U;

struct RankLoad {
  std::uint32_t rank = 0;  ///< Data-parallel rank.
  index::EngineLoad load{};
};

/// The load of each rank in a page of vLLM (`vllm:num_requests_waiting`, `_running`,
/// `kv_cache_usage_perc`) or SGLang (`sglang:num_queue_reqs`, `num_running_reqs`, `token_usage`).
/// Samples that are not numbers, and ranks above 1,023, are left out; empty for another page.
std::vector<RankLoad> read_engine_load(std::string_view page);

}  // namespace pegaflow::router
