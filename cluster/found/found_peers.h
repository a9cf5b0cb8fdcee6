#pragma once
/// \file
/// The nodes of a large cluster: listed ones, and ones that a directory names.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "cluster/found/found_peers_stats.h"
#include "cluster/found/networks.h"
#include "cluster/peers.h"

namespace pegaflow::cluster {

/// Before it asks nodes for blocks, it asks a directory which nodes those are, and asks them and
/// the nodes of the list. While the directory does not answer, it asks all nodes with a link.
///
/// Links to named nodes are dialed when they are needed, only within configured networks and at a
/// bounded rate, and closed when they were idle for a minute. When all `most_links` are in use, the
/// one that was not used for longest gives way, if that is 15 s: longer than any lease. A link is
/// never deleted, since leases and rates refer to it. Thread-bound: the RPC thread.
class FoundPeers final : public Lenders, private kj::TaskSet::ErrorHandler {
 public:
  struct Named {
    Id128 node;           ///< Its incarnation.
    std::string address;  ///< IP:PORT.
  };
  struct Finding {
    bool is_known = false;  ///< The directory has answered.
    std::vector<Named> nodes{};
  };
  using Find = std::function<kj::Promise<Finding>(const Bytes32&, std::span<const BlockKey>)>;

  struct Options {
    PeerLink::Options link{};
    Networks networks;
    std::size_t most_links = 128;
    Duration idle = std::chrono::seconds(60);
    Duration least_use = std::chrono::seconds(15);
    double dials_per_second = 16;  ///< And as many at once.
    /// How long a request waits for a link that it caused.
    Duration dial_patience = std::chrono::milliseconds(15);
    std::size_t most_holders = 16;  ///< Named nodes that holders() asks: those used last.
  };

  /// All arguments outlive it. `changed` as for Peers. `is_ready`: whether the directory would
  /// answer. `was_tried`: whether the first attempt to reach it is over.
  FoundPeers(kj::AsyncIoContext& io, const OwnNode& own, Epochs& epochs, const Options& options,
             Lanes& lanes, Peers& listed, Find find, std::function<bool()> is_ready,
             std::function<bool()> was_tried, std::function<void()> changed);

  [[nodiscard]] bool has_ready() const override;
  kj::Promise<std::vector<Owner>> owners(const Bytes32& space, std::span<const BlockKey> keys,
                                         std::span<const Id128> only = {}) override;
  /// Asks the listed nodes, and the named ones that owners() used last.
  kj::Promise<std::vector<Holder>> holders(const Bytes32& space,
                                           std::span<const BlockKey> keys) override;
  /// Call it when a link has changed its state.
  void note_change();
  [[nodiscard]] FoundPeersStats stats() const;

 private:
  struct Slot {
    std::unique_ptr<PeerLink> link;
    TimePoint used{};
    TimePoint dialed{};
  };
  using Asked = std::shared_ptr<std::vector<Named>>;

  PeerLink* link_to(const Named& named);
  Slot* free_slot();
  bool may_dial();
  kj::Promise<void> await_links(std::vector<PeerLink*> links, TimePoint until);
  kj::Promise<void> close_idle();
  [[nodiscard]] std::vector<Id128> listed_nodes() const;
  void taskFailed(kj::Exception&& exception) override;

  kj::AsyncIoContext& io_;
  const OwnNode& own_;
  Epochs& epochs_;
  const Options options_;
  const SteadyClock clock_{};
  Lanes& lanes_;
  Peers& listed_;
  const Find find_;
  const std::function<bool()> is_ready_;
  const std::function<bool()> was_tried_;
  const std::function<void()> changed_;
  std::vector<Slot> slots_;
  double dials_left_;
  TimePoint refilled_;
  kj::Own<kj::PromiseFulfiller<void>> change_;
  kj::ForkedPromise<void> change_made_;
  FoundPeersStats stats_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::cluster
