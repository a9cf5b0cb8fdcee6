// Registrations of engines with several kinds of blocks, their shards, and resets of all kinds.
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/server/kinds_fixture.h"

namespace pegaflow::server {
namespace {

using testing::full_window_state;
using testing::kFull;
using testing::KindsFixture;
using testing::kPage;
using testing::kState;
using testing::kWindow;
using testing::prompt;

/// The error's detail must have these words.
void check_refused(const auto& result, Errc code, const std::string& words) {
  REQUIRE_FALSE(result.has_value());
  CHECK(result.error().code == code);
  CAPTURE(result.error().detail);
  CHECK(result.error().detail.find(words) != std::string::npos);
}

TEST_SUITE("CacheService, registration of kinds") {
  TEST_CASE("impossible kinds are refused by name, and leave no trace") {
    KindsFixture f;
    const Id128 worker = f.connect();
    const auto refused = [&](auto&& change, Errc code, const std::string& words) {
      Registration wrong = full_window_state("other");
      wrong.factors = {{"weights", "other"}};
      change(wrong);
      check_refused(f.service->register_rank(worker, wrong), code, words);
    };
    refused([](Registration& wrong) { wrong.page_bytes = kPage; }, Errc::kInvalidArgument,
            "pageBytes 4096 beside 3 kinds of blocks");
    refused(
        [](Registration& wrong) {
          for (RegisteredKind& kind : wrong.kinds) kind.page_bytes = 0;
        },
        Errc::kInvalidArgument, "0 bytes");
    refused([](Registration& wrong) { wrong.kinds[1].page_bytes = 300 * kPage; }, Errc::kRefused,
            "does not fit");
    refused([](Registration& wrong) { wrong.unit_tokens = 0; }, Errc::kInvalidArgument,
            "a hash unit of 0 tokens");
    refused([](Registration& wrong) { wrong.kinds[2].block_tokens = 24; }, Errc::kInvalidArgument,
            "kind 2: a block of 24 tokens is not a multiple of the hash unit of 16");
    refused([](Registration& wrong) { wrong.alignment_tokens = 16; }, Errc::kInvalidArgument,
            "kind 2: the alignment of 16 tokens is not a multiple of its block of 32");
    refused([](Registration& wrong) { wrong.kinds[1].tokens = 0; }, Errc::kInvalidArgument,
            "kind 1: a window or chunk of 0 tokens");
    refused([](Registration& wrong) { wrong.kinds.resize(17, wrong.kinds[0]); },
            Errc::kInvalidArgument, "17 kinds of blocks, 1 to 16");
    CHECK(f.service->stats().instances == 1);
    CHECK(f.service->stats().namespaces == 1);
    Registration right = full_window_state("other");
    right.factors = {{"weights", "other"}};
    CHECK(f.service->register_rank(worker, right));
  }

  TEST_CASE("an engine with other kinds does not fit the namespace") {
    KindsFixture f;
    const Id128 worker = f.connect();
    Registration other = full_window_state("other");
    other.kinds[1].tokens = 64;
    check_refused(f.service->register_rank(worker, other), Errc::kRefused,
                  "window 64 of 16 tokens");
    other = full_window_state("other");
    other.kinds.pop_back();
    check_refused(f.service->register_rank(worker, other), Errc::kRefused, "state of 32 tokens");
    other = full_window_state("other");
    other.kinds[2].page_bytes = kPage;
    check_refused(f.service->register_rank(worker, other), Errc::kRefused, "8192");
    other.kinds.clear();
    other.page_bytes = kPage;
    check_refused(f.service->register_rank(worker, other), Errc::kRefused, "one kind");
  }

  TEST_CASE("the ranks of an engine have equal kinds") {
    Registration first = full_window_state();
    first.ranks = first.shards = 2;
    KindsFixture f(first);
    Registration second = first;
    second.rank = second.shard = 1;
    second.kinds[2].block_tokens = 16;
    const Id128 worker = f.connect();
    check_refused(f.service->register_rank(worker, second), Errc::kInvalidArgument,
                  "rank 1 has kinds of blocks (full of 16 tokens, window 48 of 16 tokens, state of "
                  "16 tokens; unit 16, alignment 32), others of instance engine have (full of 16");
    second.kinds.clear();
    second.page_bytes = kPage;
    check_refused(f.service->register_rank(worker, second), Errc::kInvalidArgument, "(one kind)");
    CHECK_FALSE(f.service->restorable(f.scheduler, prompt(1, 8), 0)->complete);
  }

  TEST_CASE("a repeated registration names the same kinds") {
    KindsFixture f;
    CHECK(f.service->register_rank(f.worker, full_window_state()));
    Registration other = full_window_state();
    other.kinds[1].tokens = 64;
    CHECK_FALSE(f.service->register_rank(f.worker, other));
  }

  TEST_CASE("a claim ends although the engine has fewer kinds by now") {
    Registration chunked = full_window_state();
    chunked.kinds = {
        {.rule = wire::Kind::Rule::CHUNK, .tokens = 64, .block_tokens = 16, .page_bytes = kPage},
        {.rule = wire::Kind::Rule::PREFIX, .block_tokens = 16, .page_bytes = kPage}};
    KindsFixture f(chunked);
    f.save(1, 1, {0, 1, 2, 3});
    // At the end of a chunk only kind 1 has blocks.
    REQUIRE(testing::text(f.claim({1, 1}, 1, 4).value()) == "1:0+4");

    f.service->disconnected(f.worker);
    f.worker = f.connect();
    REQUIRE(f.service->register_rank(
        f.worker, {.instance = "engine", .factors = {{"weights", "dense"}}, .page_bytes = kPage}));
    REQUIRE(f.service->stats().store.claims == 1);
    REQUIRE(f.service->unclaim(f.scheduler, {1, 1}));

    CHECK(f.service->stats().store.claims == 0);
    f.work();
    CHECK(f.service->stats().store.held == 0);
  }

  TEST_CASE("the report of an instance has its kinds, and the pages of each") {
    KindsFixture f;
    const InstanceInfo info = f.service->instances().front();
    REQUIRE(info.kinds.kinds.size() == 3);
    CHECK(info.kinds.kinds[1].rule == engine::KindRule::kTrailing);
    CHECK(info.kinds.unit_tokens == 16);
    CHECK(info.ranks.front().page_bytes == std::vector<std::uint64_t>{kPage, kPage, 2 * kPage});
  }
}

/// Two pipeline stages: the first has no state, the second no window.
struct Stages {
  static Registration stage(std::uint32_t rank) {
    Registration one = full_window_state();
    one.rank = one.shard = rank;
    one.ranks = one.shards = 2;
    one.kinds[rank == 0 ? kState : kWindow].page_bytes = 0;
    return one;
  }
  Stages() : f(stage(0)), second(f.connect()) {
    REQUIRE(f.service->register_rank(second, stage(1)));
  }

