#include "harness/sim_cluster.h"

#include <algorithm>
#include <string>

#include "base/assert.h"
#include "base/page_layout.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow::harness {
namespace {

/// Pause before a lost link is dialed again.
constexpr Duration kPause = std::chrono::milliseconds(100);
/// Consecutive timeouts after which a link is lost.
constexpr unsigned kMisses = 3;

/// The system clock when the cluster's time begins.
constexpr Duration kSystemStart = std::chrono::hours(10000);

kj::Duration to_kj(Duration time) { return time.count() * kj::NANOSECONDS; }
kj::TimePoint to_kj(TimePoint time) {
  return kj::origin<kj::TimePoint>() + to_kj(time.time_since_epoch());
}

template <typename T>
T must(Result<T> made, const char* what) {
  PEGA_ASSERT(made, "{}: {}", what, made ? "" : to_string(made.error()));
  return std::move(*made);
}

}  // namespace

// ---- a node's link to another node

class SimCluster::Link final : public cluster::Lender {
 public:
  Link(SimCluster& cluster, const End& from, std::size_t to)
      : cluster_(cluster), from_(from), to_{to, 0}, address_("node " + std::to_string(to)) {
    dialing_ = dial(Duration::zero()).eagerlyEvaluate(nullptr);
  }

  [[nodiscard]] bool is_ready() const noexcept override { return is_ready_; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return life_; }
  [[nodiscard]] const std::string& address() const noexcept override { return address_; }
  [[nodiscard]] const Route& route() const override { return route_; }

  kj::Promise<Result<Prefix>> locate(const Bytes32& space,
                                     std::span<const BlockKey> keys) override {
    Node* const self = cluster_.find(from_);
    const Epoch epoch = self->service_->epochs().of(space);
    std::function<void(std::size_t, std::span<const BlockKey>)> seen;
    if (cluster_.options_.on_locate) seen = cluster_.options_.on_locate(from_.index);
    using Answer = std::pair<Prefix, Epoch>;
    return ask<Answer>(
               [space, epoch, seen = std::move(seen),
                keys = std::vector(keys.begin(), keys.end())](Node& owner) {
                 return owner.locate(space, epoch, keys)
                     .then([&owner, space, seen, keys](Prefix&& found) {
                       if (seen && found.blocks != 0) {
                         seen(owner.self_.index, std::span(keys).first(found.blocks));
                       }
                       return Result<Answer>({found, owner.service_->epochs().of(space)});
                     });
               },
               [](Link&, const Answer&) {})
        .then([this, space](Result<Answer>&& answer) {
          return answer.map([&](const Answer& found) {
            learn(space, found.second);
            return found.first;
          });
        });
  }
  kj::Promise<Result<Present>> locate_each(const Bytes32&, std::span<const BlockKey>) override {
    // The engines of a simulated cluster have one kind of blocks, for which none is asked for.
    return Result<Present>(fail(Errc::kRefused, "not played"));
  }
  kj::Promise<Result<LeaseGrant>> lease(const Bytes32& space, std::span<const BlockKey> keys,
                                        std::size_t, std::chrono::milliseconds time) override {
    const Epoch epoch = cluster_.find(from_)->service_->epochs().of(space);
    return ask_for_pages(space, [space, epoch, keys = std::vector(keys.begin(), keys.end()), time,
                                 reader = connection()](Node& owner) {
      return owner.lease(reader, space, epoch, keys, time);
    });
  }
  kj::Promise<Result<LeaseGrant>> lease_pending(const Staging& staging,
                                                std::chrono::milliseconds time,
                                                std::chrono::milliseconds patience) override {
    const Epoch epoch = cluster_.find(from_)->service_->epochs().of(staging.space);
    return ask_for_pages(
        staging.space, [staging, epoch, time, patience, reader = connection()](Node& owner) {
          return owner.lease_pending(reader, staging.number, staging.space, epoch, time, patience);
        });
  }
  void end_staging(std::uint64_t number) override {
    cluster_.send(from_, to_, [number, reader = connection()](Node& owner) {
      if (owner.staging_) owner.staging_->end(reader, number);
    });
  }
  kj::Promise<Result<bool>> confirm(std::uint64_t lease, Duration) override {
    return ask<bool>(
        [lease](Node& owner) {
          return Result<bool>(owner.service_->is_lent(engine::LeaseId{lease}));
        },
        [](Link&, const bool&) {});
  }
  kj::Promise<Result<Epoch>> reset(const Bytes32& space, const Epoch& epoch, Duration) override {
    return ask<Epoch>(
        [space, epoch](Node& owner) {
          owner.service_->epochs().learn(space, epoch);
          return Result<Epoch>(owner.service_->epochs().of(space));
        },
        [](Link&, const Epoch&) {});
  }
  void release(std::uint64_t lease) override {
    check_release(lease);
    cluster_.send(from_, to_, [lease](Node& owner) {
      owner.service_->end_lease(engine::LeaseId{lease});
      owner.poke();
    });
  }
  void lost(std::uint64_t life, const std::string&) override {
    if (life != life_ || !is_ready_) return;
    is_ready_ = false;
    cluster_.send(from_, to_, [reader = connection()](Node& owner) { owner.left(reader); });
    if (Node* const self = cluster_.find(from_)) (void)self->fabric_->disconnect(route_.peer);
    dialing_ = dial(kPause).eagerlyEvaluate(nullptr);
  }
  void route_lost(std::uint64_t life, const Route& route, const std::string& why) override {
    if (route == route_) lost(life, why);
  }

