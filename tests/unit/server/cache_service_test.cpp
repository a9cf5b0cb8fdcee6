#include "server/cache/cache_service.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "engine/frames/block_table.h"
#include "engine/kinds/block_kinds.h"

namespace pegaflow::server {
namespace {

constexpr std::uint64_t kPage = 4096;

std::vector<BlockKey> keys(std::uint64_t chain, std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t words[2] = {(chain * 1000 + i + 1) * 0x9E3779B97F4A7C15ULL, chain};
    std::memcpy(made[i].bytes.data(), words, sizeof words);
  }
  return made;
}

/// A service of 64 slots of a page each, with connections that need no socket.
struct Fixture {
  explicit Fixture(std::size_t max_detached = 8) {
    auto made =
        CacheService::create({.store = {.pool_bytes = 64 * kPage}, .max_detached = max_detached},
                             clock, [this](const Id128& connection) {
                               ended.push_back(connection);
                               service->disconnected(connection);
                             });
    REQUIRE(made);
    service = std::move(*made);
  }

  Id128 connect(const Id128& process, const Id128& previous = {}, bool quiesced = false) {
    const Id128 connection = Id128::random();
    const auto watch = std::make_shared<int>(0);
    watches[connection] = watch;
    REQUIRE(service->connected(connection, {.process = process,
                                            .previous_connection = previous,
                                            .quiesced = quiesced,
                                            .build = "test",
                                            .watch = watch}));
    return connection;
  }
  Result<CacheService::Registered> register_rank(const Id128& connection,
                                                 const std::string& instance = "engine",
                                                 std::uint64_t page_bytes = kPage,
                                                 const std::string& weights = "a") {
    return service->register_rank(
        connection,
        {.instance = instance, .factors = {{"weights", weights}}, .page_bytes = page_bytes});
  }
  /// Rank and shard of an instance of its own.
  static Registration rank(std::uint32_t number, std::uint32_t ranks,
                           const std::string& weights = "tp") {
    return {.instance = "tp",
            .rank = number,
            .ranks = ranks,
            .shard = number,
            .shards = ranks,
            .factors = {{"weights", weights}},
            .page_bytes = kPage};
  }
  void save(const Id128& connection, std::span<const BlockKey> what) {
    const JobId job{.scheduler = Id128::random(), .number = 1};
    REQUIRE(service->reserve(connection, job, 0, what));
    REQUIRE(service->publish(connection, job) == 0);
  }
  void work() {
    while (service->work()) {
    }
    const auto checked = service->store().check();
    CHECK_MESSAGE(checked, (checked ? "" : checked.error().detail));
  }

