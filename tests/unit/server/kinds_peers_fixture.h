#pragma once
/// \file
/// An engine of several kinds at a node, and other nodes that the test plays.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "cluster/lender.h"
#include "cluster/peer_source.h"
#include "server/fetches/fetches.h"
#include "tests/unit/server/fetches_fixture.h"
#include "tests/unit/server/kinds_fixture.h"

namespace pegaflow::testing {

using Claim = server::Fetches::ClaimOfKinds;

inline constexpr engine::BlockStore::Options kStore = {
    .pool_bytes = 256 * kPage, .instance_share = 1.0, .server_share = 1.0};

/// An engine of several kinds at a node with peers.
struct KindsPeers : KindsFixture {
  explicit KindsPeers(std::size_t count = 1, const engine::BlockStore::Options& store = kStore,
                      const Registration& registration = full_window_state())
      : KindsFixture(registration, store), lenders(count), has(count) {
    for (std::size_t i = 0; i < count; ++i) {
      lenders[i].has = [this, i](const Bytes32& space, const BlockKey& key) {
        return has[i].contains({space, key.bytes});
      };
      peers.add(lenders[i]);
    }
    background = std::make_unique<server::Background>(*service, io.provider->getTimer(), clock);
    const std::vector<cluster::PeerSource::Lane> lanes = {{.fabric = &fabric, .pool = kOurPool}};
    source = std::make_unique<cluster::PeerSource>(
        peers, lanes, clock, clock, cluster::PeerSource::Options{.batch_bytes = kPage});
    fetches = std::make_unique<server::Fetches>(*service, source.get(), *background,
                                                io.provider->getTimer(), clock,
                                                server::Fetches::Options());
    work();
  }
  [[nodiscard]] Bytes32 space(std::size_t kind) const {
    return service->wants_of_kinds(scheduler, 0).value().kinds[kind].space;
  }
  /// The key of a block: that of the unit that it ends with.
  static BlockKey key(std::size_t kind, std::uint64_t chain, std::size_t block) {
    return prompt(chain, (block + 1) * (kind == kState ? 2 : 1)).back();
  }
  /// A peer has these blocks of a kind.
  void give(std::size_t peer, std::size_t kind, std::uint64_t chain,
            const std::vector<std::size_t>& blocks) {
    for (const std::size_t block : blocks) {
      has[peer].insert({space(kind), key(kind, chain, block).bytes});
    }
  }
  void give_eight(std::size_t peer, std::uint64_t chain) {
    give(peer, kFull, chain, {0, 1, 2, 3, 4, 5, 6, 7});
    give(peer, kWindow, chain, {5, 6, 7});
    give(peer, kState, chain, {3});
  }
  [[nodiscard]] std::size_t reach(std::uint64_t chain, std::size_t units, std::size_t local = 0) {
    auto reached = fetches->reach_kinds(scheduler, prompt(chain, units), local);
    KJ_IF_MAYBE (found, reached) return found->wait(io.waitScope);
    return 0;
  }
  kj::Promise<Claim> claiming(const Id128& token, std::uint64_t chain, std::size_t units,
                              const cluster::ComputeTime& compute = {}, std::size_t local = 0) {
    auto made = fetches->claim_kinds(scheduler, token, prompt(chain, units), local, compute);
    KJ_IF_MAYBE (claim, made) return kj::mv(*claim);
    return Claim();
  }
  Claim claim_from_peers(const Id128& token, std::uint64_t chain, std::size_t units,
                         const cluster::ComputeTime& compute = {}, std::size_t local = 0) {
    return claiming(token, chain, units, compute, local).wait(io.waitScope);
  }
  /// Completes the oldest read at the fabric.
  void complete(std::optional<Errc> why = std::nullopt) {
    REQUIRE_FALSE(fabric.batches.empty());
    const Fabric::Batch batch = std::move(fabric.batches.front());
    fabric.batches.pop_front();
    source->completed({.ticket = batch.ticket,
                       .chunks = std::vector<std::optional<Errc>>(batch.chunks.size(), why),
                       .detail = "played",
                       .quiesced = true});
    io.waitScope.poll();
  }
  void complete_all() {
    while (!fabric.batches.empty()) complete();
  }
  void end(const Id128& token) {
    fetches->ended(token);
    REQUIRE(service->unclaim(scheduler, token));
  }
  [[nodiscard]] std::size_t open_count(const Id128& token, std::size_t kind, std::size_t count) {
    const auto opened = open(token, kind, 0, count, ++pins);
    return opened ? opened->slots.size() : 0;
  }
  /// Nothing of a fetch or a claim is left.
  void check_rest() {
    work();
    CHECK(fabric.batches.empty());
    CHECK(source->stats().batches == 0);
    CHECK(service->stats().store.in_flight == 0);
    CHECK(service->stats().store.fetch_bytes == 0);
    CHECK(service->stats().store.claims == 0);
    for (const PlayedLender& each : lenders) CHECK(each.released.size() == each.leases);
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  cluster::Lenders peers;
  std::deque<PlayedLender> lenders;
  std::vector<std::set<std::pair<Bytes32, decltype(BlockKey::bytes)>>> has;
  PlayedFabric fabric;
  std::unique_ptr<server::Background> background;
  std::unique_ptr<cluster::PeerSource> source;
  std::unique_ptr<server::Fetches> fetches;
  std::uint64_t pins = 100;
};

/// The ranges of a prompt of 8 units.
inline constexpr const char* kEight = "0:0+8 1:5+3 2:3+1";

}  // namespace pegaflow::testing
