// Blocks that are read from the disks of this node for other nodes: the disks are played.
#include "server/ssd/staging.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "engine/ssd/proof.h"
#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

namespace ssd = engine::ssd;
using server::Staging;

/// Has some blocks, and reads them when the test says so.
class PlayedDisks final : public cluster::Source {
 public:
  explicit PlayedDisks(server::CacheService& service) : service_(service) {}

  [[nodiscard]] bool is_ready() const override { return true; }
  kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> wanted) override {
    ++lookups;
    std::size_t blocks = 0;
    while (blocks < wanted.size() &&
           (has.contains(wanted[blocks]) ||
            (blocks != 0 && service_.present_each(space, wanted.subspan(blocks, 1)).front()))) {
      ++blocks;
    }
    if (blocks == 0) return Located{};
    return Located{.blocks = blocks, .rate = rate, .batch_bytes = kPage, .all = owner_};
  }
  kj::Promise<std::vector<Holding>> locate_prefixes(const Bytes32&,
                                                    std::span<const BlockKey>) override {
    return std::vector<Holding>();
  }
  kj::Promise<std::vector<Holding>> locate_each(const Bytes32&,
                                                std::span<const BlockKey> wanted) override {
    Holding holding{.rate = rate, .batch_bytes = kPage, .has = {}, .all = owner_};
    for (const BlockKey& key : wanted) holding.has.push_back(has.contains(key));
    std::vector<Holding> all;
    all.push_back(std::move(holding));
    return all;
  }
  kj::Promise<SharedLease> lease(SharedRequest, std::vector<BlockKey> keys,
                                 Located located) override {
    auto lease = std::make_shared<Lease>();
    lease->blocks = std::min(keys.size(), located.blocks);
    return SharedLease(std::move(lease));
  }
  void read(const SharedRequest& request, const SharedLease& lease,
            std::vector<Block>&& blocks) override {
    for (Block& block : blocks) reads.push_back({request, lease, std::move(block)});
  }
  void end(const SharedLease&) override {}

  struct Read {
    SharedRequest request;
    SharedLease lease;
    Block block;
  };
  /// The next block arrives with its proof.
  void arrive() {
    Read read = take();
    constexpr std::uint64_t kChecksums[] = {1};
    const ssd::Origin origin{};
    const BlockKey& key = read.request->keys[read.block.place];
    read.block.proven =
        ssd::Proven::prove(origin, key, 1, kChecksums, ssd::proof_of(origin, key, 1, kChecksums));
    std::vector<Block> one = {read.block};
    (void)sink().arrived(read.request, read.lease, std::move(one));
    sink().progressed();
  }
  void fail() {
    Read read = take();
    std::vector<Block> one = {read.block};
    sink().failed(read.request, std::move(one));
    sink().progressed();
  }
  /// The deadline of the next block is over; it is quiesced by quiesce().
  Block hang() {
    const Read read = take();
    const std::vector<Block> one = {read.block};
    sink().given_up(one);
    sink().progressed();
    return read.block;
  }
  void quiesce(const Block& block) { sink().quiesced({&block, 1}); }
  /// The number of reads that are left once those that no claim waits for are removed.
  std::size_t wanted() {
    std::vector<Block> blocks;
    for (Read& read : reads) blocks.push_back(read.block);
    sink().remove_unwanted(blocks);
    std::erase_if(reads, [&](const Read& read) {
      return std::none_of(blocks.begin(), blocks.end(),
                          [&](const Block& block) { return block.frame == read.block.frame; });
    });
    return blocks.size();
  }

  std::set<BlockKey> has;
  std::deque<Read> reads;
  std::size_t lookups = 0;
  std::shared_ptr<cluster::SourceRate> rate = std::make_shared<cluster::SourceRate>();

 private:
  struct Owner : Owners {};
  Read take() {
    REQUIRE_FALSE(reads.empty());
    Read read = std::move(reads.front());
    reads.pop_front();
    return read;
  }

  server::CacheService& service_;
  std::shared_ptr<const Owner> owner_ = std::make_shared<Owner>();
};

