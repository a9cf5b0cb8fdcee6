#pragma once
/// \file
/// Fetches over fake owners and a fake fabric, in virtual time.

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kj/async-io.h>
#include <kj/debug.h>

#include "cluster/peer_source.h"
#include "server/fetches/fetches.h"
#include "tests/unit/server/page_size.h"

namespace pegaflow::testing {

inline constexpr RegionId kOurPool{0};

inline std::vector<BlockKey> keys(std::uint64_t chain, std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t words[2] = {(chain * 1000 + i + 1) * 0x9E3779B97F4A7C15ULL, chain};
    std::memcpy(made[i].bytes.data(), words, sizeof words);
  }
  return made;
}

/// Lends every block that is requested, or those that it has.
class PlayedLender final : public cluster::Lender {
 public:
  [[nodiscard]] bool is_ready() const noexcept override { return true; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return 1; }
  [[nodiscard]] const std::string& address() const noexcept override { return address_; }
  [[nodiscard]] const Route& route() const override { return route_; }
  [[nodiscard]] Id128 node() const noexcept override { return {8, 8}; }
  [[nodiscard]] const FabricDescriptor* fabric() const override {
    return described ? &*described : nullptr;
  }
  kj::Promise<Result<Prefix>> locate(const Bytes32& space,
                                     std::span<const BlockKey> wanted) override {
    const std::size_t blocks = prefix(space, wanted);
    return Result<Prefix>(Prefix{.blocks = blocks, .on_disks = on_disks(blocks)});
  }
  kj::Promise<Result<Present>> locate_each(const Bytes32& space,
                                           std::span<const BlockKey> wanted) override {
    each_asked.push_back(wanted.size());
    Present present;
    for (const BlockKey& key : wanted) present.has.push_back(!has || has(space, key));
    return Result<Present>(std::move(present));
  }
  kj::Promise<Result<LeaseGrant>> lease(const Bytes32& space, std::span<const BlockKey> wants,
                                        std::size_t shards,
                                        std::chrono::milliseconds time) override {
    if (before_lease) before_lease();
    const auto wanted = wants.first(std::min(most_per_lease, prefix(space, wants)));
    if (wanted.empty()) return Result<LeaseGrant>(LeaseGrant{});
    const auto here = wanted.first(std::min(in_pool, wanted.size()));
    LeaseGrant grant{.granted = time};
    if (!here.empty()) grant.lease = ++leases;
    for (std::size_t i = 0; i < here.size() * shards; ++i) {
      const BlockKey& key = here[i / shards];
      grant.pages.push_back(page_of ? page_of(space, key) : static_cast<std::uint32_t>(i));
      if (checksum_of) grant.checksums.push_back(checksum_of(space, key, i % shards));
    }
    grant.pending = on_disks(wanted.size());
    if (grant.pending.blocks != 0) grant.staging = ++stagings;
    return Result<LeaseGrant>(std::move(grant));
  }
  kj::Promise<Result<LeaseGrant>> lease_pending(const Staging& staging, std::chrono::milliseconds,
                                                std::chrono::milliseconds) override {
    auto pair = kj::newPromiseAndFulfiller<Result<LeaseGrant>>();
    pending_.emplace_back(staging, kj::mv(pair.fulfiller));
    return kj::mv(pair.promise);
  }
  void end_staging(std::uint64_t number) override { ended_stagings.push_back(number); }
  /// Answers lease_pending(): lends the next blocks, from page `page` on.
  void lend_pending(std::size_t blocks, std::uint32_t page) {
    LeaseGrant grant{.granted = std::chrono::seconds(10)};
    const Staging staging = asked().value();
    if (blocks != 0) grant.lease = ++leases;
    for (std::size_t i = 0; i < blocks * staging.shards; ++i) {
      grant.pages.push_back(page + static_cast<std::uint32_t>(i));
    }
    grant.pending = {.blocks = staging.pending - blocks, .bytes_per_second = disk_rate};
    if (grant.pending.blocks != 0) grant.staging = staging.number;
    answer_pending(std::move(grant));
  }
  /// The oldest request that is not answered.
  [[nodiscard]] std::optional<Staging> asked() const {
    return pending_.empty() ? std::nullopt : std::optional(pending_.front().first);
  }
  void answer_pending(Result<LeaseGrant> grant) {
    auto fulfiller = kj::mv(pending_.front().second);
    pending_.pop_front();
    fulfiller->fulfill(std::move(grant));
  }
  kj::Promise<Result<bool>> confirm(std::uint64_t lease, Duration) override {
    confirmed.push_back(lease);
    if (!is_confirming) return kj::NEVER_DONE;
    return Result<bool>(holds);
  }
  kj::Promise<Result<Epoch>> reset(const Bytes32&, const Epoch& epoch, Duration) override {
    return Result<Epoch>(epoch);
  }
  void release(std::uint64_t lease) override { released.push_back(lease); }
  void lost(std::uint64_t, const std::string&) override {}
  void route_lost(std::uint64_t, const Route&, const std::string&) override {}

