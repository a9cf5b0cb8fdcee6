#pragma once
/// \file
/// Several nodes in one thread and in virtual time. Only the network is simulated.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kj/async.h>
#include <kj/function.h>
#include <kj/timer.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "cluster/lender.h"
#include "cluster/peer_source.h"
#include "harness/sim_disks.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/fetches/fetches.h"
#include "server/ssd/staging.h"
#include "transport/sim/sim_fabric.h"

namespace pegaflow::harness {

/// Nodes that share blocks. Each has the service, the store, the fetches, a fabric and a pool with
/// bytes, assembled as in a server. A SimNetwork and delayed messages connect them; links are
/// greeted, lost and greeted again.
///
/// Time advances only in step() and run_for(). One seed gives one sequence of events.
/// Thread-bound, with the event loop of the thread.
class SimCluster final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr std::uint64_t kPageBytes = 4096;

  struct Options {
    std::size_t nodes = 3;
    std::uint64_t blocks = 64;  ///< Capacity of each pool, in blocks of one page.
    std::uint64_t seed = 1;
    server::CacheService::Options service{};  ///< Except the pool's size.
    SimFabric::Options fabric{};
    cluster::PeerSource::Options source{};
    server::Fetches::Options fetches{};
    Duration message = std::chrono::microseconds(25);  ///< Latency of a message.
    Duration answer = std::chrono::milliseconds(15);   ///< Deadline of a response.
    /// The clocks of a node's machine, relative to the cluster's.
    struct Clocks {
      double rate = 1;          ///< The monotonic clocks', in each incarnation of the node.
      Duration ahead{};         ///< The monotonic clocks', when an incarnation begins.
      Duration system_ahead{};  ///< The system clock's.
    };
    std::vector<Clocks> clocks;  ///< By node; missing entries agree with the cluster's.
    /// Probability that a message is lost, in addition to the faults of the SimNetwork.
    double lost = 0;
    /// Each node has disks, from which it lends blocks to other nodes. Its own engines load nothing
    /// from them.
    bool has_disks = false;
    server::Staging::Options staging{};  ///< Except the bytes, an eighth of the pool.
    /// Rules that a responder breaks. PeerSource::Options and Fetches::Options have more.
    struct Mistakes {
      bool locate_drops_epoch = false;
      bool lease_drops_epoch = false;
      SimDisks::Mistakes disks{};
    } mistakes{};
    /// Called with each batch before its fabric receives it.
    std::function<void(std::size_t node, const Fabric::Batch& batch)> on_read;
    /// Called when a node breaks a rule of Lender, with a description.
    std::function<void(const std::string& what)> on_wrong;
    /// Called when a reader locates blocks at another node. The function that it returns is called
    /// with the blocks that the owner names, if it names any.
    std::function<std::function<void(std::size_t owner, std::span<const BlockKey> found)>(
        std::size_t reader)>
        on_locate;
  };
  class Node;

  /// Starts all nodes. `scope` outlives the cluster.
  SimCluster(const Options& options, kj::WaitScope& scope);
  ~SimCluster() noexcept(false);
  SimCluster(const SimCluster&) = delete;
  SimCluster& operator=(const SimCluster&) = delete;

  /// Null while the node is down.
  [[nodiscard]] Node* node(std::size_t index) const { return nodes_[index].get(); }
  [[nodiscard]] std::size_t size() const { return nodes_.size(); }
  [[nodiscard]] SimNetwork& network() noexcept { return network_; }
  [[nodiscard]] const Clock& clock() const noexcept { return clock_; }
  [[nodiscard]] kj::Timer& timer() noexcept { return timer_; }

  /// Ends the process with its pool. Other nodes see its connections end, except across a cut.
  void kill(std::size_t index);
  /// Starts a new process of that name.
  void start(std::size_t index);
  void cut(std::size_t one, std::size_t other);
  void heal(std::size_t one, std::size_t other);
  /// Stops the process but not its NICs; see SimFabric::freeze().
  void freeze(std::size_t index, Duration time);
  /// Like freeze(), and the monotonic clocks of the machine stop too: its hypervisor paused it.
  void pause_machine(std::size_t index, Duration time);
  /// Sets the system clock of a node to `ahead` of the cluster's.
  void set_system_clock(std::size_t index, Duration ahead);
  void set_lost(double lost) { options_.lost = lost; }
  void set_disk_faults(const SimDisks::Faults& faults);

  /// Advances to the next event and executes it. False when no event is left.
  bool step();
  void run_for(Duration time);
  /// Executes all events that are due.
  void settle();
  /// Steps until the promise is fulfilled.
  template <typename T>
  T wait(kj::Promise<T> promise) {
    while (!promise.poll(scope_)) step();
    return promise.wait(scope_);
  }

 private:
  class Link;
  class Watched;
  /// One incarnation of a node.
  struct End {
    std::size_t index = 0;
    std::uint64_t birth = 0;
  };

  [[nodiscard]] Node* find(const End& end) const;
  void send(const End& from, const End& to, kj::Function<void(Node&)> act);
  [[nodiscard]] bool is_cut(std::size_t one, std::size_t other) const;
  [[nodiscard]] bool deliver();
  [[nodiscard]] TimePoint next_time();
  void advance(TimePoint to);
  [[nodiscard]] Epoch next_epoch(std::size_t index, const Epoch& known);
  void taskFailed(kj::Exception&& exception) override;