 private:
  /// Names this life of the link at its owner.
  [[nodiscard]] Id128 connection() const { return {from_.birth, life_ + 1}; }

  template <typename Ask>
  kj::Promise<Result<LeaseGrant>> ask_for_pages(const Bytes32& space, Ask ask_owner) {
    using Answer = std::pair<LeaseGrant, Epoch>;
    return ask<Answer>(
               [space, ask_owner = std::move(ask_owner)](Node& owner) mutable {
                 return ask_owner(owner).then(
                     [&owner, space](Result<LeaseGrant>&& grant) -> Result<Answer> {
                       owner.poke();
                       if (!grant) return tl::unexpected<Error>(std::move(grant.error()));
                       return std::pair(std::move(*grant), owner.service_->epochs().of(space));
                     });
               },
               [](Link& link, const Answer& answer) {
                 const LeaseGrant& grant = answer.first;
                 if (grant.staging != 0) link.end_staging(grant.staging);
                 if (grant.pages.empty()) return;
                 link.granted_.emplace(grant.lease, offsets_of(grant));
                 link.release(grant.lease);
               })
        .then([this, space, life = life_](Result<Answer>&& answer) -> Result<LeaseGrant> {
          if (!answer) return tl::unexpected<Error>(std::move(answer.error()));
          learn(space, answer->second);
          LeaseGrant grant = std::move(answer->first);
          if (!grant.pages.empty() && life == life_) {
            granted_.emplace(grant.lease, offsets_of(grant));
          }
          return grant;
        });
  }