  std::optional<FabricDescriptor> described{};  ///< Its end of the route, for workers.
  std::function<bool(const Bytes32& space, const BlockKey&)> has;  ///< Empty: all blocks.
  /// The page that it lends, equal for all shards. Empty: the page's number in the lease.
  std::function<std::uint32_t(const Bytes32& space, const BlockKey&)> page_of;
  /// Empty: it lends pages without a checksum.
  std::function<std::uint64_t(const Bytes32& space, const BlockKey&, std::size_t shard)>
      checksum_of;
  std::function<void()> before_lease;
  std::size_t most_per_lease = ~std::size_t{0};
  std::size_t in_pool = ~std::size_t{0};  ///< Blocks of a lease before those that are on its disks.
  std::uint64_t disk_rate = 0;            ///< As it reports.
  std::uint64_t stagings = 0;
  std::vector<std::uint64_t> ended_stagings;
  [[nodiscard]] OnDisks on_disks(std::size_t blocks) const {
    return {.blocks = blocks - std::min(in_pool, blocks), .bytes_per_second = disk_rate};
  }
  std::vector<std::size_t> each_asked;  ///< The numbers of keys of locate_each().
  std::uint64_t leases = 0;
  std::vector<std::uint64_t> released;
  std::vector<std::uint64_t> confirmed;  ///< Leases of the requests to confirm().
  bool is_confirming = true;
  bool holds = true;  ///< The result of confirm().

 private:
  [[nodiscard]] std::size_t prefix(const Bytes32& space, std::span<const BlockKey> wanted) const {
    if (!has) return wanted.size();
    const auto missing = std::find_if(wanted.begin(), wanted.end(),
                                      [&](const BlockKey& key) { return !has(space, key); });
    return static_cast<std::size_t>(missing - wanted.begin());
  }

  std::deque<std::pair<Staging, kj::Own<kj::PromiseFulfiller<Result<LeaseGrant>>>>> pending_;
  std::string address_ = "played:1";
  Route route_{.lane = 0, .peer = Fabric::PeerId{7}, .pool = RegionId{3}};
};

class PlayedLenders final : public cluster::Lenders {
 public:
  [[nodiscard]] bool has_ready() const override { return true; }
  kj::Promise<std::vector<Owner>> owners(const Bytes32&, std::span<const BlockKey> wanted,
                                         std::span<const Id128> only = {}) override {
    ++questions;
    asked.emplace_back(only.begin(), only.end());
    if (!only.empty() && std::find(only.begin(), only.end(), knows) == only.end()) {
      return std::vector<Owner>();
    }
    std::vector<Owner> found;
    for (std::size_t i = 0; i < lenders.size(); ++i) {
      PlayedLender& each = lenders.at((best + i) % lenders.size());
      found.push_back({.peer = &each,
                       .life = 1,
                       .blocks = wanted.size(),
                       .on_disks = each.on_disks(wanted.size())});
    }
    return found;
  }