  Options options_;
  kj::WaitScope& scope_;
  ManualClock clock_;
  kj::TimerImpl timer_;
  SimNetwork network_;
  std::mt19937_64 random_;
  std::set<std::pair<std::size_t, std::size_t>> cuts_;
  std::uint64_t births_ = 0;
  std::uint64_t resets_ = 0;
  kj::TaskSet messages_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

/// One incarnation of a node.
class SimCluster::Node final : private kj::TaskSet::ErrorHandler {
 public:
  Node(SimCluster& cluster, const End& self);
  ~Node() noexcept(false);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  [[nodiscard]] server::CacheService& service() noexcept { return *service_; }
  [[nodiscard]] cluster::PeerSource& source() noexcept { return *source_; }
  [[nodiscard]] server::Fetches& fetches() noexcept { return *fetches_; }
  /// Both null in a cluster without disks.
  [[nodiscard]] SimDisks* disks() const noexcept { return disks_.get(); }
  [[nodiscard]] server::Staging* staging() const noexcept { return staging_.get(); }
  [[nodiscard]] SimFabric& fabric() noexcept { return *fabric_; }
  void poke() { background_->poke(); }
  /// A page of the pool by its slot in CacheService.
  [[nodiscard]] std::span<std::byte> page(std::uint32_t slot) {
    return std::span(pool_).subspan(std::size_t{slot} * kPageBytes, kPageBytes);
  }
  /// Bytes of the pool by offset.
  [[nodiscard]] std::span<const std::byte> place(std::uint64_t offset, std::uint64_t size) const {
    return std::span(pool_).subspan(offset, size);
  }
  /// Registers an engine of one rank in the namespace of all engines. Returns its connection.
  Id128 add_engine(const Id128& process);
  [[nodiscard]] std::size_t ready_peers() const;
  [[nodiscard]] cluster::Lenders& lenders() noexcept { return lenders_; }

 private:
  /// The monotonic clocks of the node's machine: they have their own rate and stop while the
  /// machine is paused. Owners and readers time their leases by them.
  class MachineClock final : public Clock {
   public:
    MachineClock(const Clock& clock, double rate, Duration ahead)
        : clock_(clock), rate_(rate), since_(clock.now()), then_(since_ + ahead) {}
    [[nodiscard]] TimePoint now() const noexcept override;
    void pause(Duration time);

   private:
    const Clock& clock_;
    const double rate_;
    TimePoint since_;  ///< Cluster time at which this clock continues from `then_`.
    TimePoint then_;
  };
  /// Reports to Options::on_wrong when blocks are lent to a reader of another epoch.
  void check_epoch(const Bytes32& space, const Epoch& asked);
  // The requests of other nodes, handled as by the gate of a server.
  kj::Promise<cluster::Lender::Prefix> locate(const Bytes32& space, const Epoch& epoch,
                                              std::span<const BlockKey> keys);
  kj::Promise<Result<LeaseGrant>> lease(const Id128& reader, const Bytes32& space,
                                        const Epoch& epoch, std::span<const BlockKey> keys,
                                        std::chrono::milliseconds time);
  kj::Promise<Result<LeaseGrant>> lease_pending(const Id128& reader, std::uint64_t number,
                                                const Bytes32& space, const Epoch& epoch,
                                                std::chrono::milliseconds time, Duration patience);
  Result<LeaseGrant> lend(const Bytes32& space, const Epoch& epoch, std::span<const BlockKey> keys,
                          std::chrono::milliseconds time);
  /// The connection of a reader has ended.
  void left(const Id128& reader);
  void taskFailed(kj::Exception&& exception) override;
  friend class SimCluster;
  friend class SimCluster::Link;
  friend class SimCluster::Watched;

  /// The reads of a batch that has not quiesced.
  struct Read {
    Fabric::PeerId peer{};
    std::set<std::uint64_t> remote_offsets;
  };

  SimCluster& cluster_;
  const End self_;
  MachineClock machine_;
  std::vector<std::byte> pool_;
  std::unique_ptr<server::CacheService> service_;
  std::unique_ptr<server::Background> background_;
  std::map<std::uint64_t, Read> reads_;  ///< By ticket.
  std::deque<Fabric::Completion> completions_;
  TimePoint stalled_until_ = TimePoint::min();
  std::unique_ptr<SimFabric> fabric_;
  std::unique_ptr<Watched> watched_;
  RegionId region_{};
  TimePoint lent_until_ = TimePoint::min();  ///< End of the pool's lease on the fabric.
  cluster::Lenders lenders_;
  std::vector<std::unique_ptr<Link>> links_;  ///< By the other node's index; null at its own.
  std::unique_ptr<cluster::PeerSource> source_;
  std::unique_ptr<SimDisks> disks_;
  std::unique_ptr<SimTiers> tiers_;
  std::unique_ptr<server::Fetches> fetches_;
  std::unique_ptr<server::Staging> staging_;
  kj::TaskSet answers_;  ///< Requests of other nodes that are being answered.
};

}  // namespace pegaflow::harness
