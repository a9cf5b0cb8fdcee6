// What Fetches asks for, and what it leaves alone: owners and a fabric that the test plays, in
// virtual time.
#include "server/fetches.h"

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <kj/async-io.h>

namespace pegaflow {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr RegionId kOurPool{0};

std::vector<BlockKey> keys(std::uint64_t chain, std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t words[2] = {(chain * 1000 + i + 1) * 0x9E3779B97F4A7C15ULL, chain};
    std::memcpy(made[i].bytes.data(), words, sizeof words);
  }
  return made;
}

/// Lends as many blocks as it is asked for.
class PlayedLender final : public Lender {
 public:
  [[nodiscard]] bool is_ready() const noexcept override { return true; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return 1; }
  [[nodiscard]] const std::string& address() const noexcept override { return address_; }
  [[nodiscard]] const Way& way() const override { return way_; }
  kj::Promise<Result<std::size_t>> locate(const Bytes32&,
                                          std::span<const BlockKey> wanted) override {
    return Result<std::size_t>(wanted.size());
  }
  kj::Promise<Result<LeaseGrant>> lease(const Bytes32&, std::span<const BlockKey> wanted,
                                        std::size_t shards,
                                        std::chrono::milliseconds time) override {
    ++leases;
    LeaseGrant grant{.lease = leases, .granted = time, .pages = {}, .checksums = {}};
    for (std::size_t i = 0; i < wanted.size() * shards; ++i) {
      grant.pages.push_back(static_cast<std::uint32_t>(i));
    }
    return Result<LeaseGrant>(std::move(grant));
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
  void way_lost(std::uint64_t, const Way&, const std::string&) override {}

  std::uint64_t leases = 0;
  std::vector<std::uint64_t> released;
  std::vector<std::uint64_t> confirmed;  ///< That it was asked about.
  bool is_confirming = true;
  bool holds = true;  ///< What it says of leases.

 private:
  std::string address_ = "played:1";
  Way way_{.lane = 0, .peer = Fabric::PeerId{7}, .pool = RegionId{3}};
};

class PlayedLenders final : public Lenders {
 public:
  [[nodiscard]] bool has_ready() const override { return true; }
  kj::Promise<std::vector<Owner>> owners(const Bytes32&,
                                         std::span<const BlockKey> wanted) override {
    ++questions;
    std::vector<Owner> found;
    for (std::size_t i = 0; i < lenders.size(); ++i) {
      PlayedLender& each = lenders.at((best + i) % lenders.size());
      found.push_back({.peer = &each, .life = 1, .blocks = wanted.size()});
    }
    return found;
  }

  std::deque<PlayedLender> lenders{1};
  std::size_t best = 0;  ///< The one that is asked first.
  std::size_t questions = 0;
};

/// Keeps what it is to read until the test says what became of it.
class PlayedFabric final : public Fabric {
 public:
  Result<RegionId> register_region(std::span<std::byte>) override { return kOurPool; }
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
using Late = Fetches::Late;

constexpr Id128 kMeasured{5, 99};

/// A service of 64 slots with one engine. A batch is one block, and an owner has two at the fabric.
struct Fixture {
  explicit Fixture(std::size_t most_batches = 256)
      : Fixture(most_batches, {.batch_bytes = kPage, .batches_per_owner = 2}) {}
  Fixture(std::size_t most_batches, Fetches::Options options) {
    options.batches = most_batches;
    auto made = CacheService::create(
        {.store = {.pool_bytes = 64 * kPage}}, clock,
        [this](const Id128& connection) { service->disconnected(connection); });
    REQUIRE(made);
    service = std::move(*made);
    background = std::make_unique<Background>(*service, io.provider->getTimer(), clock);
    const std::vector<Fetches::Lane> lanes = {{.fabric = &fabric, .pool = kOurPool}};
    fetches = std::make_unique<Fetches>(*service, peers, lanes, *background,
                                        io.provider->getTimer(), clock, clock, options);
    REQUIRE(service->connected(engine, {.process = engine,
                                        .previous_connection = {},
                                        .quiesced = false,
                                        .build = "test",
                                        .watch = std::make_shared<int>(0)}));
    REQUIRE(service->register_rank(
        engine, {.instance = "engine", .factors = {{"weights", "a"}}, .page_bytes = kPage}));
  }