  /// Greets the process of that name, repeatedly until it responds.
  kj::Promise<void> dial(Duration pause) {
    return cluster_.timer_.afterDelay(to_kj(pause)).then([this]() -> kj::Promise<void> {
      if (is_ready_) return kj::READY_NOW;
      const std::uint64_t number = ++dials_;
      const Node* const other = cluster_.node(to_.index);
      if (other != nullptr) {
        const End found = other->self_;
        const Node* const dialer = cluster_.find(from_);
        if (dialer == nullptr) return kj::READY_NOW;
        cluster_.send(from_, found,
                      [this_end = from_, found, number,
                       ours = dialer->service_->epochs().known()](Node& answerer) {
                        answerer.service_->epochs().learn(ours);
                        answerer.cluster_.send(
                            found, this_end,
                            [descriptor = answerer.fabric_->describe(), found, number,
                             theirs = answerer.service_->epochs().known()](Node& self) mutable {
                              self.service_->epochs().learn(theirs);
                              self.links_[found.index]->greeted(self, found, number,
                                                                std::move(descriptor));
                            });
                      });
      }
      return dial(kPause);
    });
  }
  static std::set<std::uint64_t> offsets_of(const LeaseGrant& grant) {
    std::set<std::uint64_t> offsets;
    for (const std::uint32_t page : grant.pages) {
      offsets.insert(std::uint64_t{page} * kSlotAlignment);
    }
    return offsets;
  }
  void learn(const Bytes32& space, const Epoch& epoch) {
    if (Node* const self = cluster_.find(from_)) self->service_->epochs().learn(space, epoch);
  }
  /// Checks that the lease belongs to this connection, ends once, and that no read uses it.
  void check_release(std::uint64_t lease) {
    const auto wrong = [&](const char* what) {
      if (cluster_.options_.on_wrong) {
        cluster_.options_.on_wrong(
            fmt::format("node {} releases lease {} of {}, {}", from_.index, lease, address_, what));
      }
    };
    const auto released = granted_.extract(lease);
    if (released.empty()) return wrong("which this connection does not hold");
    const Node* const self = cluster_.find(from_);
    if (self == nullptr) return;
    for (const auto& [ticket, read] : self->reads_) {
      if (read.peer != route_.peer) continue;
      for (const std::uint64_t offset : read.remote_offsets) {
        const bool is_lent_twice =
            std::any_of(granted_.begin(), granted_.end(),
                        [&](const auto& other) { return other.second.contains(offset); });
        if (released.mapped().contains(offset) && !is_lent_twice) {
          return wrong("which its reads still use");
        }
      }
    }
  }
  void greeted(Node& self, const End& found, std::uint64_t number, FabricDescriptor descriptor) {
    if (is_ready_ || number != dials_) return;
    const auto peer = self.fabric_->connect(descriptor);
    if (!peer) return;
    route_ = {.lane = 0, .peer = *peer, .pool = descriptor.regions.front().region};
    to_ = found;
    is_ready_ = true;
    misses_ = 0;
    ++life_;
    granted_.clear();
  }

  /// Runs `ask` at the owner, which returns a result or a promise of one, and `late` here when its
  /// response comes after the deadline.
  template <typename T, typename Ask, typename Late>
  kj::Promise<Result<T>> ask(Ask ask, Late late) {
    if (!is_ready_) return Result<T>(fail(Errc::kPeerLost, "{} is not ready", address_));
    auto answer = kj::newPromiseAndFulfiller<Result<T>>();
    using Fulfiller = kj::Own<kj::PromiseFulfiller<Result<T>>>;
    auto fulfiller = std::make_shared<Fulfiller>(kj::mv(answer.fulfiller));
    cluster_.send(
        from_, to_,
        [ask = std::move(ask), late, fulfiller, from = from_, to = to_,
         life = life_](Node& owner) mutable {
          owner.answers_.add(
              kj::Promise<Result<T>>(ask(owner))
                  .then([&owner, late, fulfiller, from, to, life](Result<T>&& made) {
                    owner.cluster_.send(
                        to, from,
                        [result = std::move(made), late, fulfiller, to, life](Node& self) mutable {
                          Link& link = *self.links_[to.index];
                          if ((*fulfiller)->isWaiting()) {
                            link.misses_ = 0;
                            (*fulfiller)->fulfill(std::move(result));
                          } else if (result && link.is_ready_ && link.life_ == life) {
                            late(link, *result);
                          }
                        });
                  }));
        });
    return answer.promise.exclusiveJoin(cluster_.timer_.afterDelay(to_kj(cluster_.options_.answer))
                                            .then([this, fulfiller, life = life_]() -> Result<T> {
                                              if (life == life_ && ++misses_ == kMisses)
                                                lost(life, "it does not respond");
                                              return fail(Errc::kTimeout, "no response from {}",
                                                          address_);
                                            }));
  }

  SimCluster& cluster_;
  const End from_;
  End to_;  ///< The incarnation that was greeted.
  const std::string address_;
  bool is_ready_ = false;
  std::uint64_t life_ = 0;
  std::uint64_t dials_ = 0;
  unsigned misses_ = 0;
  Route route_;
  /// Offsets that each lease of this connection lends, until it is released.
  std::map<std::uint64_t, std::set<std::uint64_t>> granted_;
  kj::Promise<void> dialing_ = nullptr;

  friend class SimCluster;
};

/// Records reads for the checks of the cluster.
class SimCluster::Watched final : public Fabric {
 public:
  Watched(Fabric& fabric, const SimCluster& cluster, std::size_t node)
      : fabric_(fabric), cluster_(cluster), node_(node) {}
  Result<RegionId> register_region(const Memory& memory) override {
    return fabric_.register_region(memory);
  }
  Result<void> lend(RegionId region, TimePoint until) override {
    return fabric_.lend(region, until);
  }
  void unregister_region(RegionId region) override { fabric_.unregister_region(region); }
  [[nodiscard]] FabricDescriptor describe() const override { return fabric_.describe(); }
  Result<PeerId> connect(const FabricDescriptor& peer) override { return fabric_.connect(peer); }
  Result<void> disconnect(PeerId peer) override { return fabric_.disconnect(peer); }
  Result<void> read(Batch batch) override {
    if (cluster_.options_.on_read) cluster_.options_.on_read(node_, batch);
    auto& reads = cluster_.node(node_)->reads_;
    const std::uint64_t ticket = batch.ticket;
    Node::Read& read = reads[ticket];
    read.peer = batch.peer;
    for (const Fabric::Chunk& chunk : batch.chunks) read.remote_offsets.insert(chunk.remote_offset);
    auto accepted = fabric_.read(std::move(batch));
    if (!accepted) reads.erase(ticket);
    return accepted;
  }
  Result<void> cancel(std::uint64_t ticket) override { return fabric_.cancel(ticket); }

 private:
  Fabric& fabric_;
  const SimCluster& cluster_;
  const std::size_t node_;
};

// ---- a node

TimePoint SimCluster::Node::MachineClock::now() const noexcept {
  const Duration gone = std::max(Duration::zero(), clock_.now() - since_);
  return then_ + Duration(static_cast<Duration::rep>(static_cast<double>(gone.count()) * rate_));
}

void SimCluster::Node::MachineClock::pause(Duration time) {
  then_ = now();
  since_ = std::max(since_, clock_.now() + time);
}

SimCluster::Node::Node(SimCluster& cluster, const End& self)
    : cluster_(cluster),
      self_(self),
      machine_(cluster.clock_, cluster.options_.clocks[self.index].rate,
               cluster.options_.clocks[self.index].ahead),
      pool_(cluster.options_.blocks * kPageBytes),
      answers_(*this) {
  server::CacheService::Options options = cluster.options_.service;
  options.store.pool_bytes = pool_.size();
  options.next_epoch = [this](const Epoch& known) {
    return cluster_.next_epoch(self_.index, known);
  };
  service_ = must(server::CacheService::create(
                      options, machine_,
                      [this](const Id128& connection) { service_->disconnected(connection); }),
                  "a service");
  background_ = std::make_unique<server::Background>(*service_, cluster.timer_, machine_);
  fabric_ = must(SimFabric::create(cluster.options_.fabric, cluster.network_,
                                   [this](Fabric::Completion&& done) {
                                     if (done.quiesced) reads_.erase(done.ticket);
                                     completions_.push_back(std::move(done));
                                   }),
                 "a fabric");
  watched_ = std::make_unique<Watched>(*fabric_, cluster, self.index);
  region_ = must(fabric_->register_region(pool_), "a region");
  for (std::size_t other = 0; other < cluster.options_.nodes; ++other) {
    links_.push_back(other == self.index ? nullptr : std::make_unique<Link>(cluster, self, other));
    if (links_.back()) lenders_.add(*links_.back());
  }
  source_ = std::make_unique<cluster::PeerSource>(
      lenders_, std::vector<cluster::PeerSource::Lane>{{.fabric = watched_.get(), .pool = region_}},
      cluster.clock_, machine_, cluster.options_.source);
  cluster::Source* from = source_.get();
  if (cluster.options_.has_disks) {
    disks_ = std::make_unique<SimDisks>(*service_, pool_, cluster.timer_, cluster.clock_,
                                        cluster.random_(), cluster.options_.mistakes.disks);
    tiers_ = std::make_unique<SimTiers>(*disks_, *source_);
    from = tiers_.get();
  }
  fetches_ = std::make_unique<server::Fetches>(*service_, from, *background_, cluster.timer_,
                                               cluster.clock_, cluster.options_.fetches);
  if (disks_ == nullptr) return;
  server::Staging::Options staging = cluster.options_.staging;
  staging.most_bytes = pool_.size() / 8;
  staging_ = std::make_unique<server::Staging>(*service_, *disks_, *fetches_, *background_,
                                               cluster.timer_, cluster.clock_, staging);
}

