#pragma once
/// \file
/// The runs of `pegaflow-perf place`: each policy over the same requests.

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "perf/placement/sim_fleet.h"
#include "perf/placement/simulation.h"

namespace pegaflow::perf {

struct PlaceOptions {
  std::size_t nodes = 8;
  SimHardware hardware;
  /// Routers of PegaFlow's policy. When this differs from one router with immediate events, that
  /// ideal runs too, as the bound.
  SimRouters routers;
  std::vector<std::string> policies;
  std::uint64_t seed = 1;
};

/// Names of the rows of PegaFlow's policy.
inline constexpr const char* kPegaflow = "pegaflow";
inline constexpr const char* kPegaflowAsGiven = "pegaflow, as given";

struct PlaceOutcome {
  std::uint64_t requests = 0;
  double seconds = 0;        ///< Virtual time from the first arrival to the last.
  double ceiling = 0;        ///< Hits of one shared cache with the blocks of all pools.
  double wider_ceiling = 0;  ///< The same with the blocks of all pools and GPUs.
  std::vector<SimResult> results;
};

/// Runs all policies. `dynamo` is run with each of its weights and reported with those that have
/// the least mean time to the first token. Errors: kInvalidArgument for an unknown policy or no
/// request.
Result<PlaceOutcome> run_policies(const std::vector<PlaceRequest>& requests,
                                  const PlaceOptions& options);

/// All names, for the help text.
std::string place_policy_names();

}  // namespace pegaflow::perf