constexpr Id128 kPeer{7, 1};
constexpr Id128 kOther{7, 2};

struct Node {
  explicit Node(Duration idle = std::chrono::seconds(1)) {
    auto made = server::CacheService::create(
        {.store = {.pool_bytes = 64 * kPage}}, clock,
        [this](const Id128& connection) { service->disconnected(connection); });
    REQUIRE(made);
    service = std::move(*made);
    background = std::make_unique<server::Background>(*service, io.provider->getTimer(), clock);
    disks = std::make_unique<PlayedDisks>(*service);
    fetches = std::make_unique<server::Fetches>(*service, disks.get(), *background,
                                                io.provider->getTimer(), clock,
                                                server::Fetches::Options());
    staging = std::make_unique<Staging>(
        *service, *disks, *fetches, *background, io.provider->getTimer(), clock,
        Staging::Options{.most_bytes = 8 * kPage, .most = 3, .idle = idle});
    REQUIRE(service->connected(engine, {.process = engine,
                                        .previous_connection = {},
                                        .quiesced = false,
                                        .build = "test",
                                        .watch = std::make_shared<int>(0)}));
    REQUIRE(service->register_rank(
        engine, {.instance = "engine", .factors = {{"weights", "a"}}, .page_bytes = kPage}));
    space = service->wants(engine).value().space;
  }

