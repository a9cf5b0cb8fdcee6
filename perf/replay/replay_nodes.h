#pragma once
/// \file
/// Replay of a trace over several nodes with a simulated network, beside one pool as large as
/// theirs together.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/eviction/kind.h"
#include "perf/lib/figures.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// How the node of a request is chosen.
enum class NodeChoice : std::uint8_t { kRoundRobin, kRandom };
/// Errors: kInvalidArgument, which names the choices.
Result<NodeChoice> node_choice(const std::string& name);

struct NodesReplayOptions {
  std::size_t nodes = 8;
  std::uint64_t blocks = 5000;  ///< Size of each node's pool.
  engine::EvictionKind eviction = engine::kDefaultEviction;
  NodeChoice choice = NodeChoice::kRoundRobin;
  std::uint64_t seed = 0;  ///< Seed of keys and choices.
};

/// The result of a trace over these nodes.
struct NodesReplayResult {
  std::uint64_t requests = 0;
  std::uint64_t asked = 0;    ///< Blocks requested.
  std::uint64_t found = 0;    ///< Blocks found as prefixes, on this node or another.
  std::uint64_t brought = 0;  ///< Blocks fetched from another node.
  std::uint64_t saved = 0;
  std::uint64_t evictions = 0;
  std::uint64_t evicted_replicas = 0;  ///< Evictions of replicas.
  std::uint64_t replicas = 0;          ///< Replicas left at the end.

  [[nodiscard]] double hit_rate() const;
};

/// Replays one request after the other over the nodes of a SimCluster: claims and fetches its
/// blocks, opens them, checks every page, releases them, and saves the rest.
/// Errors: kCorrupt when a page holds the bytes of another block; kInternal when work is left at
/// the end; those of the services.
Result<NodesReplayResult> replay_over_nodes(const NodesReplayOptions& options,
                                            const RequestTrace& trace);

/// The hit rate of the nodes beside that of one node with as many blocks as all of them, with a
/// target of one point below; and the origins of the blocks.
std::vector<Figure> nodes_figures(const NodesReplayOptions& options, const RequestTrace& trace,
                                  const NodesReplayResult& nodes, const NodesReplayResult& one);

}  // namespace pegaflow::perf