SimCluster::Node::~Node() noexcept(false) {
  fabric_.reset();  // Before the fetches, so that no write into a frame is in flight.
}

void SimCluster::Node::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "an answer failed: {}", error_from(exception).detail);
}

void SimCluster::Node::left(const Id128& reader) {
  if (staging_) staging_->peer_left(reader);
}

kj::Promise<cluster::Lender::Prefix> SimCluster::Node::locate(const Bytes32& space,
                                                              const Epoch& epoch,
                                                              std::span<const BlockKey> keys) {
  using Prefix = cluster::Lender::Prefix;
  if (!cluster_.options_.mistakes.locate_drops_epoch && !service_->meets(space, epoch)) {
    return Prefix{};
  }
  auto found = staging_ ? staging_->locate(space, keys)
                        : kj::Promise<Prefix>(Prefix{.blocks = service_->present(space, keys)});
  return found.then([this, space, epoch](Prefix&& prefix) {
    // It may have been reset meanwhile.
    if (!cluster_.options_.mistakes.locate_drops_epoch && !service_->meets(space, epoch)) {
      return Prefix{};
    }
    if (prefix.blocks != 0) check_epoch(space, epoch);
    return prefix;
  });
}

kj::Promise<Result<LeaseGrant>> SimCluster::Node::lease(const Id128& reader, const Bytes32& space,
                                                        const Epoch& epoch,
                                                        std::span<const BlockKey> keys,
                                                        std::chrono::milliseconds time) {
  auto grant = lend(space, epoch, keys, time);
  if (!grant || !staging_ || grant->pages.size() == keys.size() || !service_->meets(space, epoch)) {
    return grant;
  }
  return staging_->begin(reader, space, keys.subspan(grant->pages.size()))
      .then([grant = std::move(grant)](server::Staging::Pending&& pending) mutable {
        grant->pending = pending.blocks;
        grant->staging = pending.number;
        return std::move(grant);
      });
}

kj::Promise<Result<LeaseGrant>> SimCluster::Node::lease_pending(
    const Id128& reader, std::uint64_t number, const Bytes32& space, const Epoch& epoch,
    std::chrono::milliseconds time, Duration patience) {
  if (!staging_) return Result<LeaseGrant>(LeaseGrant{});
  return staging_->await_next(reader, number, patience)
      .then([this, reader, number, space, epoch, time](server::Staging::Ready&& ready) {
        auto grant = ready.keys.empty() ? Result<LeaseGrant>(LeaseGrant{})
                                        : lend(space, epoch, ready.keys, time);
        const auto left =
            staging_->lent(reader, number, ready.keys.size(), grant ? grant->pages.size() : 0);
        if (grant) {
          grant->pending = left.blocks;
          grant->staging = left.number;
        }
        return grant;
      });
}