  /// The disk has these blocks.
  std::vector<BlockKey> on_disk(std::uint64_t chain, std::size_t count) {
    std::vector<BlockKey> made = keys(chain, count);
    disks->has.insert(made.begin(), made.end());
    return made;
  }
  Staging::Pending begin(const std::vector<BlockKey>& wanted, const Id128& peer = kPeer) {
    return staging->begin(peer, space, wanted).wait(io.waitScope);
  }
  /// The blocks that are ready now.
  std::vector<BlockKey> next(std::uint64_t number, const Id128& peer = kPeer) {
    return staging->await_next(peer, number, Duration::zero()).wait(io.waitScope).keys;
  }
  /// Lends these blocks and reports them as lent; returns what is left.
  std::size_t lend(std::uint64_t number, const std::vector<BlockKey>& ready) {
    const auto lent = service->lend(space, ready, std::chrono::seconds(1));
    REQUIRE(lent);
    CHECK(lent->blocks == ready.size());
    service->end_lease(lent->lease);
    return staging->lent(kPeer, number, ready.size(), lent->blocks).blocks.blocks;
  }
  void work() {
    while (service->work()) {
    }
  }
  std::size_t wanted() {
    work();
    return disks->wanted();
  }
  void check_rest() {
    work();
    CHECK(staging->stats().stagings == 0);
    CHECK(staging->stats().bytes == 0);
    CHECK(service->store().is_idle());
    REQUIRE(service->store().check());
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  ManualClock clock;
  Id128 engine{1, 1};
  Bytes32 space{};
  std::unique_ptr<server::CacheService> service;
  std::unique_ptr<server::Background> background;
  std::unique_ptr<PlayedDisks> disks;
  std::unique_ptr<server::Fetches> fetches;
  std::unique_ptr<Staging> staging;
};

TEST_SUITE("Staging") {
  TEST_CASE("a prefix counts the blocks of the pool and of the disks, and how fast those are") {
    Node node;
    const auto wanted = node.on_disk(1, 5);
    node.disks->has.erase(wanted[4]);
    node.disks->rate->take_reported(1000 * kPage, node.clock.now());

    const auto found = node.staging->locate(node.space, wanted).wait(node.io.waitScope);
    CHECK(found.blocks == 4);
    CHECK(found.on_disks.blocks == 4);
    CHECK(found.on_disks.bytes_per_second == 1000 * kPage);

    // Two of them are brought into the pool.
    const auto pending = node.begin({wanted.begin(), wanted.begin() + 2});
    node.disks->arrive();
    node.disks->arrive();
    CHECK(node.lend(pending.number, node.next(pending.number)) == 0);
    const auto then = node.staging->locate(node.space, wanted).wait(node.io.waitScope);
    CHECK(then.blocks == 4);
    CHECK(then.on_disks.blocks == 2);
    const auto each = node.staging->locate_each(node.space, wanted).wait(node.io.waitScope);
    CHECK(each.has == std::vector<bool>{true, true, true, true, false});
    CHECK(each.on_disks.blocks == 2);
    node.check_rest();
  }

  TEST_CASE("blocks are lent in the order of the prefix as they arrive, and are replicas then") {
    Node node;
    const auto wanted = node.on_disk(1, 4);
    const auto pending = node.begin(wanted);
    CHECK(pending.blocks.blocks == 4);
    CHECK(node.next(pending.number).empty());

    node.disks->arrive();
    node.disks->arrive();
    const auto first = node.next(pending.number);
    CHECK(first == std::vector<BlockKey>(wanted.begin(), wanted.begin() + 2));
    CHECK(node.lend(pending.number, first) == 2);
    node.disks->arrive();
    node.disks->arrive();
    CHECK(node.lend(pending.number, node.next(pending.number)) == 0);

    CHECK(node.service->stats().store.replicas == 4);
    CHECK(node.fetches->stats().staged_blocks == 4);
    CHECK(node.fetches->stats().restored_blocks == 0);
    node.check_rest();
  }

  TEST_CASE("the wait for the next blocks ends when all of them have arrived") {
    Node node;
    const auto pending = node.begin(node.on_disk(1, 2));
    auto waiting = node.staging->await_next(kPeer, pending.number, std::chrono::hours(1));
    CHECK_FALSE(waiting.poll(node.io.waitScope));
    node.disks->arrive();
    CHECK_FALSE(waiting.poll(node.io.waitScope));
    node.disks->arrive();
    CHECK(waiting.wait(node.io.waitScope).keys.size() == 2);
  }

  TEST_CASE("a block that an engine of this node claims meanwhile is no replica") {
    Node node;
    const auto wanted = node.on_disk(1, 3);
    const auto pending = node.begin(wanted);
    auto extending = node.fetches->extend(node.engine, kOne, {wanted.data(), 2}, 0, {});
    KJ_IF_MAYBE (growth, extending) {
      CHECK(growth->wait(node.io.waitScope).blocks == 2);
    } else {
      FAIL("nothing is in flight");
    }
    CHECK(node.disks->reads.size() == 3);  // No block is read twice.
    for (int i = 0; i < 3; ++i) node.disks->arrive();

    CHECK(node.service->stats().store.replicas == 1);
    CHECK(node.lend(pending.number, node.next(pending.number)) == 0);
    REQUIRE(node.service->unclaim(node.engine, kOne));
    node.check_rest();
  }

  TEST_CASE("all stagings together hold a part of the pool, and beyond it nothing is staged") {
    Node node;
    const auto first = node.begin(node.on_disk(1, 6));
    CHECK(first.blocks.blocks == 6);
    CHECK(node.staging->stats().bytes == 6 * kPage);
    CHECK(node.begin(node.on_disk(2, 6)).blocks.blocks == 2);
    CHECK(node.begin(node.on_disk(3, 6)).number == 0);
    node.staging->end(kPeer, first.number);
    CHECK(node.begin(node.on_disk(3, 6)).blocks.blocks == 6);
  }

  TEST_CASE("there is a limit of stagings") {
    Node node;
    for (std::uint64_t chain = 1; chain <= 3; ++chain) {
      CHECK(node.begin(node.on_disk(chain, 1)).number != 0);
    }
    CHECK(node.begin(node.on_disk(4, 1)).number == 0);
  }

  TEST_CASE("a staging ends at a block that fails, which no other source is asked for") {
    Node node;
    const auto pending = node.begin(node.on_disk(1, 4));
    node.disks->arrive();
    node.disks->arrive();
    const std::size_t lookups = node.disks->lookups;
    node.disks->fail();
    CHECK(node.disks->lookups == lookups);

    const auto ready = node.next(pending.number);
    CHECK(ready.size() == 2);
    CHECK(node.lend(pending.number, ready) == 2);
    CHECK(node.next(pending.number).empty());
    CHECK(node.staging->stats().stagings == 0);
    CHECK(node.wanted() == 0);
    node.check_rest();
  }

  TEST_CASE(
      "a disk that hangs ends the staging, and its frame is not reused before it has quiesced") {
    Node node;
    const auto pending = node.begin(node.on_disk(1, 2));
    const auto late = node.disks->hang();
    CHECK(node.next(pending.number).empty());
    CHECK(node.staging->stats().stagings == 0);
    CHECK(node.wanted() == 0);
    CHECK(node.service->stats().store.quarantined_fetch == 1);
    node.disks->quiesce(late);
    node.work();
    CHECK(node.service->stats().store.quarantined_fetch == 0);
    node.check_rest();
  }

  TEST_CASE("a disk that does not respond offers nothing") {
    Node node;
    const auto wanted = node.on_disk(1, 2);
    node.disks->rate->read_began(1, kPage, node.clock.now());
    node.clock.advance(std::chrono::seconds(1));
    CHECK(node.staging->locate(node.space, wanted).wait(node.io.waitScope).blocks == 0);
    CHECK(node.begin(wanted).number == 0);
    node.check_rest();
  }

  TEST_CASE("after a reset nothing that was read before it is found or lent") {
    Node node;
    const auto wanted = node.on_disk(1, 3);
    const auto pending = node.begin(wanted);
    node.disks->arrive();
    REQUIRE(node.service->reset_cache(node.engine));
    node.disks->arrive();
    node.disks->arrive();

    CHECK(node.next(pending.number).empty());
    CHECK(node.service->present(node.space, wanted) == 0);
    CHECK(node.staging->lent(kPeer, pending.number, 0, 0).number == 0);
    node.check_rest();
  }

  TEST_CASE("the blocks of a staging are lent to its peer only, and it ends with the connection") {
    Node node;
    const auto pending = node.begin(node.on_disk(1, 3));
    node.disks->arrive();
    CHECK(node.next(pending.number, kOther).empty());
    node.staging->end(kOther, pending.number);
    node.staging->peer_left(kOther);
    CHECK(node.staging->stats().stagings == 1);

    node.staging->peer_left(kPeer);
    CHECK(node.wanted() == 0);
    CHECK(node.next(pending.number).empty());
    node.check_rest();
  }

  TEST_CASE("a staging ends when its peer requests nothing for a time") {
    Node node(std::chrono::milliseconds(1));
    const auto pending = node.begin(node.on_disk(1, 2));
    node.clock.advance(std::chrono::milliseconds(1));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (node.staging->stats().stagings != 0) {
      REQUIRE(std::chrono::steady_clock::now() < end);
      node.io.provider->getTimer().afterDelay(1 * kj::MILLISECONDS).wait(node.io.waitScope);
    }
    CHECK(node.wanted() == 0);
    CHECK(node.next(pending.number).empty());
    node.check_rest();
  }

  TEST_CASE("without room for a loan a staging ends") {
    Node node;
    const auto pending = node.begin(node.on_disk(1, 2));
    node.disks->arrive();
    node.disks->arrive();
    CHECK(node.next(pending.number).size() == 2);
    CHECK(node.staging->lent(kPeer, pending.number, 2, 0).number == 0);
    node.check_rest();
  }
}

}  // namespace
}  // namespace pegaflow::testing
