#pragma once
/// \file
/// The state of a pool that outlives its server, for /health and metrics: plain values.

#include <cstddef>
#include <cstdint>
#include <string>

namespace pegaflow::server {

struct KeptReport {
  bool has_keeper = false;
  std::string socket;                ///< The keeper's.
  std::string why_not;               ///< Why there is no keeper.
  std::uint64_t adopted_blocks = 0;  ///< Found in the pool at the start.
  std::uint64_t adopted_bytes = 0;
  std::uint64_t discarded_frames = 0;  ///< Used by blocks that were not whole, or cannot be found.
  double adopt_seconds = 0;
  std::size_t former_clients = 0;  ///< Clients of the former server that have not quiesced.
  bool waits_for_nodes = false;    ///< Adopted blocks wait for the epochs of other nodes.
};

}  // namespace pegaflow::server