  ManualClock clock;
  std::vector<Id128> ended;
  std::map<Id128, std::weak_ptr<int>> watches;
  std::unique_ptr<CacheService> service;
};

TEST_SUITE("CacheService") {
  TEST_CASE("a client without an incarnation is refused") {
    Fixture f;
    const auto refused = f.service->connected(Id128::random(), {});
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("every call of an unknown connection returns kGone") {
    Fixture f;
    const Id128 nobody = Id128::random();
    CHECK(f.service->goodbye(nobody).error().code == Errc::kGone);
    CHECK(f.register_rank(nobody).error().code == Errc::kGone);
    CHECK(f.service->attach(nobody, "x").error().code == Errc::kGone);
    CHECK(f.service->lookup(nobody, keys(1, 1)).error().code == Errc::kGone);
    CHECK(f.service->reset_cache(nobody).error().code == Errc::kGone);
    f.service->disconnected(nobody);
    f.service->process_gone(nobody);
  }

  TEST_CASE("a connection is detached only while its process may access a slot") {
    Fixture f;
    const Id128 process = Id128::random();
    const Id128 holds_nothing = f.connect(process);
    REQUIRE(f.register_rank(holds_nothing));
    f.service->disconnected(holds_nothing);
    CHECK(f.service->stats().detached == 0);
    CHECK(f.watches[holds_nothing].expired());

    const Id128 writes = f.connect(process);
    REQUIRE(f.register_rank(writes));
    REQUIRE(f.service->reserve(writes, {.scheduler = process, .number = 1}, 0, keys(1, 3)));
    f.service->disconnected(writes);
    CHECK(f.service->stats().detached == 1);
    CHECK_FALSE(f.watches[writes].expired());
    CHECK(f.service->stats().store.quarantined_writer_lost == 3);

    f.service->process_gone(writes);
    f.work();
    CHECK(f.service->stats().detached == 0);
    CHECK(f.watches[writes].expired());
    CHECK(f.service->stats().store.used_bytes == 0);
    CHECK(f.service->stats().instances == 0);
  }

  TEST_CASE("a process whose end is detected before that of its connection frees everything") {
    Fixture f;
    const Id128 connection = f.connect(Id128::random());
    REQUIRE(f.register_rank(connection));
    REQUIRE(f.service->reserve(connection, {.scheduler = connection, .number = 1}, 0, keys(1, 3)));

    f.service->process_gone(connection);

    f.work();
    CHECK(f.ended == std::vector<Id128>{connection});
    CHECK(f.service->stats().store.used_bytes == 0);
    CHECK(f.service->stats().clients == 0);
  }

  TEST_CASE("with too many detached connections no worker may register") {
    Fixture f(2);
    for (int i = 0; i < 2; ++i) {
      const Id128 connection = f.connect(Id128::random());
      REQUIRE(f.register_rank(connection));
      REQUIRE(
          f.service->reserve(connection, {.scheduler = connection, .number = 1}, 0, keys(i, 1)));
      f.service->disconnected(connection);
    }
    const Id128 third = f.connect(Id128::random());

    const auto refused = f.register_rank(third);

    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kBusy);
    CHECK(f.service->attach(third, "engine"));  // It may look up.
  }

  TEST_CASE("a scheduler's claims end with its connection") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    f.save(worker, keys(1, 5));
    const Id128 scheduler = f.connect(Id128::random());
    REQUIRE(f.service->attach(scheduler, "engine"));
    REQUIRE(f.service->claim(scheduler, Id128::random(), keys(1, 5))->blocks == 5);

    f.service->disconnected(scheduler);

    f.work();
    CHECK(f.service->stats().store.claims == 0);
    CHECK(f.service->stats().detached == 0);
  }

  TEST_CASE("a reconnected rank ends its old connection") {
    Fixture f;
    const Id128 process = Id128::random();
    const Id128 old_one = f.connect(process);
    REQUIRE(f.register_rank(old_one));
    const Id128 new_one = f.connect(process);

    REQUIRE(f.register_rank(new_one));

    CHECK(f.ended == std::vector<Id128>{old_one});
    CHECK(f.service->instances().size() == 1);
    CHECK(f.service->instances().front().state == "connected");
  }

