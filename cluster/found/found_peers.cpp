#include "cluster/found/found_peers.h"

#include <algorithm>
#include <utility>

#include <kj/vector.h>

#include "base/assert.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow::cluster {
namespace {

constexpr kj::Duration kIdleCheck = 5 * kj::SECONDS;

}  // namespace

FoundPeers::FoundPeers(kj::AsyncIoContext& io, const OwnNode& own, Epochs& epochs,
                       const Options& options, Lanes& lanes, Peers& listed, Find find,
                       std::function<bool()> is_ready, std::function<bool()> was_tried,
                       std::function<void()> changed)
    : io_(io),
      own_(own),
      epochs_(epochs),
      options_(options),
      lanes_(lanes),
      listed_(listed),
      find_(std::move(find)),
      is_ready_(std::move(is_ready)),
      was_tried_(std::move(was_tried)),
      changed_(std::move(changed)),
      dials_left_(options.dials_per_second),
      refilled_(clock_.now()),
      change_made_(nullptr),
      tasks_(*this) {
  slots_.reserve(options_.most_links);
  for (const auto& link : listed_.links()) add(*link);
  auto pair = kj::newPromiseAndFulfiller<void>();
  change_ = kj::mv(pair.fulfiller);
  change_made_ = pair.promise.fork();
  tasks_.add(close_idle());
}

bool FoundPeers::has_ready() const {
  const auto was_tried = [](const auto& link) { return link->was_tried(); };
  const auto& links = listed_.links();
  if (!was_tried_() || !std::all_of(links.begin(), links.end(), was_tried)) return false;
  return is_ready_() || Lenders::has_ready();
}

void FoundPeers::note_change() {
  auto pair = kj::newPromiseAndFulfiller<void>();
  auto former = std::exchange(change_, kj::mv(pair.fulfiller));
  change_made_ = pair.promise.fork();
  former->fulfill();
}

// ---- links

bool FoundPeers::may_dial() {
  const TimePoint now = clock_.now();
  const double passed = std::chrono::duration<double>(now - refilled_).count();
  refilled_ = now;
  dials_left_ =
      std::min(options_.dials_per_second, dials_left_ + passed * options_.dials_per_second);
  if (dials_left_ < 1) return false;
  dials_left_ -= 1;
  return true;
}

/// A link that is resting, or a new one; null: all are in use.
FoundPeers::Slot* FoundPeers::free_slot() {
  const auto resting = std::find_if(slots_.begin(), slots_.end(),
                                    [](const Slot& slot) { return slot.link->is_resting(); });
  if (resting != slots_.end()) return &*resting;
  if (slots_.size() < options_.most_links) {
    PeerLink::Options link = options_.link;
    link.is_parked = true;
    Slot& slot = slots_.emplace_back();
    slot.link = std::make_unique<PeerLink>(io_, own_, epochs_, std::move(link), lanes_, [this]() {
      note_change();
      changed_();
    });
    add(*slot.link);
    tasks_.add(slot.link->run());
    return slot.link->is_resting() ? &slot : nullptr;
  }
  const auto oldest = std::min_element(
      slots_.begin(), slots_.end(), [](const Slot& a, const Slot& b) { return a.used < b.used; });
  // It is resting soon, for the next request.
  if (clock_.now() - oldest->used >= options_.least_use) {
    ++stats_.closed;
    oldest->link->park();
  }
  return nullptr;
}

/// The link to a node, dialed if need be; null: there is none, and none may be made.
PeerLink* FoundPeers::link_to(const Named& named) {
  for (const auto& link : listed_.links()) {
    const bool is_it =
        link->address() == named.address || (link->is_ready() && link->node() == named.node);
    if (is_it) return link.get();
  }
  for (Slot& slot : slots_) {
    if (slot.link->is_resting() || slot.link->address() != named.address) continue;
    slot.used = clock_.now();
    return slot.link.get();
  }
  if (!options_.networks.contains(named.address)) {
    ++stats_.outside;
    return nullptr;
  }
  Slot* const slot = free_slot();
  if (slot == nullptr || !may_dial()) {
    ++stats_.withheld;
    return nullptr;
  }
  ++stats_.dials;
  slot->used = slot->dialed = clock_.now();
  slot->link->dial(named.address);
  return slot->link.get();
}

kj::Promise<void> FoundPeers::close_idle() {
  return io_.provider->getTimer().afterDelay(kIdleCheck).then([this]() {
    const TimePoint now = clock_.now();
    for (const Slot& slot : slots_) {
      if (slot.link->is_resting() || now - slot.used < options_.idle) continue;
      ++stats_.closed;
      slot.link->park();
    }
    return close_idle();
  });
}

/// Resolves when all links are ready, or at `until`.
kj::Promise<void> FoundPeers::await_links(std::vector<PeerLink*> links, TimePoint until) {
  const bool are_ready = std::all_of(links.begin(), links.end(),
                                     [](const PeerLink* link) { return link->is_ready(); });
  const Duration left = until - clock_.now();
  if (are_ready || left <= Duration::zero()) return kj::READY_NOW;
  return change_made_.addBranch()
      .exclusiveJoin(io_.provider->getTimer().afterDelay(to_kj(left)))
      .then([this, links = std::move(links), until]() mutable {
        return await_links(std::move(links), until);
      });
}

// ---- requests

std::vector<Id128> FoundPeers::listed_nodes() const {
  std::vector<Id128> nodes;
  for (const auto& link : listed_.links()) {
    if (link->is_ready()) nodes.push_back(link->node());
  }
  return nodes;
}

kj::Promise<std::vector<Lenders::Owner>> FoundPeers::owners(const Bytes32& space,
                                                            std::span<const BlockKey> keys,
                                                            std::span<const Id128> only) {
  if (!only.empty()) return Lenders::owners(space, keys, only);
  auto wanted = std::make_shared<std::vector<BlockKey>>(keys.begin(), keys.end());
  return find_(space, keys)
      .then([this, space, wanted](Finding&& finding) -> kj::Promise<std::vector<Owner>> {
        if (!finding.is_known) return Lenders::owners(space, *wanted, {});
        std::vector<PeerLink*> links;
        std::vector<PeerLink*> fresh;
        const TimePoint since = clock_.now() - options_.dial_patience;
        for (const Named& named : finding.nodes) {
          PeerLink* const link = named.node == own_.node ? nullptr : link_to(named);
          if (link == nullptr) continue;
          links.push_back(link);
          // An address that did not answer before delays no further request.
          const bool is_fresh = std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
            return slot.link.get() == link && slot.dialed > since;
          });
          if (is_fresh) fresh.push_back(link);
        }
        return await_links(std::move(fresh), clock_.now() + options_.dial_patience)
            .then([this, space, wanted,
                   links = std::move(links)]() -> kj::Promise<std::vector<Owner>> {
              std::vector<Id128> nodes = listed_nodes();
              for (const PeerLink* const link : links) {
                if (link->is_ready()) nodes.push_back(link->node());
              }
              if (nodes.empty()) return std::vector<Owner>();
              return Lenders::owners(space, *wanted, nodes);
            });
      })
      .attach(std::move(wanted));
}

kj::Promise<std::vector<Lenders::Holder>> FoundPeers::holders(const Bytes32& space,
                                                              std::span<const BlockKey> keys) {
  std::vector<std::pair<TimePoint, Id128>> recent;
  for (const Slot& slot : slots_) {
    if (slot.link->is_ready()) recent.emplace_back(slot.used, slot.link->node());
  }
  std::sort(recent.rbegin(), recent.rend());
  std::vector<Id128> nodes = listed_nodes();
  for (std::size_t i = 0; i < std::min(recent.size(), options_.most_holders); ++i) {
    nodes.push_back(recent[i].second);
  }
  if (nodes.empty()) return std::vector<Holder>();
  return Lenders::holders(space, keys, nodes);
}

FoundPeersStats FoundPeers::stats() const {
  FoundPeersStats stats = stats_;
  for (const Slot& slot : slots_) {
    stats.links += slot.link->is_resting() ? 0 : 1;
    stats.ready += slot.link->is_ready() ? 1 : 0;
  }
  return stats;
}

void FoundPeers::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "dialing a named node failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::cluster