void SimCluster::Node::check_epoch(const Bytes32& space, const Epoch& asked) {
  if (service_->epochs().of(space) == asked || !cluster_.options_.on_wrong) return;
  cluster_.options_.on_wrong(
      fmt::format("node {} lends blocks to a reader of another epoch", self_.index));
}

Result<LeaseGrant> SimCluster::Node::lend(const Bytes32& space, const Epoch& epoch,
                                          std::span<const BlockKey> keys,
                                          std::chrono::milliseconds time) {
  if (!cluster_.options_.mistakes.lease_drops_epoch && !service_->meets(space, epoch)) {
    return LeaseGrant{};
  }
  PEGA_TRY_LET(server::CacheService::Lent lent, service_->lend(space, keys, time));
  if (lent.pages.empty()) return LeaseGrant{};
  check_epoch(space, epoch);
  const TimePoint until = cluster_.clock_.now() + time;
  if (until > lent_until_) {
    PEGA_TRY(fabric_->lend(region_, until));
    lent_until_ = until;
  }
  return LeaseGrant{.lease = static_cast<std::uint64_t>(lent.lease),
                    .granted = time,
                    .pages = std::move(lent.pages),
                    .checksums = std::move(lent.checksums)};
}

Id128 SimCluster::Node::add_engine(const Id128& process) {
  const Id128 connection{cluster_.random_() | 1, cluster_.random_()};
  const auto connected = service_->connected(connection, {.process = process,
                                                          .previous_connection = {},
                                                          .build = "simulated",
                                                          .watch = std::make_shared<int>(0)});
  PEGA_ASSERT(connected, "an engine connects: {}", connected.error().detail);
  (void)must(service_->register_rank(connection, {.instance = to_string(process),
                                                  .factors = {{"weights", "simulated"}},
                                                  .page_bytes = kPageBytes}),
             "an engine registers");
  poke();
  return connection;
}

std::size_t SimCluster::Node::ready_peers() const {
  return static_cast<std::size_t>(std::count_if(
      links_.begin(), links_.end(), [](const auto& link) { return link && link->is_ready(); }));
}

// ---- the cluster

SimCluster::SimCluster(const Options& options, kj::WaitScope& scope)
    : options_(options),
      scope_(scope),
      timer_(to_kj(clock_.now())),
      network_(clock_, options.seed),
      random_(options.seed),
      messages_(*this),
      nodes_(options.nodes) {
  options_.clocks.resize(options_.nodes);
  for (std::size_t i = 0; i < nodes_.size(); ++i) start(i);
  run_for(std::chrono::milliseconds(1));
}

SimCluster::~SimCluster() noexcept(false) {
  for (auto& node : nodes_) node.reset();
}

void SimCluster::start(std::size_t index) {
  PEGA_ASSERT(!nodes_[index], "node {} is already running", index);
  nodes_[index] = std::make_unique<Node>(*this, End{index, ++births_});
  for (const auto& [one, other] : cuts_) {
    if (nodes_[one] && nodes_[other]) network_.cut(*nodes_[one]->fabric_, *nodes_[other]->fabric_);
  }
}

void SimCluster::set_disk_faults(const SimDisks::Faults& faults) {
  for (const auto& node : nodes_) {
    if (node && node->disks_) node->disks_->set_faults(faults);
  }
}

void SimCluster::kill(std::size_t index) {
  for (const auto& link : nodes_[index]->links_) {
    if (link == nullptr || is_cut(index, link->to_.index)) continue;
    if (Node* const owner = find(link->to_)) owner->left(link->connection());
  }
  nodes_[index].reset();
  for (const auto& other : nodes_) {
    if (!other || is_cut(other->self_.index, index)) continue;
    Link& link = *other->links_[index];
    link.lost(link.life(), "its connection ended");
  }
}

void SimCluster::cut(std::size_t one, std::size_t other) {
  cuts_.insert(std::minmax(one, other));
  if (nodes_[one] && nodes_[other]) network_.cut(*nodes_[one]->fabric_, *nodes_[other]->fabric_);
}

