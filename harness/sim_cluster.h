#pragma once
/// \file
/// Several nodes in one thread and in virtual time: what is simulated is the network, and no more.

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
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/cache/fetches.h"
#include "transport/sim/sim_fabric.h"

namespace pegaflow::harness {

/// Nodes that share blocks: of each the service, the store, the fetches, a fabric and a pool with
/// bytes, as a server puts them together. Between them are a SimNetwork and messages that take
/// their time; links are greeted, lost and greeted again.
///
/// Time stands still but in step() and run_for(). One seed gives one course of things.
/// Thread-bound, with the event loop of the thread.
class SimCluster final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr std::uint64_t kPageBytes = 4096;

  struct Options {
    std::size_t nodes = 3;
    std::uint64_t blocks = 64;  ///< Of one page each, that a pool has.
    std::uint64_t seed = 1;
    server::CacheService::Options service{};  ///< But for the pool's size.
    SimFabric::Options fabric{};
    server::Fetches::Options fetches{};
    Duration message = std::chrono::microseconds(25);  ///< That a message takes.
    Duration answer = std::chrono::milliseconds(15);   ///< That an answer may take.
    /// The clocks of a node's machine, beside the cluster's.
    struct Clocks {
      double rate = 1;          ///< Of the monotonic ones, in each life of the node.
      Duration ahead{};         ///< Of the monotonic ones, when a life begins.
      Duration system_ahead{};  ///< Of the system clock.
    };
    std::vector<Clocks> clocks;  ///< By node; those of others agree with the cluster's.
    /// Of each message; Faults of the SimNetwork are beside them.
    double lost = 0;
    /// Rules that the other end of a question breaks; those of Fetches::Options are beside them.
    struct Mistakes {
      bool locate_drops_epoch = false;
      bool lease_drops_epoch = false;
    } mistakes{};
    /// Hears of each batch before its fabric does.
    std::function<void(std::size_t node, const Fabric::Batch& batch)> on_read;
    /// Hears of what a node must never do to another one: it says what a Lender asks of who uses
    /// it.
    std::function<void(const std::string& what)> on_wrong;
    /// When a reader asks which blocks another node has; what it returns hears of those that the
    /// owner names, when it does.
    std::function<std::function<void(std::size_t owner, std::span<const BlockKey> found)>(
        std::size_t reader)>
        on_locate;
  };
  class Node;

  /// All nodes live. `scope` outlives it.
  SimCluster(const Options& options, kj::WaitScope& scope);
  ~SimCluster() noexcept(false);
  SimCluster(const SimCluster&) = delete;
  SimCluster& operator=(const SimCluster&) = delete;

  /// Null: it is dead.
  [[nodiscard]] Node* node(std::size_t index) const { return nodes_[index].get(); }
  [[nodiscard]] std::size_t size() const { return nodes_.size(); }
  [[nodiscard]] SimNetwork& network() noexcept { return network_; }
  [[nodiscard]] const Clock& clock() const noexcept { return clock_; }
  [[nodiscard]] kj::Timer& timer() noexcept { return timer_; }

  /// The process ends, with its pool; others see its connections end, but over a cut way.
  void kill(std::size_t index);
  /// Another process of that name.
  void start(std::size_t index);
  void cut(std::size_t one, std::size_t other);
  void heal(std::size_t one, std::size_t other);
  /// It stands still, but for its cards; see SimFabric::freeze().
  void freeze(std::size_t index, Duration time);
  /// The same, and no monotonic clock of the machine goes on meanwhile: its hypervisor stopped it.
  void pause_machine(std::size_t index, Duration time);
  /// Somebody sets the system clock, which is `ahead` of the cluster's from now on.
  void set_system_clock(std::size_t index, Duration ahead);
  void set_lost(double lost) { options_.lost = lost; }

  /// Goes on to what happens next, and does that. False: nothing ever will.
  bool step();
  void run_for(Duration time);
  /// Does what is due.
  void settle();
  /// Steps until the promise is kept.
  template <typename T>
  T wait(kj::Promise<T> promise) {
    while (!promise.poll(scope_)) step();
    return promise.wait(scope_);
  }

 private:
  class Link;
  class Watched;
  /// One life of a node.
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

/// One life of a node.
class SimCluster::Node {
 public:
  Node(SimCluster& cluster, const End& self);
  ~Node() noexcept(false);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  [[nodiscard]] server::CacheService& service() noexcept { return *service_; }
  [[nodiscard]] server::Fetches& fetches() noexcept { return *fetches_; }
  [[nodiscard]] SimFabric& fabric() noexcept { return *fabric_; }
  void poke() { background_->poke(); }
  /// A page of the pool, by the name that CacheService has for it.
  [[nodiscard]] std::span<std::byte> page(std::uint32_t slot) {
    return std::span(pool_).subspan(std::size_t{slot} * kPageBytes, kPageBytes);
  }
  /// By its place in the pool.
  [[nodiscard]] std::span<const std::byte> place(std::uint64_t offset, std::uint64_t size) const {
    return std::span(pool_).subspan(offset, size);
  }
  /// Registers an engine of one rank; the same namespace for all. Returns its connection.
  Id128 add_engine(const Id128& process);
  [[nodiscard]] std::size_t ready_peers() const;
  [[nodiscard]] cluster::Lenders& lenders() noexcept { return lenders_; }

 private:
  /// The monotonic clocks of the node's machine: at a rate of their own, and standing still while
  /// the machine is paused. By them an owner and a reader keep their leases.
  class MachineClock final : public Clock {
   public:
    MachineClock(const Clock& clock, double rate, Duration ahead)
        : clock_(clock), rate_(rate), since_(clock.now()), then_(since_ + ahead) {}
    [[nodiscard]] TimePoint now() const noexcept override;
    void pause(Duration time);

   private:
    const Clock& clock_;
    const double rate_;
    TimePoint since_;  ///< It goes on from `then_` when the cluster's clock is here.
    TimePoint then_;
  };
  /// What the gate of a server does.
  /// Reports blocks that are given to a reader of another epoch.
  void check_epoch(const Bytes32& space, const Epoch& asked);
  std::size_t locate(const Bytes32& space, const Epoch& epoch, std::span<const BlockKey> keys);
  Result<LeaseGrant> lend(const Bytes32& space, const Epoch& epoch, std::span<const BlockKey> keys,
                          std::chrono::milliseconds time);
  friend class SimCluster;
  friend class SimCluster::Link;
  friend class SimCluster::Watched;

  /// What a batch reads that is not settled.
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
  TimePoint lent_until_ = TimePoint::min();  ///< The pool, on the fabric.
  cluster::Lenders lenders_;
  std::vector<std::unique_ptr<Link>> links_;  ///< By the other node; null for itself.
  std::unique_ptr<server::Fetches> fetches_;
};

}  // namespace pegaflow::harness
