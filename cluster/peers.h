#pragma once
/// \file
/// All other nodes of the cluster: a list of addresses, each queried directly.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "cluster/peer_link.h"

namespace pegaflow::cluster {

/// The links to the peers, and requests to all of them at once.
///
/// A request is sent to each ready peer, so the number of requests that one lookup may cause bounds
/// the number of nodes: docs/nodes.md. Thread-bound: the RPC thread.
class Peers final : public Lenders, private kj::TaskSet::ErrorHandler {
 public:
  static constexpr std::size_t kMaxPeers = 64;

  struct Options {
    std::vector<std::string> addresses;  ///< At most kMaxPeers.
    PeerLink::Options link{};            ///< For each link, except for the address.
  };

  /// All arguments outlive it. `changed` is called after the state of a peer has changed. Dials at
  /// once.
  Peers(kj::AsyncIoContext& io, const OwnNode& own, Epochs& epochs, const Options& options,
        Lanes& lanes, const std::function<void()>& changed);

  /// False also until the first attempt to reach each peer is over: a restarted node requests no
  /// blocks before all reachable peers have sent it their epochs.
  [[nodiscard]] bool has_ready() const override;

  [[nodiscard]] const std::vector<std::unique_ptr<PeerLink>>& links() const noexcept {
    return links_;
  }

  /// Whether a link leads to that node, or is configured with that address and not connected.
  [[nodiscard]] bool names(const Id128& node, const std::string& address) const;

  /// Waits for a job at that incarnation of a node; see PeerLink::await_job. Errors: kGone when no
  /// link leads to that node, or it is lost meanwhile; kRefused when it is too old; kTimeout and
  /// kBusy.
  kj::Promise<JobsReached> await_job(const Id128& node, const JobId& job, Duration patience,
                                     bool begun = false);

  /// The link that leads to that incarnation of a node and is ready; null: there is none.
  [[nodiscard]] PeerLink* ready_link(const Id128& node) const;

  using Waits = PeerWaits;
  [[nodiscard]] const Waits& waits() const noexcept { return waits_; }

 private:
  std::uint64_t& counter_of(Errc code);
  void taskFailed(kj::Exception&& exception) override;

  std::vector<std::unique_ptr<PeerLink>> links_;
  Waits waits_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::cluster
