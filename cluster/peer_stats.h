#pragma once
/// \file
/// The statistics about other nodes, for metrics and /health: plain values without KJ.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/histogram.h"
#include "base/id128.h"

namespace pegaflow::cluster {

/// The state of a link to a peer.
enum class PeerState : std::uint8_t {
  kConnecting,  ///< Not connected; dialed again.
  kReady,
  kRefused,  ///< Another version, secret or backend: fix the configuration. Dialed again.
  kSelf,     ///< The address leads to this node. Dialed again.
};
std::string_view to_string(PeerState state) noexcept;

/// The statistics of a link to a peer.
struct PeerStats {
  PeerState state = PeerState::kConnecting;
  std::string why;    ///< Why it is not ready.
  std::string build;  ///< The peer's, once greeted.
  // Of a ready peer.
  Id128 node{};               ///< Its incarnation.
  std::uint16_t version = 0;  ///< The common version of peer.capnp.
  std::uint64_t greetings = 0;
  std::uint64_t failures = 0;       ///< Attempts without a greeting.
  std::uint64_t refusals = 0;       ///< Those of them that were rejected.
  std::uint64_t losses = 0;         ///< Losses of a ready peer.
  std::uint64_t late = 0;           ///< Requests without an answer in time.
  std::uint64_t withheld = 0;       ///< Requests not sent, since answers were overdue.
  std::string lane;                 ///< The lane in use, of a ready link.
  std::string lane_why;             ///< Why a better common lane is not used.
  std::uint64_t lane_failures = 0;  ///< Trials of a better lane that failed.
  std::uint64_t lane_falls = 0;     ///< Times that the better lane broke and sockets took over.
};

/// The counters of Peers::await_job().
struct PeerWaits {
  std::size_t waiting = 0;  ///< Now.
  // Since the start.
  std::uint64_t over = 0;
  std::uint64_t gone = 0;     ///< The engine or the node was lost meanwhile.
  std::uint64_t unknown = 0;  ///< No link leads to that node: nothing was sent.
  std::uint64_t timed_out = 0;
  std::uint64_t busy = 0;
  std::uint64_t refused = 0;  ///< The node is too old.
};

/// Limit of lanes between nodes.
inline constexpr std::size_t kMostLanes = 2;

/// Upper bounds of the times of reads, in seconds.
inline constexpr std::array<double, 12> kReadBounds = {20e-6,  50e-6, 100e-6, 200e-6, 500e-6, 1e-3,
                                                       2.5e-3, 5e-3,  10e-3,  50e-3,  250e-3, 1.0};

/// The statistics of PeerSource.
struct PeerSourceStats {
  std::uint64_t leases = 0;
  std::uint64_t pending = 0;      ///< Blocks that their owner first read from its disks.
  std::uint64_t outlived = 0;     ///< Blocks that arrived complete after the end of their lease.
  std::uint64_t unconfirmed = 0;  ///< Blocks whose owner did not confirm the lease.
  std::uint64_t corrupt = 0;      ///< Blocks with wrong bytes, by the lane's own checksum.
  std::array<std::uint64_t, kMostLanes> lane_bytes{};  ///< Confirmed bytes, by lane.
  std::size_t batches = 0;  ///< Queued, at the fabrics, or waiting for a confirmation; now.
  Duration oldest{};        ///< Age of the oldest read that is not quiesced; 0 without one.
  TimeHistogram<kReadBounds> duration;  ///< Reads, from the fabric's acceptance to the result.
};

}  // namespace pegaflow::cluster