  TEST_CASE("an instance is served while all its ranks are connected") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.service->register_rank(worker, f.rank(0, 2)));
    REQUIRE(f.service->attach(worker, "tp"));
    CHECK_FALSE(f.service->lookup(worker, keys(1, 1))->complete);
    CHECK(f.service->stats().instances_waiting == 1);
    CHECK(f.service->instances().front().state == "waiting for ranks");
    const Id128 other = f.connect(Id128::random());
    REQUIRE(f.service->register_rank(other, f.rank(1, 2)));

    CHECK(f.service->lookup(worker, keys(1, 1))->complete);
    const JobId job{.scheduler = worker, .number = 1};
    REQUIRE(f.service->reserve(worker, job, 0, keys(1, 3)));
    REQUIRE(f.service->reserve(other, job, 0, keys(1, 3)));
    CHECK(f.service->publish(worker, job) == 0);
    CHECK(f.service->publish(other, job) == 0);
    CHECK(f.service->lookup(worker, keys(1, 3))->blocks == 3);
    CHECK(f.service->stats().save_bytes == 3 * 2 * kPage);

    f.service->disconnected(other);
    CHECK_FALSE(f.service->lookup(worker, keys(1, 3))->complete);
    const JobId next{.scheduler = worker, .number = 2};
    CHECK(f.service->reserve(worker, next, 0, keys(9, 2)).value() ==
          std::vector<std::uint32_t>(2, CacheService::kNoPage));
    const Id128 again = f.connect(Id128::random());
    REQUIRE(f.service->register_rank(again, f.rank(1, 2)));
    CHECK(f.service->lookup(worker, keys(1, 3))->blocks == 3);
    f.work();
  }

  TEST_CASE("of ranks with the same bytes the lowest saves, and all load") {
    Fixture f;
    const Id128 saves = f.connect(Id128::random());
    const Id128 loads = f.connect(Id128::random());
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      Registration replica = f.rank(rank, 2);
      replica.shard = 0;
      replica.shards = 1;
      REQUIRE(f.service->register_rank(rank == 0 ? saves : loads, replica));
    }
    f.save(saves, keys(1, 3));

    CHECK(
        f.service->reserve(loads, {.scheduler = loads, .number = 1}, 0, keys(7, 1)).error().code ==
        Errc::kInvalidArgument);
    const Id128 token = Id128::random();
    REQUIRE(f.service->claim(saves, token, keys(1, 3))->blocks == 3);
    CHECK(f.service->open(saves, token, 0, 3, engine::PinId{1})->slots ==
          f.service->open(loads, token, 0, 3, engine::PinId{1})->slots);
  }

  TEST_CASE("a rank's pages lie in the part of the pool near its NUMA node") {
    SteadyClock clock;
    auto made = CacheService::create({.store = {.pool_bytes = 64 * kPage, .numa_nodes = 2},
                                      .part_of_numa_node = {{0, 0}, {3, 0}, {8, 1}}},
                                     clock, [](const Id128&) {});
    REQUIRE(made);
    CacheService& service = **made;
    const auto part_of = [&](std::int32_t node, const std::string& name) {
      const Id128 connection = Id128::random();
      REQUIRE(service.connected(connection, {.process = Id128::random(),
                                             .previous_connection = {},
                                             .build = "test",
                                             .watch = std::make_shared<int>(0)}));
      REQUIRE(service.register_rank(
          connection,
          {.instance = name, .node = node, .factors = {{"model", name}}, .page_bytes = kPage}));
      const auto pages = service.reserve(connection, {Id128::random(), 1}, 0, keys(1, 1));
      REQUIRE(pages);
      REQUIRE(pages->front() != CacheService::kNoPage);
      return pages->front() / 32;
    };
    CHECK(part_of(0, "a") == 0);
    CHECK(part_of(8, "b") == 1);
    CHECK(part_of(3, "c") == 0);
    // Engines without a NUMA node, or with an unknown one, take turns.
    CHECK(part_of(-1, "d") != part_of(99, "e"));
  }

  TEST_CASE("a rank that contradicts the others is refused") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.service->register_rank(worker, f.rank(0, 2)));
    const Id128 other = f.connect(Id128::random());
    const auto code = [&](const Registration& registration) {
      return f.service->register_rank(other, registration).error().code;
    };

    CHECK(code(f.rank(2, 3)) == Errc::kInvalidArgument);
    CHECK(code(f.rank(0, 2)) == Errc::kRefused);  // It is served by another process.
    Registration elsewhere = f.rank(1, 2);
    elsewhere.factors = {{"weights", "b"}};
    CHECK(code(elsewhere) == Errc::kInvalidArgument);
    Registration many = f.rank(5000, 9000);
    many.instance = "many";
    CHECK(code(many) == Errc::kRefused);
    CHECK(f.service->register_rank(other, f.rank(1, 2)));
    CHECK(f.service->instances().front().state == "connected");
  }

  TEST_CASE("ranks whose pages do not fit the namespace or the pool are refused") {
    Fixture f;
    const Id128 fixes = f.connect(Id128::random());
    REQUIRE(f.register_rank(fixes));
    // Two shards where blocks have one: known at once.
    const Id128 worker = f.connect(Id128::random());
    CHECK(f.service->register_rank(worker, f.rank(0, 2, "a")).error().code == Errc::kRefused);
    // Each page fits the pool, both together do not: known once all are there.
    const Id128 large[2] = {f.connect(Id128::random()), f.connect(Id128::random())};
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      Registration half = f.rank(rank, 2, "large");
      half.page_bytes = 40 * kPage;
      REQUIRE(f.service->register_rank(large[rank], half));
    }
    CHECK_FALSE(f.service->lookup(large[0], keys(1, 1))->complete);
    CHECK(f.service->stats().refused_page_size == 2);
    bool told = false;
    for (const auto& info : f.service->instances()) {
      told = told || info.state.starts_with("refused: ");
    }
    CHECK(told);
  }

  TEST_CASE("a rank whose page size has no room now may register again") {
    Fixture f;
    std::vector<Id128> engines;
    for (std::size_t sizes = 0; sizes < engine::BlockTable::kMaxShapes;) {
      Registration many{.instance = std::to_string(sizes),
                        .factors = {{"weights", std::to_string(sizes)}},
                        .unit_tokens = 16,
                        .alignment_tokens = 16};
      while (many.kinds.size() < engine::BlockKinds::kMost) {
        many.kinds.push_back(
            {.rule = wire::Kind::Rule::PREFIX, .block_tokens = 16, .page_bytes = 16 * ++sizes});
      }
      engines.push_back(f.connect(Id128::random()));
      REQUIRE(f.service->register_rank(engines.back(), many));
    }
    const Id128 single = f.connect(Id128::random());
    const auto again = [&] { return f.register_rank(single, "single", 2 * kPage, "single"); };
    CHECK(again().error().code == Errc::kBusy);
    const Id128 ranks[2] = {f.connect(Id128::random()), f.connect(Id128::random())};
    Registration registration = f.rank(0, 2);
    REQUIRE(f.service->register_rank(ranks[0], registration));
    registration = f.rank(1, 2);
    CHECK(f.service->register_rank(ranks[1], registration).error().code == Errc::kBusy);
    CHECK(f.service->stats().refused_page_size == 0);
    for (const auto& info : f.service->instances()) CHECK_FALSE(info.state.starts_with("refused"));

    REQUIRE(f.service->goodbye(engines[0]));
    f.work();
    CHECK(again());
    CHECK(f.service->register_rank(ranks[1], registration));
    CHECK(f.service->lookup(ranks[0], keys(1, 1))->complete);
  }

  TEST_CASE("a namespace has one name among nodes, that of its present page sizes") {
    Fixture f;
    std::vector<Bytes32> names;
    for (std::uint64_t pages = 1; pages <= 16; ++pages) {
      const Id128 connection = f.connect(Id128::random());
      REQUIRE(f.register_rank(connection, "engine", pages * kPage));
      names.push_back(f.service->wants(connection).value().space);
      CHECK(f.service->stats().space_names == 1);
      CHECK(f.service->stats().namespaces == 1);
      f.save(connection, keys(pages, 2));
      CHECK(f.service->present(names.back(), keys(pages, 2)) == 2);
      for (std::size_t former = 0; former + 1 < names.size(); ++former) {
        CHECK(names[former] != names.back());
        CHECK(f.service->present(names[former], keys(pages, 2)) == 0);
        CHECK(
            f.service->lend(names[former], keys(pages, 2), std::chrono::seconds(1))->pages.empty());
      }
      // Its blocks go before its engine does: nothing keeps the namespace to its page size.
      f.service->store().start_cleanup();
      f.work();
      f.service->disconnected(connection);
      f.work();
    }
  }

  TEST_CASE("the tables of disconnected engines are freed with their last blocks") {
    Fixture f;
    constexpr std::uint64_t kEngines = 8;
    for (std::uint64_t pages = 1; pages <= kEngines; ++pages) {
      const Id128 connection = f.connect(Id128::random());
      REQUIRE(f.register_rank(connection, "engine", pages * kPage, std::to_string(pages)));
      f.save(connection, keys(pages, 1));
      f.service->disconnected(connection);
      f.work();
    }
    CHECK(f.service->stats().shapes.size() == kEngines);

    f.service->store().start_cleanup();  // So few blocks go in this call.
    REQUIRE(f.service->store().cleanup().done);
    REQUIRE(f.service->has_work());  // Otherwise work() would not be called.
    f.work();

    CHECK_FALSE(f.service->has_work());
    CHECK(f.service->stats().shapes.empty());
    CHECK(f.service->stats().namespaces == kEngines);
  }

  TEST_CASE("a refused registration leaves no trace") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    const Id128 other = f.connect(Id128::random());

    CHECK(f.register_rank(other, "other", 2 * kPage).error().code == Errc::kRefused);
    CHECK(f.register_rank(other, "other", 65 * kPage, "b").error().code == Errc::kRefused);

    CHECK(f.service->stats().instances == 1);
    CHECK(f.service->stats().namespaces == 1);
    CHECK(f.register_rank(other, "other", kPage, "b"));
  }

  TEST_CASE("a reservation's deadline is the service's") {
    Fixture f;
    CHECK_FALSE(f.service->next_deadline());
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    REQUIRE(f.service->reserve(worker, {.scheduler = worker, .number = 1}, 0, keys(1, 2)));
    CHECK(f.service->next_deadline() == f.clock.now() + std::chrono::seconds(30));

    f.clock.advance(std::chrono::seconds(31));
    f.service->expire();
    f.work();

    CHECK_FALSE(f.service->next_deadline());
    CHECK(f.service->stats().store.reservations_timed_out == 1);
  }

  TEST_CASE("only sealed blocks count as saved bytes") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker, "engine", 3000));
    f.save(worker, keys(1, 4));
    const JobId job{.scheduler = worker, .number = 2};
    REQUIRE(f.service->reserve(worker, job, 0, keys(2, 4)));
    REQUIRE(f.service->abandon(worker, job));

    CHECK(f.service->stats().save_bytes == 4 * 3000);
  }

  TEST_CASE("checksums come with a publish, are cleared with the slot, and returned by open") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    const JobId job{.scheduler = Id128::random(), .number = 1};
    REQUIRE(f.service->reserve(worker, job, 0, keys(1, 3)));
    const std::vector<std::uint64_t> sums = {11, 0, 33};
    REQUIRE(f.service->publish(worker, job, sums) == 0);
    REQUIRE(f.service->claim(worker, {1, 1}, keys(1, 3)));

    const auto opened = f.service->open(worker, {1, 1}, 0, 3, engine::PinId{1});

    REQUIRE(opened);
    CHECK(opened->checksums == sums);
    CHECK(f.service->open(worker, {1, 1}, 1, 1, engine::PinId{2})->checksums.empty());
    REQUIRE(f.service->release(worker, engine::PinId{1}));
    REQUIRE(f.service->release(worker, engine::PinId{2}));
    REQUIRE(f.service->unclaim(worker, {1, 1}));
    // All 64 slots get new blocks, whose writer took none.
    f.save(worker, keys(2, 64));
    REQUIRE(f.service->claim(worker, {1, 2}, keys(2, 32)));
    CHECK(f.service->open(worker, {1, 2}, 0, 32, engine::PinId{3})->checksums.empty());
  }

  TEST_CASE("a wrong number of checksums is refused, and nothing is found") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    const JobId job{.scheduler = Id128::random(), .number = 1};
    REQUIRE(f.service->reserve(worker, job, 0, keys(1, 3)));
    const std::vector<std::uint64_t> sums = {11, 22};
    CHECK(f.service->publish(worker, job, sums).error().code == Errc::kInvalidArgument);
    CHECK(f.service->lookup(worker, keys(1, 3))->blocks == 0);
    REQUIRE(f.service->abandon(worker, job));
    CHECK(f.service->publish(worker, job, sums).error().code == Errc::kGone);
  }

  TEST_CASE("the journal of a namespace: from now on, in order, and lost with its generation") {
    Fixture f;
    constexpr std::uint64_t kEnd = engine::BlockStore::kJournalEnd;
    const Id128 scheduler = f.connect(Id128::random());
    CHECK(f.service->journal(scheduler, 0, kEnd).error().code == Errc::kInvalidArgument);
    CHECK(f.service->journal(Id128::random(), 0, kEnd).error().code == Errc::kGone);
    REQUIRE(f.service->attach(scheduler, "engine"));
    // Before any rank is there: nothing of it can be lost.
    const auto early = f.service->journal(scheduler, 0, kEnd).value();
    CHECK(early.space == 0);
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    const Id128 stranger = f.connect(Id128::random());
    REQUIRE(f.register_rank(stranger, "stranger", kPage, "b"));
    f.save(worker, keys(1, 3));
    f.save(stranger, keys(2, 1));

    const auto first = f.service->journal(scheduler, early.space, early.part.next).value();
    CHECK(first.space != 0);
    CHECK_FALSE(first.part.has_lost);
    REQUIRE(first.part.entries.size() == 3);
    CHECK(first.part.entries[0].key == keys(1, 3)[2]);  // The last one is sealed first.
    CHECK(first.part.entries[0].is_present);
    const auto none = f.service->journal(scheduler, first.space, first.part.next).value();
    CHECK(none.part.entries.empty());
    CHECK_FALSE(none.part.has_lost);

    REQUIRE(f.service->reset_cache(scheduler));
    f.save(worker, keys(1, 1));
    const auto reset = f.service->journal(scheduler, first.space, first.part.next).value();
    CHECK(reset.part.has_lost);
    CHECK(reset.space != first.space);
    REQUIRE(reset.part.entries.size() == 1);
    CHECK(reset.part.entries[0].key == keys(1, 1)[0]);
    // A position of another life of the server.
    CHECK(f.service->journal(scheduler, reset.space, 12345678).value().part.has_lost);
    CHECK_FALSE(f.service->journal(scheduler, reset.space, kEnd).value().part.has_lost);
  }

  TEST_CASE("a wait for a job ends with it, with its engine, and with the connection that waits") {
    Fixture f;
    const Id128 scheduler{3, 3};
    const Id128 prefill = f.connect(Id128::random());
    const Id128 worker = f.connect(Id128::random());
    const Id128 decode = f.connect(Id128::random());
    REQUIRE(f.service->attach(decode, "decode", Id128{5, 5}));
    std::vector<Result<void>> answers;
    const auto wait = [&](std::uint64_t number) {
      f.service->await_job(decode, {scheduler, number}, std::chrono::seconds(2),
                           [&](Result<void> answer) { answers.push_back(std::move(answer)); });
    };
    const auto last = [&] { return answers.back() ? Errc{} : answers.back().error().code; };

    wait(1);
    REQUIRE(answers.size() == 1);
    CHECK(last() == Errc::kGone);  // That scheduler is not attached.
    REQUIRE(f.service->attach(prefill, "engine", scheduler));
    REQUIRE(f.service->attach(prefill, "engine", scheduler));
    wait(1);
    REQUIRE(answers.size() == 2);
    CHECK(last() == Errc::kGone);  // It has no rank yet.
    REQUIRE(f.register_rank(worker));
    wait(1);
    CHECK(answers.size() == 2);
    CHECK(f.service->stats().waits.waiting == 1);
    CHECK(f.service->next_deadline() == f.clock.now() + std::chrono::seconds(2));
    REQUIRE(f.service->reserve(worker, {scheduler, 1}, 0, keys(1, 2)));
    CHECK(answers.size() == 2);
    REQUIRE(f.service->publish(worker, {scheduler, 1}) == 0);
    REQUIRE(answers.size() == 3);
    CHECK(answers.back());

    wait(2);
    REQUIRE(f.service->reserve(worker, {scheduler, 2}, 0, keys(2, 2)));
    f.service->disconnected(worker);  // Killed between reserve and publish.
    REQUIRE(answers.size() == 4);
    CHECK(last() == Errc::kGone);
    const Id128 heir = f.connect(Id128::random());
    REQUIRE(f.register_rank(heir));
    wait(3);
    f.clock.advance(std::chrono::seconds(2));
    f.service->expire();
    REQUIRE(answers.size() == 5);
    CHECK(last() == Errc::kTimeout);
    wait(3);
    f.service->disconnected(prefill);
    REQUIRE(answers.size() == 6);
    CHECK(last() == Errc::kGone);
    REQUIRE(f.service->attach(f.connect(Id128::random()), "engine", scheduler));
    wait(3);
    REQUIRE(f.service->goodbye(decode));
    REQUIRE(answers.size() == 7);
    CHECK(last() == Errc::kCancelled);
    wait(3);
    REQUIRE(answers.size() == 8);
    CHECK(last() == Errc::kGone);  // After goodbye every call says so.
  }

  TEST_CASE("a long job is not over while slices of it follow, though those before are all there") {
    Fixture f;
    const Id128 scheduler{3, 3};
    const Id128 worker = f.connect(Id128::random());
    const Id128 engine = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    REQUIRE(f.service->attach(engine, "engine", scheduler));
    f.save(worker, keys(1, 2));
    std::vector<Result<void>> answers;
    f.service->await_job(engine, {scheduler, 1}, std::chrono::seconds(2),
                         [&](Result<void> answer) { answers.push_back(std::move(answer)); });

    REQUIRE(f.service->reserve(worker, {scheduler, 1}, 0, keys(1, 2), true));
    CHECK(answers.empty());
    REQUIRE(f.service->reserve(worker, {scheduler, 1}, 2, keys(5, 2)));
    CHECK(answers.empty());
    REQUIRE(f.service->publish(worker, {scheduler, 1}) == 0);

    REQUIRE(answers.size() == 1);
    CHECK(answers.back());
  }

  TEST_CASE("a scheduler's name belongs to one instance") {
    Fixture f;
    const Id128 scheduler{3, 3};
    REQUIRE(f.service->attach(f.connect(Id128::random()), "engine", scheduler));

    const auto refused = f.service->attach(f.connect(Id128::random()), "another", scheduler);

    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a wrong page is counted, and its block is a miss for all engines") {
    Fixture f;
    const Id128 worker = f.connect(Id128::random());
    REQUIRE(f.register_rank(worker));
    f.save(worker, keys(1, 3));
    REQUIRE(f.service->claim(worker, {1, 1}, keys(1, 3)));
    REQUIRE(f.service->open(worker, {1, 1}, 0, 3, engine::PinId{1}));

    const std::vector<std::uint32_t> places = {1, 2};
    REQUIRE(f.service->corrupt(worker, engine::PinId{1}, places));

    CHECK(f.service->stats().corrupt_pages == 2);
    CHECK(f.service->stats().store.invalidated == 2);
    CHECK(f.service->lookup(worker, keys(1, 3))->blocks == 1);
    const std::vector<std::uint32_t> beyond = {3};
    CHECK(f.service->corrupt(worker, engine::PinId{1}, beyond).error().code ==
          Errc::kInvalidArgument);
    CHECK(f.service->corrupt(worker, engine::PinId{9}, places).error().code == Errc::kGone);
    const Id128 scheduler = f.connect(Id128::random());
    REQUIRE(f.service->attach(scheduler, "engine"));
    CHECK(f.service->corrupt(scheduler, engine::PinId{1}, places).error().code ==
          Errc::kInvalidArgument);
    CHECK(f.service->stats().corrupt_pages == 2);
    f.service->disconnected(worker);
    f.work();
  }
}

}  // namespace
}  // namespace pegaflow::server
