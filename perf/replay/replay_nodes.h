#pragma once
/// \file
/// A trace over several nodes whose network is simulated, beside one pool as large as all of
/// theirs.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/eviction/kind.h"
#include "perf/lib/figures.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// Which node gets a request.
enum class NodeChoice : std::uint8_t { kRoundRobin, kRandom };
/// Errors: kInvalidArgument that names what there is.
Result<NodeChoice> node_choice(const std::string& name);

struct NodesReplayOptions {
  std::size_t nodes = 8;
  std::uint64_t blocks = 5000;  ///< Of each node's pool.
  engine::EvictionKind eviction = engine::kDefaultEviction;
  NodeChoice choice = NodeChoice::kRoundRobin;
  std::uint64_t seed = 0;  ///< Of keys, and of choices.
};

/// What became of a trace over these nodes.
struct NodesReplayResult {
  std::uint64_t requests = 0;
  std::uint64_t asked = 0;    ///< Blocks.
  std::uint64_t found = 0;    ///< As a prefix, each request's: here or elsewhere.
  std::uint64_t brought = 0;  ///< From another node.
  std::uint64_t saved = 0;
  std::uint64_t evictions = 0;
  std::uint64_t evicted_replicas = 0;  ///< Of them.
  std::uint64_t replicas = 0;          ///< Of what is there at the end.

  [[nodiscard]] double hit_rate() const;
};

/// One request after the other through nodes of a SimCluster: claim, what is elsewhere is fetched,
/// open, every page looked at, release; save of the rest.
/// Errors: kCorrupt when a page has another block's bytes; kInternal when something is left at the
/// end; the services' own.
Result<NodesReplayResult> replay_over_nodes(const NodesReplayOptions& options,
                                            const RequestTrace& trace);

/// The hit rate of the nodes beside that of one node with as many blocks as all of them, of which
/// it is to be within a point; and where blocks came from.
std::vector<Figure> nodes_figures(const NodesReplayOptions& options, const RequestTrace& trace,
                                  const NodesReplayResult& nodes, const NodesReplayResult& one);

}  // namespace pegaflow::perf