  std::deque<PlayedLender> lenders{1};
  std::size_t best = 0;  ///< The owner that is tried first.
  std::size_t questions = 0;
  std::vector<std::vector<Id128>> asked{};  ///< The nodes that each question was for.
  Id128 knows{5, 5};                        ///< The node with the blocks, when nodes are named.
};

/// Keeps batches until the test completes them.
class PlayedFabric final : public Fabric {
 public:
  Result<RegionId> register_region(const Memory&) override { return kOurPool; }
  Result<void> lend(RegionId, TimePoint) override { return {}; }
  void unregister_region(RegionId) override {}
  [[nodiscard]] FabricDescriptor describe() const override { return {}; }
  Result<PeerId> connect(const FabricDescriptor&) override { return PeerId{7}; }
  Result<void> disconnect(PeerId) override { return {}; }
  Result<void> read(Batch batch) override {
    batches.push_back(std::move(batch));
    return {};
  }
  Result<void> cancel(std::uint64_t) override { return {}; }

  std::deque<Batch> batches;
};

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Late = server::Fetches::Late;

inline constexpr Id128 kMeasured{5, 99};

/// A service of 64 slots with one engine. A batch is one block, and each owner has two at the
/// fabric.
struct Fixture {
  explicit Fixture(std::size_t most_batches = 256)
      : Fixture(most_batches, {.batch_bytes = kPage, .batches_per_owner = 2}) {}
  /// `more`: what its worker registers beside its page.
  Fixture(std::size_t most_batches, cluster::PeerSource::Options options,
          std::uint64_t page_bytes = kPage, const server::Fetches::Options& fetching = {},
          Registration more = {}) {
    options.batches = most_batches;
    auto made = server::CacheService::create(
        {.store = {.pool_bytes = 64 * page_bytes}}, clock,
        [this](const Id128& connection) { service->disconnected(connection); });
    REQUIRE(made);
    service = std::move(*made);
    background = std::make_unique<server::Background>(*service, io.provider->getTimer(), clock);
    const std::vector<cluster::PeerSource::Lane> lanes = {{.fabric = &fabric, .pool = kOurPool}};
    source = std::make_unique<cluster::PeerSource>(peers, lanes, clock, clock, options);
    fetches = std::make_unique<server::Fetches>(*service, source.get(), *background,
                                                io.provider->getTimer(), clock, fetching);
    REQUIRE(service->connected(engine, {.process = engine,
                                        .previous_connection = {},
                                        .quiesced = false,
                                        .build = "test",
                                        .watch = std::make_shared<int>(0)}));
    more.instance = "engine";
    more.factors = {{"weights", "a"}};
    more.page_bytes = page_bytes;
    REQUIRE(service->register_rank(engine, more));
  }