  std::size_t claim(const Id128& token, std::span<const BlockKey> wanted) {
    return fetches->extend(engine, token, wanted, 0).wait(io.waitScope).blocks;
  }
  /// What a claim gets whose engine computes a block in so long, and begins after `delay`.
  Fetches::Extension claim(const Id128& token, std::span<const BlockKey> wanted, Duration per_block,
                           Duration delay = {}) {
    return fetches->extend(engine, token, wanted, 0, {.delay = delay, .per_block = per_block})
        .wait(io.waitScope);
  }
  /// From now on it is known that a block takes 10 ms.
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
  /// The oldest batch at the fabric ends.
  void complete(std::optional<Errc> why = std::nullopt, bool settled = true) {
    REQUIRE_FALSE(fabric.batches.empty());
    const Fabric::Batch batch = std::move(fabric.batches.front());
    fabric.batches.pop_front();
    fetches->completed({.ticket = batch.ticket,
                        .chunks = std::vector<std::optional<Errc>>(batch.chunks.size(), why),
                        .detail = "played",
                        .settled = settled});
    io.waitScope.poll();
  }
  /// A batch that was answered before is not written to any more.
  void settle(std::uint64_t ticket) {
    fetches->completed({.ticket = ticket, .chunks = {}, .detail = "played", .settled = true});
    io.waitScope.poll();
  }
  /// What a worker asks, and what it was answered.
  struct Question {
    std::optional<Result<Fetches::Arrived>> answer;
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
            ->open(engine, token, first, count, PinId{++last_pin},
                   {.patience = std::chrono::hours(1), .worth = worth, .computing = computing})
            .then([to = question.get()](Result<Fetches::Arrived>&& got) { to->answer = got; })
            .eagerlyEvaluate(nullptr);
    return question;
  }
  [[nodiscard]] bool is_answered(const std::shared_ptr<Question>& question) {
    io.waitScope.poll();
    return question->answer.has_value();
  }
  /// Whether it is answered without anything else that happens, by a timer of a few milliseconds.
  [[nodiscard]] bool is_answered_soon(const std::shared_ptr<Question>& question) {
    auto limit = io.provider->getTimer().afterDelay(2 * kj::SECONDS);
    std::exchange(question->asked, nullptr).exclusiveJoin(kj::mv(limit)).wait(io.waitScope);
    return question->answer.has_value();
  }
  /// A question looks at the clock when something has happened, such as the end of another one.
  void look_again(std::size_t coming = 0) {
    const auto another = open_rest(last_token, coming, 1, std::nullopt);
    fetches->released(engine, PinId{last_pin});
    io.waitScope.poll();
  }
  [[nodiscard]] std::size_t here(std::span<const BlockKey> wanted) {
    return service->lookup(engine, wanted).value().blocks;
  }
  void check_rest() {
    while (service->work()) {
    }
    CHECK(fetches->stats().batches == 0);
    CHECK(service->stats().store.fetch_bytes == 0);
    CHECK(service->stats().store.coming == 0);
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
  std::unique_ptr<CacheService> service;
  std::unique_ptr<Background> background;
  std::unique_ptr<Fetches> fetches;
};

constexpr Id128 kOne{5, 1};
constexpr Id128 kTwo{5, 2};
constexpr Id128 kThree{5, 3};

TEST_SUITE("Fetches") {
  TEST_CASE("an owner has some batches at the fabric, in the order of the prefix") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    CHECK(f.fetches->stats().batches == 6);
    for (std::uint64_t block = 0; block < 6; ++block) {
      CHECK(f.fabric.batches.size() == std::min<std::uint64_t>(2, 6 - block));
      CHECK(f.fabric.batches.front().chunks.at(0).remote_offset == block * kPage);
      f.complete();
      CHECK(f.here(keys(1, 6)) == block + 1);
    }
    CHECK(f.fetches->stats().blocks == 6);
    f.check_rest();
  }

  TEST_CASE("what was read is sealed only after the owner confirmed the lease") {
    Fixture f;
    f.peers.lenders.front().is_confirming = false;
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.complete();
    f.complete();

    // The next blocks are read meanwhile, and one question is asked.
    CHECK(f.fabric.batches.size() == 1);
    CHECK(f.peers.lenders.front().confirmed.size() == 1);
    CHECK(f.here(keys(1, 3)) == 0);
  }

