#pragma once
/// \file
/// All other nodes of the cluster: a list of addresses, each asked directly.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "server/peer_link.h"

namespace pegaflow {

/// The links to the peers, and questions to all of them at once.
///
/// A question goes to each peer that is ready, so that the number of nodes is bounded by what one
/// may ask at once: docs/nodes.md. Thread-bound: the RPC thread.
class Peers final : public Lenders, private kj::TaskSet::ErrorHandler {
 public:
  static constexpr std::size_t kMaxPeers = 64;

  struct Options {
    std::vector<std::string> addresses;  ///< At most kMaxPeers.
    PeerLink::Options link{};            ///< Of each, but for the address.
  };

  /// All outlive it. `changed` is called when the state of a peer has. Dials at once.
  Peers(kj::AsyncIoContext& io, const OwnNode& own, const Options& options, Fabric& fabric,
        const std::function<void()>& changed);

  [[nodiscard]] bool has_ready() const override;
  [[nodiscard]] const std::vector<std::unique_ptr<PeerLink>>& links() const noexcept {
    return links_;
  }

  /// Among equals the first in the list comes first.
  kj::Promise<std::vector<Owner>> owners(const Bytes32& space,
                                         std::span<const BlockKey> keys) override;

 private:
  void taskFailed(kj::Exception&& exception) override;

  std::vector<std::unique_ptr<PeerLink>> links_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow
