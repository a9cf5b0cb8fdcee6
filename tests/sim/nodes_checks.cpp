// Checks while a schedule runs, and at its end.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "tests/sim/nodes_world.h"
#include "tests/sim/nodes_world_impl.h"

namespace pegaflow::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Until everything has expired: leases, reservations, reads that are late.
constexpr Duration kLongEnough = seconds(120);
/// The time of a request without faults; below any lease.
constexpr Duration kSoonDone = milliseconds(500);

}  // namespace

// ---- checks

void NodesWorld::wrong(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

void NodesWorld::stop_if_wrong() {
  for (const auto& engines : engines_) {
    for (const auto& engine : engines) {
      if (engine->failure) wrong(*engine->failure);
    }
  }
  if (!failure_.empty()) throw std::runtime_error(failure_);
}

/// An owner names blocks only to a reader that may read them unchanged.
void NodesWorld::look_at_located(std::size_t owner, std::span<const BlockKey> found,
                                 std::uint64_t oldest) {
  const auto& engines = engines_[owner];
  const auto living = std::find_if(engines.begin(), engines.end(),
                                   [](const auto& engine) { return !engine->is_dead; });
  if (living == engines.end()) return;
  server::CacheService& service = cluster_->node(owner)->service();
  const Id128 token{4, next_++};
  const auto claimed = service.claim((*living)->connection, token, found);
  if (!claimed || claimed->blocks == 0) return;
  const engine::PinId pin{next_++};
  if (const auto opened = service.open((*living)->connection, token, 0, claimed->blocks, pin)) {
    for (std::size_t i = 0; i < opened->slots.size(); ++i) {
      look_at(**living, opened->slots[i], {found[i], oldest});
    }
    ++coverage_["located blocks looked at"];
    (void)service.release((*living)->connection, pin);
  }
  (void)service.unclaim((*living)->connection, token);
}

void NodesWorld::look_at(const Engine& engine, std::uint32_t page, const Page& expected) {
  const std::span<const std::byte> bytes = cluster_->node(engine.node)->page(page);
  std::uint64_t written = 0;
  std::memcpy(&written, bytes.data(), sizeof written);
  for (std::size_t i = 1; i < kWords; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i * sizeof word, sizeof word);
    if (word == word_of(expected.key, written, i)) continue;
    return wrong(fmt::format("page {} of node {} has other bytes than block {:x}, from word {} on",
                             page, engine.node, expected.key.hash(), i));
  }
  if (written >= expected.time) return;
  wrong(fmt::format("node {} serves block {:x} as it was saved at {}, before the reset at {}",
                    engine.node, expected.key.hash(), written, expected.time));
}

void NodesWorld::look_at_free(std::size_t node, std::uint32_t page, const char* whose) {
  const Use& use = uses_[node][page];
  const auto place = cluster_->node(node)->place(page * harness::SimCluster::kPageBytes,
                                                 harness::SimCluster::kPageBytes);
  const harness::SimDisks* const disks = cluster_->node(node)->disks();
  const bool is_brought =
      cluster_->node(node)->fabric().is_written(place) ||
      (disks != nullptr && disks->is_writing(page * harness::SimCluster::kPageBytes));
  if (use.readers == 0 && !use.is_written && !is_brought) return;
  wrong(fmt::format("{} gets page {} of node {}, which {}", whose, page, node,
                    is_brought       ? "a card may still write"
                    : use.is_written ? "an engine writes"
                                     : "is pinned"));
}

std::string NodesWorld::unrest() const {
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    harness::SimCluster::Node& node = *cluster_->node(i);
    const engine::BlockStore::Stats stats = node.service().stats().store;
    if (node.source().stats().batches != 0) {
      return fmt::format("node {} has {} batches", i, node.source().stats().batches);
    }
    if (node.staging() != nullptr &&
        (node.staging()->stats().stagings != 0 || node.staging()->stats().bytes != 0)) {
      return fmt::format("node {} has {} stagings", i, node.staging()->stats().stagings);
    }
    if (node.fabric().batches() != 0) {
      return fmt::format("the fabric of node {} has {} batches", i, node.fabric().batches());
    }
    if (node.ready_peers() + 1 != cluster_->size()) {
      return fmt::format("node {} has {} peers", i, node.ready_peers());
    }
    if (!node.service().store().is_idle() || node.service().has_work()) {
      return fmt::format(
          "the store of node {} has work left: {} in flight, {} given up, {} reserved, {} held, {} "
          "claims, {} pins, {} leases, work: {}",
          i, stats.in_flight, stats.quarantined_fetch, stats.reserved, stats.held, stats.claims,
          stats.pins, stats.leases, node.service().has_work());
    }
  }
  return {};
}

void NodesWorld::count_up(std::size_t node) {
  const server::Fetches::Stats fetches = cluster_->node(node)->fetches().stats();
  const cluster::PeerSource::Stats source = cluster_->node(node)->source().stats();
  const engine::BlockStore::Stats store = cluster_->node(node)->service().stats().store;
  coverage_["blocks fetched"] += fetches.blocks;
  coverage_["blocks given up"] += fetches.given_up;
  coverage_["blocks of disks staged"] += fetches.staged_blocks;
  coverage_["blocks of disks restored"] += fetches.restored_blocks;
  coverage_["blocks of other nodes' disks"] += source.pending;
  coverage_["blocks retried"] += fetches.retried;
  coverage_["blocks too late for their lease"] += source.outlived;
  coverage_["blocks not confirmed"] += source.unconfirmed;
  coverage_["blocks corrupt"] += source.corrupt;
  coverage_["fetches joined"] += store.fetches_joined;
  coverage_["fetches without room"] += store.fetches_no_room;
  coverage_["evictions"] += store.evictions;
  coverage_["replicas evicted"] += store.evicted_replicas;
  coverage_["leases run out"] += store.leases_expired;
  coverage_["reservations timed out"] += store.reservations_timed_out;
  coverage_["claims revoked"] += store.claims_revoked;
}