  TEST_CASE("what the owner does not confirm is not sealed, whatever our clock says") {
    Fixture f;
    f.peers.lenders.front().holds = false;
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    f.complete();
    f.complete();

    CHECK(f.here(keys(1, 2)) == 0);
    CHECK(f.fetches->stats().blocks == 0);
    CHECK(f.fetches->stats().unconfirmed == 2);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("what was read before a reset is not sealed after it") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    REQUIRE(f.service->reset_cache(f.engine));
    f.complete();
    f.complete();

    CHECK(f.here(keys(1, 2)) == 0);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("of a claim that has ended nothing more is asked for, and what was is kept") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);

    f.unclaim(kOne);
    f.complete();
    CHECK(f.fabric.batches.size() == 1);
    f.complete();

    CHECK(f.fabric.batches.empty());
    CHECK(f.here(keys(1, 6)) == 2);
    CHECK(f.fetches->stats().blocks == 2);
    CHECK(f.fetches->stats().unwanted == 4);
    CHECK(f.fetches->stats().given_up == 0);
    f.check_rest();
  }

  TEST_CASE("what another claim waits for is asked for, and only that") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.claim(kTwo, keys(1, 4)) == 4);

    f.unclaim(kOne);
    for (int i = 0; i < 4; ++i) f.complete();