  std::size_t claim(const Id128& token, std::span<const BlockKey> wanted) {
    return extend(token, wanted).wait(io.waitScope).blocks;
  }
  /// Claims for an engine that computes a block in `per_block` and begins after `delay`.
  server::Fetches::Extension claim(const Id128& token, std::span<const BlockKey> wanted,
                                   Duration per_block, Duration delay = {}) {
    return extend(token, wanted, {.delay = delay, .per_block = per_block}).wait(io.waitScope);
  }
  kj::Promise<server::Fetches::Extension> extend(const Id128& token,
                                                 std::span<const BlockKey> wanted,
                                                 const cluster::ComputeTime& compute = {}) {
    auto extending = fetches->extend(engine, token, wanted, 0, compute);
    KJ_IF_MAYBE (growth, extending) return kj::mv(*growth);
    throw std::runtime_error("extend() expects nothing from the source");
  }
  /// Measures the rate: a block takes 10 ms.
  void measure() {
    REQUIRE(claim(kMeasured, keys(99, 4)) == 4);
    for (int i = 0; i < 4; ++i) {
      clock.advance(milliseconds(10));
      complete();
    }
    unclaim(kMeasured);
  }
  void unclaim(const Id128& token) {
    fetches->ended(token);
    REQUIRE(service->unclaim(engine, token));
    while (service->work()) {
    }
  }
  /// Completes the oldest batch at the fabric.
  void complete(std::optional<Errc> why = std::nullopt, bool quiesced = true) {
    REQUIRE_FALSE(fabric.batches.empty());
    const Fabric::Batch batch = std::move(fabric.batches.front());
    fabric.batches.pop_front();
    source->completed({.ticket = batch.ticket,
                       .chunks = std::vector<std::optional<Errc>>(batch.chunks.size(), why),
                       .detail = "played",
                       .quiesced = quiesced});
    io.waitScope.poll();
  }
  /// The frames of a batch that completed before are quiesced.
  void settle(std::uint64_t ticket) {
    source->completed({.ticket = ticket, .chunks = {}, .detail = "played", .quiesced = true});
    io.waitScope.poll();
  }
  /// A worker's open, and its result.
  struct Question {
    std::optional<Result<server::Fetches::Arrived>> answer;
    kj::Promise<void> asked = nullptr;
  };
  std::shared_ptr<Question> open(const Id128& token, std::size_t count,
                                 const std::optional<Duration>& worth, Duration computing = {}) {
    return open_rest(token, 0, count, worth, computing);
  }
  std::shared_ptr<Question> open_rest(const Id128& token, std::size_t first, std::size_t count,
                                      const std::optional<Duration>& worth,
                                      Duration computing = {}) {
    last_token = token;
    auto question = std::make_shared<Question>();
    question->asked =
        fetches
            ->open(engine, token, first, count, engine::PinId{++last_pin},
                   {.patience = std::chrono::hours(1), .worth = worth, .computing = computing})
            .then(
                [to = question.get()](Result<server::Fetches::Arrived>&& got) { to->answer = got; })
            .eagerlyEvaluate(nullptr);
    return question;
  }
  [[nodiscard]] bool is_answered(const std::shared_ptr<Question>& question) {
    io.waitScope.poll();
    return question->answer.has_value();
  }
  /// Claims six blocks as kOne, of which the first has arrived and is opened.
  void open_first_of_six() {
    REQUIRE(claim({5, 1}, keys(1, 6)) == 6);
    const auto first = open({5, 1}, 6, std::nullopt);
    complete();
    REQUIRE(is_answered(first));
    CHECK(first->answer->value().opened.slots.size() == 1);
  }
  /// Whether a timer of a few milliseconds ends it, without another event.
  [[nodiscard]] bool is_answered_soon(const std::shared_ptr<Question>& question) {
    auto limit = io.provider->getTimer().afterDelay(2 * kj::SECONDS);
    std::exchange(question->asked, nullptr).exclusiveJoin(kj::mv(limit)).wait(io.waitScope);
    return question->answer.has_value();
  }
  /// Lets opens look at the clock, as each event does: here the end of another open.
  void look_again(std::size_t coming = 0) {
    const auto another = open_rest(last_token, coming, 1, std::nullopt);
    fetches->released(engine, engine::PinId{last_pin});
    io.waitScope.poll();
  }
  [[nodiscard]] std::size_t here(std::span<const BlockKey> wanted) {
    return service->lookup(engine, wanted).value().blocks;
  }
  void check_rest() {
    while (service->work()) {
    }
    CHECK(source->stats().batches == 0);
    CHECK(service->stats().store.fetch_bytes == 0);
    CHECK(service->stats().store.in_flight == 0);
    REQUIRE(service->store().check());
    for (const PlayedLender& each : peers.lenders) CHECK(each.released.size() == each.leases);
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  ManualClock clock;
  Id128 engine{1, 1};
  std::uint64_t last_pin = 0;
  Id128 last_token;
  PlayedLenders peers;
  PlayedFabric fabric;
  std::unique_ptr<server::CacheService> service;
  std::unique_ptr<server::Background> background;
  std::unique_ptr<cluster::PeerSource> source;
  std::unique_ptr<server::Fetches> fetches;
};

inline constexpr Id128 kOne{5, 1};
inline constexpr Id128 kTwo{5, 2};
inline constexpr Id128 kThree{5, 3};

}  // namespace pegaflow::testing