void NodesWorld::end_all() {
  note("the end begins");
  cluster_->network().set_faults({});
  cluster_->set_lost(0);
  cluster_->set_disk_faults({});
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    if (cluster_->node(i) == nullptr) {
      cluster_->start(i);
      add_engine(i);
    }
    for (std::size_t j = 0; j < i; ++j) cluster_->heal(i, j);
  }
  const TimePoint end = cluster_->clock().now() + kLongEnough;
  for (auto& engines : engines_) {
    std::vector<std::shared_ptr<Engine>> dead;
    for (const auto& engine : engines) {
      if (engine->is_dead) dead.push_back(engine);
    }
    for (const auto& engine : dead) {
      for (const auto& [page, count] : engine->pins) {
        look_at(*engine, page, engine->reads.at(page));
        uses_[engine->node][page].readers -= count;
      }
      for (const auto& [page, written] : engine->writes)
        uses_[engine->node][page].is_written = false;
      cluster_->node(engine->node)->service().process_gone(engine->connection);
      cluster_->node(engine->node)->poke();
    }
    std::erase_if(engines, [](const auto& engine) { return engine->is_dead; });
  }
  while (!unrest().empty() && cluster_->clock().now() < end) cluster_->run_for(seconds(1));
  stop_if_wrong();
  if (const std::string why = unrest(); !why.empty()) return wrong("resources are left: " + why);
  give_back();
  stop_if_wrong();
  // All have greeted each other: no node has missed a reset that another one knows.
  const std::uint64_t newest = *std::max_element(oldest_.begin(), oldest_.end());
  std::fill(oldest_.begin(), oldest_.end(), newest);
  look_at_everything();
}

void NodesWorld::give_back() {
  cluster_->run_for(seconds(20));  // No node is frozen for longer.
  const auto stats = [this](std::size_t node) {
    return cluster_->node(node)->service().stats().store;
  };
  // A cut link may show only now, by a read that fails: then its lease expires, whether its blocks
  // come from another owner or not at all.
  const auto failed = [this]() {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < cluster_->size(); ++i) {
      const auto told = cluster_->node(i)->fetches().stats();
      sum += told.given_up + told.retried;
    }
    return sum;
  };
  const std::uint64_t failed_before = failed();
  std::vector<engine::BlockStore::Stats> before;
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    before.push_back(stats(i));
    if (engines_[i].empty()) add_engine(i);
    begin_request(i, false);
  }
  cluster_->run_for(kSoonDone);
  for (std::size_t i = 0; failed() == failed_before && i < cluster_->size(); ++i) {
    const engine::BlockStore::Stats now = stats(i);
    coverage_["leases given back at the end"] += now.leases_made - before[i].leases_made;
    if (now.claims + now.pins != 0) {
      const server::Staging* const staging = cluster_->node(i)->staging();
      wrong(fmt::format(
          "a request at node {} waits for blocks that have arrived: {} claims, {} pins, {} in "
          "flight, {} batches, {} stagings",
          i, now.claims, now.pins, now.in_flight, cluster_->node(i)->source().stats().batches,
          staging == nullptr ? 0 : staging->stats().stagings));
    }
    if (now.leases == 0 && now.leases_expired == before[i].leases_expired) continue;
    wrong(fmt::format("of node {} {} leases are not given back", i,
                      now.leases + now.leases_expired - before[i].leases_expired));
  }
  const TimePoint end = cluster_->clock().now() + kLongEnough;
  while (!unrest().empty() && cluster_->clock().now() < end) cluster_->run_for(seconds(1));
}

void NodesWorld::look_at_everything() {
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    count_up(i);
    harness::SimCluster::Node& node = *cluster_->node(i);
    if (engines_[i].empty()) add_engine(i);
    const Engine& engine = *engines_[i].front();
    for (std::size_t chain = 0; chain < chains_; ++chain) {
      for (std::size_t block = 0; block < chain_blocks_; ++block) {
        const BlockKey one = key(chain, block);
        const Id128 token{3, next_++};
        const engine::PinId pin{next_++};
        const auto found = node.service().claim(engine.connection, token, {&one, 1});
        if (!found || found->blocks == 0) continue;
        const auto opened = node.service().open(engine.connection, token, 0, 1, pin);
        if (!opened) return wrong("a block that is claimed after all work has ended is not opened");
        look_at(engine, opened->slots[0], {one, oldest_[i]});
        ++coverage_["blocks at the end"];
        (void)node.service().release(engine.connection, pin);
        (void)node.service().unclaim(engine.connection, token);
      }
    }
    while (node.service().work()) {
    }
    const auto checked = node.service().store().check();
    if (!checked) wrong(fmt::format("node {}: {}", i, checked.error().detail));
  }
}

}  // namespace pegaflow::sim