    CHECK(f.fabric.batches.empty());
    CHECK(f.here(keys(1, 6)) == 4);
    CHECK(f.fetches->stats().unwanted == 2);
    CHECK(f.peers.lenders.front().leases == 1);
    f.check_rest();
  }

  TEST_CASE("what failed is not asked for elsewhere when nobody waits for it") {
    Fixture f;
    f.peers.lenders.resize(2);
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    const std::size_t questions = f.peers.questions;
    f.complete(Errc::kPeerLost);
    CHECK(f.peers.questions == questions + 1);
    CHECK(f.fetches->stats().retried == 1);

    f.unclaim(kOne);
    f.complete(Errc::kPeerLost);
    CHECK(f.peers.questions == questions + 1);
    CHECK(f.fetches->stats().unwanted == 1);
    f.complete();
    f.check_rest();
  }

  TEST_CASE("the age of the oldest read is told until it is settled") {
    Fixture f;
    CHECK(f.fetches->stats().oldest == Duration::zero());
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.clock.advance(std::chrono::milliseconds(300));
    f.complete();
    f.clock.advance(std::chrono::milliseconds(200));

    CHECK(f.fetches->stats().oldest == std::chrono::milliseconds(500));
    f.complete();
    CHECK(f.fetches->stats().oldest == std::chrono::milliseconds(200));
    f.complete();
    CHECK(f.fetches->stats().oldest == Duration::zero());
    f.check_rest();
  }

  TEST_CASE("leases share the places at the fabric, and those who wait get theirs") {
    Fixture f(1);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    REQUIRE(f.claim(kTwo, keys(2, 3)) == 3);
    // What waits for a place, too, is not asked for when nobody wants it.
    f.unclaim(kOne);
    for (int i = 0; i < 4; ++i) {
      CHECK(f.fabric.batches.size() == 1);
      f.complete();
    }

    CHECK(f.here(keys(1, 3)) == 1);
    CHECK(f.here(keys(2, 3)) == 3);
    CHECK(f.fetches->stats().unwanted == 2);
    f.check_rest();
  }

  TEST_CASE("owners take turns where places at the fabric are short") {
    Fixture f(1);
    f.peers.lenders.resize(4);
    for (std::uint64_t owner = 0; owner < 4; ++owner) {
      f.peers.best = owner;
      REQUIRE(f.claim(Id128{5, owner}, keys(owner, 3)) == 3);
    }
    for (int i = 0; i < 4; ++i) f.complete();

    for (std::uint64_t owner = 0; owner < 4; ++owner) CHECK(f.here(keys(owner, 3)) == 1);
    for (int i = 0; i < 8; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("what is computed sooner than it arrives is not fetched") {
    Fixture f;
    f.measure();
    const std::uint64_t leases = f.peers.lenders.front().leases;

    CHECK(f.claim(kOne, keys(1, 4), milliseconds(9)).blocks == 0);
    CHECK(f.peers.lenders.front().leases == leases);
    CHECK(f.fetches->stats().declined == 4);

    const auto fetched = f.claim(kTwo, keys(1, 4), milliseconds(11));
    CHECK(fetched.blocks == 4);
    CHECK(fetched.arrival.first == milliseconds(10) + SourceRate::kLatency);
    CHECK(fetched.arrival.last == milliseconds(40) + SourceRate::kLatency);
    for (int i = 0; i < 4; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("what is queued at a node comes first, and what the engine computes first counts too") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);

    CHECK(f.claim(kTwo, keys(2, 4), milliseconds(20)).blocks == 0);
    const auto fetched = f.claim(kTwo, keys(2, 4), milliseconds(20), milliseconds(30));
    CHECK(fetched.blocks == 4);
    CHECK(fetched.arrival.first == milliseconds(70) + SourceRate::kLatency);
    CHECK(fetched.arrival.last == milliseconds(100) + SourceRate::kLatency);
    for (int i = 0; i < 10; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("claims that ask for leases at the same time count on each other's bytes") {
    Fixture f;
    f.measure();
    const ComputeTime slow{.delay = {}, .per_block = milliseconds(25)};
    const std::vector<BlockKey> one = keys(1, 4);
    const std::vector<BlockKey> two = keys(2, 4);
    auto first = f.fetches->extend(f.engine, kOne, one, 0, slow);
    auto second = f.fetches->extend(f.engine, kTwo, two, 0, slow);

    CHECK(first.wait(f.io.waitScope).arrival.last == milliseconds(40) + SourceRate::kLatency);
    CHECK(second.wait(f.io.waitScope).arrival.last == milliseconds(80) + SourceRate::kLatency);
    for (int i = 0; i < 8; ++i) f.complete();
    CHECK(f.fetches->rate(f.peers.lenders.front())->queued_bytes() == 0);
    f.check_rest();
  }

  TEST_CASE("a node whose rate is not known is probed with one batch, and with one at a time") {
    Fixture f;
    const auto probe = f.claim(kOne, keys(1, 6), milliseconds(3));
    CHECK(probe.blocks == 1);
    CHECK(probe.arrival.last == milliseconds(3));
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(3)).blocks == 0);

    f.clock.advance(milliseconds(1));
    f.complete();
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(3)).blocks == 6);
    for (int i = 0; i < 6; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("a slow node is probed again when its rate is 10 s old, and a fast one is believed") {
    Fixture f;
    f.measure();
    f.clock.advance(SourceRate::kBelieved);
    CHECK(f.claim(kOne, keys(1, 6), milliseconds(20)).blocks == 6);
    for (int i = 0; i < 6; ++i) {
      f.clock.advance(milliseconds(10));
      f.complete();
    }
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(5)).blocks == 0);

    f.clock.advance(SourceRate::kBelieved);
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(5)).blocks == 1);
    f.clock.advance(milliseconds(1));
    f.complete();
    f.unclaim(kTwo);

    // It is fast again, and what was measured before does not count.
    CHECK(f.claim(kThree, keys(3, 6), milliseconds(5)).blocks == 6);
    for (int i = 0; i < 6; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("what another claim fetches already is joined, however slow it is") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);

    const auto joined = f.claim(kTwo, keys(1, 4), microseconds(1));

    CHECK(joined.blocks == 4);
    CHECK(joined.arrival.last == milliseconds(40) + SourceRate::kLatency);
    for (int i = 0; i < 4; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("owners are read in the order of the claims, whatever else waits") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    REQUIRE(f.claim(kTwo, keys(2, 3)) == 3);
    for (int i = 0; i < 3; ++i) f.complete();

    CHECK(f.here(keys(1, 3)) == 3);
    CHECK(f.here(keys(2, 3)) == 0);
    for (int i = 0; i < 3; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("a load waits while the blocks before its own arrive, however long its own take") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.claim(kTwo, keys(2, 4)) == 4);
    const auto waiting = f.open(kTwo, 4, milliseconds(200));

    for (int i = 0; i < 6; ++i) {
      f.clock.advance(milliseconds(15));
      f.complete();
      CHECK_FALSE(f.is_answered(waiting));
    }
    f.clock.advance(milliseconds(15));
    f.complete();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 1);
    CHECK(waiting->answer->value().late == Late::kNo);
    for (int i = 0; i < 3; ++i) f.complete();
  }

  TEST_CASE("a load is slow once its last block is predicted to arrive too late to be of use") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.claim(kTwo, keys(2, 4)) == 4);
    const auto waiting = f.open(kTwo, 4, milliseconds(105));
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(19));  // Instead of 10: 9 blocks are left, and 86 ms.
    f.complete();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.empty());
    CHECK(waiting->answer->value().late == Late::kSlow);
    for (int i = 0; i < 9; ++i) f.complete();
  }

  TEST_CASE("a load whose time is over is slow, also where no rate is known") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto waiting = f.open(kOne, 4, milliseconds(10));

    f.clock.advance(milliseconds(10));
    f.look_again();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kSlow);
  }

  TEST_CASE("a source is stuck half a batch's time and 6 ms after the next batch was due") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto waiting = f.open(kOne, 4, Fetches::Wait::kForever);
    const Duration allowed = (milliseconds(10) + SourceRate::kLatency) * 3 / 2 + milliseconds(6);

    f.clock.advance(allowed - milliseconds(1));
    f.look_again();
    CHECK_FALSE(f.is_answered(waiting));
    f.clock.advance(milliseconds(1));
    f.look_again();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kStuck);
    // Nobody else waits for it, and without a comparison it is asked all the same.
    CHECK(f.claim(kTwo, keys(2, 4), milliseconds(1000)).blocks == 0);
    CHECK(f.claim(kTwo, keys(2, 4)) == 4);
  }

  TEST_CASE(
      "of loads that wait for a stuck source one ends, and the others once that is computed") {
    Fixture f;
    f.measure();
    std::vector<std::shared_ptr<Fixture::Question>> loads;
    for (const Id128& token : {kOne, kTwo, kThree}) {
      REQUIRE(f.claim(token, keys(token.low, 1)) == 1);
      loads.push_back(f.open(token, 1, milliseconds(1000), milliseconds(40)));
    }
    const auto ended = [&]() {
      return std::count_if(loads.begin(), loads.end(),
                           [&](const auto& load) { return f.is_answered(load); });
    };

    f.clock.advance(milliseconds(30));
    f.look_again();
    CHECK(ended() == 1);
    f.clock.advance(milliseconds(39));
    f.look_again();
    CHECK(ended() == 1);
    f.clock.advance(milliseconds(1));
    f.look_again();

    CHECK(ended() == 3);
    for (const auto& load : loads) CHECK(load->answer->value().late == Late::kStuck);
  }

  TEST_CASE("a source that answers again keeps the loads that had not ended") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 1)) == 1);
    REQUIRE(f.claim(kTwo, keys(2, 1)) == 1);
    const auto one = f.open(kOne, 1, milliseconds(1000), milliseconds(40));
    const auto two = f.open(kTwo, 1, milliseconds(1000), milliseconds(40));
    f.clock.advance(milliseconds(30));
    f.look_again();
    REQUIRE(f.is_answered(one));
    CHECK_FALSE(f.is_answered(two));

    f.complete();
    f.complete();

    REQUIRE(f.is_answered(two));
    CHECK(two->answer->value().opened.slots.size() == 1);
  }

  TEST_CASE("a source that pauses again ends a load only when the former one is computed") {
    Fixture f;
    f.measure();
    std::vector<std::shared_ptr<Fixture::Question>> loads;
    for (const Id128& token : {kOne, kTwo, kThree}) {
      REQUIRE(f.claim(token, keys(token.low, 1)) == 1);
      loads.push_back(f.open(token, 1, milliseconds(1000), milliseconds(100)));
    }
    f.clock.advance(milliseconds(30));
    f.look_again();
    REQUIRE(f.is_answered(loads[0]));
    f.complete();  // Of the load that has ended.

    f.clock.advance(milliseconds(60));
    f.look_again();
    CHECK_FALSE(f.is_answered(loads[1]));
    f.clock.advance(milliseconds(40));
    f.look_again();

    CHECK(f.is_answered(loads[1]));
    CHECK_FALSE(f.is_answered(loads[2]));
  }

  TEST_CASE("a source that delivers blocks and does not confirm their lease is stuck, too") {
    Fixture f;
    f.measure();
    f.peers.lenders.front().is_confirming = false;
    REQUIRE(f.claim(kOne, keys(1, 1)) == 1);
    const auto waiting = f.open(kOne, 1, Fetches::Wait::kForever);
    f.complete();
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(9));
    f.look_again();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kStuck);
  }

  TEST_CASE("a read that was given up leaves its place at the fabric to what waits") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    REQUIRE(f.claim(kTwo, keys(2, 2)) == 2);
    const std::uint64_t first = f.fabric.batches.front().ticket;
    f.complete(Errc::kTimeout, false);
    f.complete(Errc::kTimeout, false);

    REQUIRE(f.fabric.batches.size() == 2);
    f.complete();
    f.complete();
    CHECK(f.here(keys(2, 2)) == 2);
    f.settle(first);
    f.settle(first + 1);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("a load whose blocks are asked for from another owner learns that it is stuck, too") {
    Fixture f;
    f.peers.lenders.resize(2);
    REQUIRE(f.claim(kOne, keys(1, 1)) == 1);
    const auto waiting = f.open(kOne, 1, Fetches::Wait::kForever);
    CHECK_FALSE(f.is_answered(waiting));
    f.complete(Errc::kPeerLost);
    REQUIRE(f.fabric.batches.size() == 1);
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(100));
    REQUIRE(f.is_answered_soon(waiting));
    CHECK(waiting->answer->value().late == Late::kStuck);
  }

  TEST_CASE("a load that probes a slow node is not judged by the rate that is not believed") {
    Fixture f;
    f.measure();
    f.clock.advance(SourceRate::kBelieved);
    REQUIRE(f.claim(kOne, keys(1, 6), milliseconds(5)).blocks == 1);
    const auto waiting = f.open(kOne, 1, milliseconds(6));
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(1));
    f.complete();
    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 1);
  }

  TEST_CASE("a large read is not expected sooner because a small one is behind it") {
    Fixture f(256, {.batch_bytes = 6 * kPage});
    REQUIRE(f.claim(kOne, keys(1, 13)) == 13);
    f.clock.advance(milliseconds(120));
    f.complete();
    REQUIRE(f.fabric.batches.front().chunks.size() == 6);
    REQUIRE(f.fabric.batches.back().chunks.size() == 1);
    const auto waiting = f.open_rest(kOne, 6, 7, Fetches::Wait::kForever);

    f.clock.advance(milliseconds(120));
    f.look_again(6);
    CHECK_FALSE(f.is_answered(waiting));
    f.complete();
    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kNo);
    f.complete();
    f.check_rest();
  }

  TEST_CASE("a load that is not judged waits for a source that is stuck") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto waiting = f.open(kOne, 4, std::nullopt);
    f.clock.advance(milliseconds(900));
    f.look_again();
    CHECK_FALSE(f.is_answered(waiting));
    for (int i = 0; i < 4; ++i) f.complete();
    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kNo);
  }

  TEST_CASE("a batch is what arrives in 2 ms, and 6 ms are at the fabric") {
    Fixture f(256, {.batch_bytes = 8 * kPage});
    REQUIRE(f.claim(kMeasured, keys(99, 8)) == 8);
    REQUIRE(f.fabric.batches.size() == 1);  // Nothing is known: the largest batch.
    f.clock.advance(microseconds(7900));    // A little more than a block a millisecond.
    f.complete();
    f.unclaim(kMeasured);

    REQUIRE(f.claim(kOne, keys(1, 16)) == 16);

    CHECK(f.fabric.batches.size() == 3);
    CHECK(f.fabric.batches.front().chunks.size() == 2);
    for (int i = 0; i < 8; ++i) {
      f.clock.advance(milliseconds(2));
      f.complete();
    }
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("it ends with batches that were never asked for") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    f.fetches.reset();
    CHECK(f.fabric.batches.size() == 2);
  }
}

}  // namespace
}  // namespace pegaflow