  void reserve(const Id128& worker, std::uint64_t job, std::size_t kind,
               std::span<const BlockKey> keys) {
    REQUIRE(f.service->reserve(worker, {kScheduler, job}, 0, keys, false,
                               engine::BlockStore::NoRoom::kSkip, kind));
  }
  void publish(const Id128& worker, std::uint64_t job) {
    REQUIRE(f.service->publish(worker, {kScheduler, job}) == 0);
  }
  static constexpr Id128 kScheduler{4, 4};
  KindsFixture f;
  Id128 second;
};

TEST_SUITE("CacheService, ranks without a kind") {
  TEST_CASE("a block is there when the ranks that have a page of it have saved it") {
    Stages stages;
    KindsFixture& f = stages.f;
    const std::vector<BlockKey> units = prompt(1, 2);
    stages.reserve(f.worker, 1, kFull, units);
    stages.reserve(stages.second, 1, kFull, units);
    stages.publish(f.worker, 1);
    stages.publish(stages.second, 1);
    stages.reserve(f.worker, 2, kWindow, units);
    stages.publish(f.worker, 2);
    CHECK(f.restorable(1, 2) == 0);
    stages.reserve(stages.second, 3, kState, std::span(units).last(1));
    stages.publish(stages.second, 3);
    CHECK(f.restorable(1, 2) == 2);
    CHECK(f.service->stats().save_bytes == (2 * 2 + 2 + 2) * kPage);

    REQUIRE(f.claim({1, 1}, 1, 2));
    CHECK(f.open({1, 1}, kWindow, 0, 2, 1));
    check_refused(f.open({1, 1}, kState, 0, 1, 2), Errc::kInvalidArgument,
                  "rank 0 has no page of kind 2");
    const auto refused = f.service->reserve(stages.second, {stages.kScheduler, 4}, 0, units, false,
                                            engine::BlockStore::NoRoom::kSkip, kWindow);
    check_refused(refused, Errc::kInvalidArgument, "rank 1 has no page of kind 1");
    const auto state = f.service->claim_of_kind(stages.second, {1, 1}, kState);
    CHECK(f.service->open(stages.second, *state, 0, 1, engine::PinId{1}));
  }

  TEST_CASE("a job is over without the ranks that have no page of its kind") {
    Stages stages;
    KindsFixture& f = stages.f;
    REQUIRE(f.service->attach(f.connect(), "engine", Stages::kScheduler));
    std::vector<Result<void>> answers;
    f.service->await_job(f.scheduler, {Stages::kScheduler, 2}, std::chrono::seconds(2),
                         [&](Result<void> answer) { answers.push_back(std::move(answer)); });
    const std::vector<BlockKey> units = prompt(1, 2);
    stages.reserve(f.worker, 1, kWindow, units);
    stages.reserve(stages.second, 2, kState, std::span(units).last(1));
    stages.publish(stages.second, 2);
    CHECK(answers.empty());
    stages.publish(f.worker, 1);
    REQUIRE(answers.size() == 1);
    CHECK(answers.front());
  }

  TEST_CASE("a job is not over before an earlier one of another rank has begun") {
    Stages stages;
    KindsFixture& f = stages.f;
    REQUIRE(f.service->attach(f.connect(), "engine", Stages::kScheduler));
    std::map<std::uint64_t, Result<void>> answers;
    for (const std::uint64_t job : {1, 2}) {
      f.service->await_job(f.scheduler, {Stages::kScheduler, job}, std::chrono::seconds(2),
                           [&answers, job](Result<void> answer) { answers.emplace(job, answer); });
    }
    const std::vector<BlockKey> units = prompt(1, 2);
    // The second rank is ahead: it has no page of the first job's kind.
    stages.reserve(stages.second, 2, kState, std::span(units).last(1));
    stages.publish(stages.second, 2);
    CHECK(answers.empty());

    stages.reserve(f.worker, 1, kWindow, units);
    CHECK(answers.empty());
    stages.publish(f.worker, 1);
    REQUIRE(answers.size() == 2);
    CHECK(answers.at(1));
    CHECK(answers.at(2));
  }

  TEST_CASE("a kind of which no rank has a page is refused once all ranks are connected") {
    Registration empty = full_window_state("other");
    empty.factors = {{"weights", "other"}};
    empty.kinds[kState].page_bytes = 0;
    KindsFixture f;
    check_refused(f.service->register_rank(f.connect(), empty), Errc::kRefused,
                  "pages of 0 bytes for kind 2 on all ranks of instance other: a kind without a "
                  "page is not registered");
  }
}

TEST_SUITE("CacheService, ranks of several kinds") {
  TEST_CASE("a block that several ranks save is demanded once, with the bytes of all its pages") {
    Stages stages;
    KindsFixture& f = stages.f;
    const std::vector<BlockKey> units = prompt(1, 6);
    stages.reserve(f.worker, 1, kFull, units);  // 6 blocks, a page at each rank.
    stages.reserve(stages.second, 1, kFull, units);
    const double both = f.service->stats().demand.front().bytes;
    CHECK(both / f.service->stats().demand.front().distinct == doctest::Approx(2 * kPage));

    stages.reserve(f.worker, 2, kWindow, units);  // 6 of a page, at the first rank alone.
    const auto demand = f.service->stats().demand.front();
    CHECK(demand.bytes / demand.distinct == doctest::Approx(1.5 * kPage));
  }

  TEST_CASE("a block that only a later rank saves is demanded, too") {
    Stages stages;
    stages.reserve(stages.second, 1, kState, prompt(1, 1));
    const auto demand = stages.f.service->stats().demand.front();
    CHECK(demand.distinct > 0);
    CHECK(demand.bytes / demand.distinct == doctest::Approx(2 * kPage));
  }

  TEST_CASE("a rank whose pages do not fit the namespace opens no claim on its blocks") {
    Registration first = full_window_state();
    first.ranks = first.shards = 2;
    KindsFixture f(first);
    // It comes before the namespace has shapes, so it is not refused yet.
    Registration early = first;
    early.instance = "early";
    early.kinds[kWindow].page_bytes = 2 * kPage;
    const Id128 other = f.connect();
    REQUIRE(f.service->register_rank(other, early));
    Registration second = first;
    second.rank = second.shard = 1;
    const Id128 worker = f.connect();
    REQUIRE(f.service->register_rank(worker, second));
    const std::vector<BlockKey> units = prompt(1, 2);
    const auto save = [&](std::uint64_t number, std::size_t kind, std::span<const BlockKey> keys) {
      const JobId job{Stages::kScheduler, number};
      for (const Id128& rank : {f.worker, worker}) {
        REQUIRE(
            f.service->reserve(rank, job, 0, keys, false, engine::BlockStore::NoRoom::kSkip, kind));
        REQUIRE(f.service->publish(rank, job) == 0);
      }
    };
    save(1, kFull, units);
    save(2, kWindow, units);
    save(3, kState, std::span(units).last(1));
    REQUIRE(f.claim({1, 1}, 1, 2)->units == 2);

    std::uint64_t pin = 0;
    for (const std::size_t kind : {kFull, kWindow, kState}) {
      const Id128 token = f.service->claim_of_kind(f.worker, {1, 1}, kind).value();
      check_refused(f.service->open(other, token, 0, 1, engine::PinId{++pin}),
                    Errc::kInvalidArgument, "open: pages of 8192 bytes in namespace");
      CHECK(f.service->open(worker, token, 0, 1, engine::PinId{++pin}));
    }
  }
}

TEST_SUITE("CacheService, resets of several kinds") {
  /// The names among nodes of the fixture's kinds.
  Bytes32 name_of(std::size_t kind) {
    const std::vector<engine::NamespaceFactor> factors = {{"weights", "hybrid"}};
    const std::vector<std::uint64_t> page = {kind == kState ? 2 * kPage : kPage};
    return cluster::space_name(
        factors, page, std::vector<std::uint64_t>{kind, 16, 32, 0, 0, 16, 1, 48, 16, 3, 0, 32});
  }

  TEST_CASE("namespaces with other rules find none of each other's blocks among nodes") {
    KindsFixture f;
    f.save_eight(1);
    const auto check = [&](const Registration& other, std::string_view what) {
      CAPTURE(what);
      const KindsFixture g(other);
      const Bytes32 asked = g.service->wants(g.worker)->space;
      CHECK(asked != f.service->wants(f.worker)->space);
      CHECK(f.service->present(asked, prompt(1, 8)) == 0);
    };
    Registration other = full_window_state();
    other.kinds[kWindow].tokens = 64;
    check(other, "another window");
    other = full_window_state();
    other.kinds[kFull].rule = wire::Kind::Rule::CHUNK;
    other.kinds[kFull].tokens = 64;
    check(other, "chunks instead of full attention");
    other = full_window_state();
    other.alignment_tokens = 64;
    check(other, "another alignment");
    other = full_window_state();
    other.kinds.pop_back();
    check(other, "no state");
    other.kinds.clear();
    other.unit_tokens = other.alignment_tokens = 0;
    other.page_bytes = kPage;
    check(other, "no kinds");
  }

  TEST_CASE("each kind has a name among nodes, by which its blocks alone are found") {
    KindsFixture f;
    f.save_eight(1);
    CHECK(f.service->stats().space_names == 3);
    CHECK(f.service->wants(f.worker)->space == name_of(kFull));
    CHECK(f.service->present(name_of(kFull), prompt(1, 8)) == 8);
    const std::vector<BlockKey> units = prompt(1, 8);
    CHECK(f.service->present(name_of(kWindow), std::span(units).last(3)) == 3);
    CHECK(f.service->present(name_of(kWindow), units) == 0);
    CHECK(f.service->present(name_of(kState), std::span(units).last(1)) == 1);
    CHECK(f.service->present(name_of(kState), std::span(units).last(2)) == 0);
    const auto lent =
        f.service->lend(name_of(kWindow), std::span(units).last(3), std::chrono::seconds(1));
    REQUIRE(lent);
    CHECK(lent->pages.size() == 3);
  }

  TEST_CASE("a reset here ends the blocks of all kinds, and raises the epoch of each") {
    KindsFixture f;
    f.save_eight(1);
    const auto reset = f.service->reset_cache(f.scheduler);
    REQUIRE(reset);
    CHECK(reset->generation == 2);
    CHECK(reset->space == name_of(kFull));
    CHECK(f.restorable(1, 8) == 0);
    CHECK(f.service->stats().resets_here == 1);
    CHECK(f.service->stats().resets_learned == 0);
    const Epoch now = f.service->epochs().of(name_of(kFull));
    CHECK_FALSE(now.is_zero());
    for (const std::size_t kind : {kFull, kWindow, kState}) {
      CHECK(f.service->epochs().of(name_of(kind)) == now);
      CHECK(f.service->present(name_of(kind), prompt(1, 1)) == 0);
      CHECK(f.service->meets(name_of(kind), now));
      CHECK_FALSE(f.service->meets(name_of(kind), Epoch{}));
    }
    f.work();
    CHECK(f.service->stats().store.sealed == 0);
  }

  TEST_CASE("a reset that is learned by the name of one kind ends the blocks of all") {
    for (const std::size_t learned : {kFull, kWindow, kState}) {
      KindsFixture f;
      f.save_eight(1);
      REQUIRE(f.claim({1, 1}, 1, 8));
      CHECK(f.service->meets(name_of(learned), {.counter = 5, .id = 77}));
      CHECK(f.restorable(1, 8) == 0);
      CHECK(f.service->stats().resets_learned == 1);
      for (const std::size_t kind : {kFull, kWindow, kState}) {
        CHECK(f.service->epochs().of(name_of(kind)).counter == 5);
        CHECK(f.open({1, 1}, kind, 0, 1, 1).error().code == Errc::kGone);
      }
      f.work();
      f.save_eight(1);
      CHECK(f.restorable(1, 8) == 8);
    }
  }

  TEST_CASE("an epoch that was learned before the engine came is that of all kinds") {
    KindsFixture f(
        Registration{.instance = "plain", .factors = {{"weights", "plain"}}, .page_bytes = kPage});
    f.service->meets(name_of(kState), {.counter = 9, .id = 1});
    f.service->meets(name_of(kFull), {.counter = 3, .id = 1});
    REQUIRE(f.service->register_rank(f.connect(), full_window_state()));
    for (const std::size_t kind : {kFull, kWindow, kState}) {
      CHECK(f.service->epochs().of(name_of(kind)).counter == 9);
    }
    CHECK(f.service->stats().epochs == 1);
  }
}

}  // namespace
}  // namespace pegaflow::server
