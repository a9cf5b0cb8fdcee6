#pragma once
/// \file
/// A trace through simulated nodes, in virtual time.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "perf/placement/sim_policy.h"

namespace pegaflow::perf {

/// Classes of prompts by length: a p99 over all is that of the longest class alone.
struct LengthClass {
  const char* name;
  std::uint32_t below_tokens;
};
inline constexpr std::array<LengthClass, 4> kLengthClasses = {
    {{"below 4k", 4096}, {"4k to 16k", 16384}, {"16k to 64k", 65536}, {"above 64k", ~0U}}};

/// The outcome of one policy.
struct SimResult {
  std::string policy;
  std::string parameters;
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;
  std::uint64_t hits = 0;
  std::uint64_t gpu_hits = 0;
  std::uint64_t pulled = 0;
  std::uint64_t predicted = 0;     ///< Blocks that the policy expected as hits.
  std::uint64_t mispredicted = 0;  ///< Sum of |expected - hits| in blocks.
  std::vector<double> ttft;        ///< Seconds, in the order of the requests.
  std::array<std::vector<double>, kLengthClasses.size()> ttft_of_class;
  double load_variation = 0;  ///< Standard deviation over mean of the nodes' prefill time.
  double utilization = 0;     ///< Mean share of the time in which the engines computed.

  [[nodiscard]] double hit_rate() const { return share(hits); }
  [[nodiscard]] double pulled_rate() const { return share(pulled); }
  [[nodiscard]] double mean_ttft() const;

 private:
  [[nodiscard]] double share(std::uint64_t part) const {
    return blocks == 0 ? 0 : static_cast<double>(part) / static_cast<double>(blocks);
  }
};

/// Sends all requests through `policy` to `nodes` new nodes.
SimResult simulate(const std::vector<PlaceRequest>& requests, SimPolicy& policy, std::size_t nodes,
                   const SimHardware& hardware);

}  // namespace pegaflow::perf
