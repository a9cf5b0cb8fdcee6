#pragma once
/// \file
/// The policies that are compared: PegaFlow's, and simple ones that stand beside it.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "perf/placement/sim_node.h"

namespace pegaflow::perf {

/// Where a request goes.
struct SimChoice {
  std::uint32_t node = 0;
  std::int64_t source = -1;            ///< The node to pull from; -1: none.
  std::uint32_t predicted_blocks = 0;  ///< Blocks that are expected not to be computed.
};

/// One policy in front of the nodes. It sees the nodes as they are, without delay, except for
/// PegaFlow's, which sees what its messages told. Thread-bound.
class SimPolicy {
 public:
  SimPolicy() = default;
  virtual ~SimPolicy() = default;
  SimPolicy(const SimPolicy&) = delete;
  SimPolicy& operator=(const SimPolicy&) = delete;

  /// Seconds for which the choice for the request waits, unless something happens before; 0: it is
  /// made now.
  virtual double wait(std::uint64_t /*id*/, const PlaceRequest& /*request*/, double /*now*/) {
    return 0;
  }
  /// Chooses for the request number `id`.
  virtual SimChoice choose(std::uint64_t id, const PlaceRequest& request,
                           std::vector<SimNode>& nodes, double now) = 0;
  // Later events; the simple policies look at the nodes instead.
  virtual void first_token(std::uint64_t /*id*/, const PlaceRequest& /*request*/,
                           std::uint32_t /*node*/, const Served& /*served*/) {}
  virtual void done(std::uint64_t /*id*/, double /*now*/) {}
  virtual void changed(const BlockChanges& /*changes*/, double /*now*/) {}
  /// Called at least once in each simulated second, and before each choice.
  virtual void advance(std::vector<SimNode>& /*nodes*/, double /*now*/) {}
};

/// Dynamo's published cost, in blocks:
/// prefill_scale * max(prefill tokens in flight + prompt - credits, 0) / 512 + decode_scale *
/// blocks that decode there. A GPU hit gives full credit, a hit in the pool `pool_credit`.
struct DynamoWeights {
  double prefill_scale = 1;
  double decode_scale = 1;
  double pool_credit = 1;
};

/// A policy by name: round-robin, round-robin+pull, least-load, shortest-queue,
/// shortest-queue+pull, smg, llm-d. Errors: kInvalidArgument that lists the names.
Result<std::unique_ptr<SimPolicy>> make_simple_policy(std::string_view name, std::size_t nodes,
                                                      const SimHardware& hardware,
                                                      std::uint64_t seed);
std::unique_ptr<SimPolicy> make_dynamo_policy(const DynamoWeights& weights, std::uint64_t seed);

/// The parameters of a simple policy, for the report; empty: it has none.
std::string parameters_of(std::string_view name);

}  // namespace pegaflow::perf