void SimCluster::heal(std::size_t one, std::size_t other) {
  cuts_.erase(std::minmax(one, other));
  if (nodes_[one] && nodes_[other]) network_.heal(*nodes_[one]->fabric_, *nodes_[other]->fabric_);
}

bool SimCluster::is_cut(std::size_t one, std::size_t other) const {
  return cuts_.contains(std::minmax(one, other));
}

void SimCluster::freeze(std::size_t index, Duration time) {
  Node& node = *nodes_[index];
  node.stalled_until_ = std::max(node.stalled_until_, clock_.now() + time);
  node.fabric_->freeze(time);
}

void SimCluster::pause_machine(std::size_t index, Duration time) {
  freeze(index, time);
  nodes_[index]->machine_.pause(time);
}

void SimCluster::set_system_clock(std::size_t index, Duration ahead) {
  options_.clocks[index].system_ahead = ahead;
}

Epoch SimCluster::next_epoch(std::size_t index, const Epoch& known) {
  // Clocks that agree order two resets.
  const Duration now = kSystemStart + clock_.now().time_since_epoch() +
                       std::chrono::microseconds(++resets_) + options_.clocks[index].system_ahead;
  return cluster::epoch_after(known, std::chrono::duration_cast<std::chrono::microseconds>(now),
                              random_());
}

SimCluster::Node* SimCluster::find(const End& end) const {
  Node* const node = nodes_[end.index].get();
  return node != nullptr && node->self_.birth == end.birth ? node : nullptr;
}

void SimCluster::send(const End& from, const End& to, kj::Function<void(Node&)> act) {
  const auto is_lost = [this] {
    return options_.lost > 0 && std::uniform_real_distribution<>(0, 1)(random_) < options_.lost;
  };
  if (is_cut(from.index, to.index) || is_lost()) return;
  messages_.add(timer_.afterDelay(to_kj(options_.message))
                    .then([this, from, to, act = kj::mv(act)]() mutable {
                      Node* const node = find(to);
                      if (node != nullptr && !is_cut(from.index, to.index)) act(*node);
                    }));
}

bool SimCluster::deliver() {
  bool did = false;
  for (const auto& node : nodes_) {
    while (node && !node->completions_.empty() && node->stalled_until_ <= clock_.now()) {
      const Fabric::Completion done = std::move(node->completions_.front());
      node->completions_.pop_front();
      node->source_->completed(done);
      did = true;
    }
  }
  return did;
}

void SimCluster::settle() {
  const auto is_due = [this] {
    if (network_.next_time() <= clock_.now()) return true;
    KJ_IF_MAYBE (next, timer_.nextEvent()) {
      return *next <= timer_.now();
    }
    return false;
  };
  bool more = true;
  while (more) {
    scope_.poll();
    timer_.advanceTo(to_kj(clock_.now()));
    network_.run();
    more = deliver();
    scope_.poll();
    more = more || is_due();
  }
}

TimePoint SimCluster::next_time() {
  TimePoint next = network_.next_time();
  KJ_IF_MAYBE (timed, timer_.nextEvent()) {
    next = std::min(next,
                    TimePoint(Duration((*timed - kj::origin<kj::TimePoint>()) / kj::NANOSECONDS)));
  }
  for (const auto& node : nodes_) {
    if (node && !node->completions_.empty()) next = std::min(next, node->stalled_until_);
  }
  return next;
}

void SimCluster::advance(TimePoint to) {
  if (to > clock_.now()) clock_.advance(to - clock_.now());
  settle();
}

bool SimCluster::step() {
  settle();
  const TimePoint next = next_time();
  if (next == TimePoint::max()) return false;
  advance(next);
  return true;
}

void SimCluster::run_for(Duration time) {
  const TimePoint end = clock_.now() + time;
  settle();
  while (next_time() <= end) advance(next_time());
  advance(end);
}

void SimCluster::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a message failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::harness
