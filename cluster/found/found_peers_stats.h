#pragma once
/// \file
/// The statistics about links to named nodes, for metrics and /health: plain values without KJ.

#include <cstddef>
#include <cstdint>

namespace pegaflow::cluster {

/// The counters of FoundPeers.
struct FoundPeersStats {
  std::size_t links = 0;  ///< Not resting, now.
  std::size_t ready = 0;  ///< Ready, now.
  std::uint64_t dials = 0;
  std::uint64_t closed = 0;    ///< Links that were idle, or gave way to another node.
  std::uint64_t outside = 0;   ///< Addresses that are in none of the networks: not dialed.
  std::uint64_t withheld = 0;  ///< Nodes that were not dialed: too many dials, or no free link.
};

}  // namespace pegaflow::cluster
