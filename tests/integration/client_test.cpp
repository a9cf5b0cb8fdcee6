// Both sides of the client against a real server without faults.
#include <algorithm>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/slow_device.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Kind = Mover::Finished::Kind;
using Blocks = std::vector<std::uint32_t>;

constexpr std::size_t kBlocks = 100;

/// A server, and an engine with a device that follows the test's commands.
struct Fixture {
  explicit Fixture(TestEngine::Options options = {}, ServerProcess::Options server_options = {})
      : server(std::move(server_options)), memory(engine_memory(2, 8 * 1024, kBlocks)) {
    options.socket = server.socket();
    engine = std::make_unique<TestEngine>(std::move(options), memory, device);
    engine->wait_ready();
  }
  ~Fixture() { device.allow_all(); }

  ServerProcess server;
  EngineMemory memory;
  SlowDevice device;
  std::unique_ptr<TestEngine> engine;
};

Errc code_of(const Mover::Finished& job) {
  REQUIRE(job.error);
  return job.error->code;
}

bool becomes_at_least(const ServerProcess& server, const char* sample, double value) {
  const auto end = std::chrono::steady_clock::now() + kHang;
  while (server.metric(sample) < value) {
    if (std::chrono::steady_clock::now() >= end) return false;
  }
  return true;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_SUITE("saves and loads") {
  TEST_CASE("saved blocks are loaded byte for byte into other blocks") {
    Fixture f;
    TestEngine& engine = *f.engine;
    CHECK(engine.mover().status().namespace_hash.size() == 32);

    const Mover::Finished saved = engine.save(numbers_from(100, 20), blocks_from(0, 20));

    CHECK_FALSE(saved.error);
    CHECK(saved.kind == Kind::kSave);
    CHECK(saved.id == 1);
    CHECK(saved.blocks == 20);
    CHECK(saved.bytes == 20 * 16 * 1024);
    const auto found = engine.lookup(numbers_from(100, 30)).value();
    CHECK(found.blocks == 20);
    CHECK(found.complete);
    const auto claimed = engine.claim(numbers_from(100, 30)).value();
    CHECK(claimed.blocks == 20);
    REQUIRE_FALSE(claimed.token.is_none());

    const Mover::Finished loaded = engine.load(claimed.token, blocks_from(30, 20));

    CHECK_FALSE(loaded.error);
    CHECK(loaded.kind == Kind::kLoad);
    CHECK(loaded.blocks == 20);
    CHECK(loaded.failed_blocks.empty());
    CHECK(engine.wrong_blocks(numbers_from(100, 20), blocks_from(30, 20)) == 0);
    CHECK(f.memory.gaps_are_whole());
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    CHECK(f.server.metric("pegaflow_load_blocks_total{written_by=\"this_process\"}") == 20);
  }

  TEST_CASE("the journal lists saved and evicted blocks, in several parts") {
    Fixture f({}, {.pool_size = "1mb"});  // 64 blocks.
    CacheSession& session = f.engine->session();
    const auto ask = [&](std::uint64_t space, std::uint64_t position) {
      return session.take_journal(session.journal(space, position).value(), kHang).value().value();
    };
    const CacheSession::Journal start = ask(0, CacheSession::kJournalEnd);
    CHECK(start.keys.empty());
    CHECK_FALSE(start.lost);
    f.engine->save(numbers_from(1, 2), blocks_from(0, 2));

    const CacheSession::Journal saved = ask(start.space, start.position);
    CHECK(saved.keys == numbered_keys({2, 1}));
    CHECK(saved.there == std::vector<bool>{true, true});
    CHECK_FALSE(saved.lost);
    CHECK_FALSE(saved.more);

    // Each of these blocks is saved, and all but the last 64 are evicted.
    std::size_t there = 2;
    for (std::uint64_t round = 0; round < 60; ++round) {
      CHECK(f.engine->save(numbers_from(100 + round * 40, 40), blocks_from(0, 40)).blocks == 40);
    }
    CacheSession::Journal part = saved;
    std::size_t parts = 0;
    do {
      part = ask(part.space, part.position);
      CHECK_FALSE(part.lost);
      for (const bool is_present : part.there) is_present ? ++there : --there;
      ++parts;
    } while (part.more);
    CHECK(parts > 1);
    CHECK(there == 64);
    // Positions and namespace generations that the server never returned.
    CHECK(ask(part.space, part.position + 1).lost);
    CHECK(ask(part.space + 1, part.position).lost);
    const auto nobody = session.take_journal(CacheSession::Ticket{12345});
    REQUIRE(nobody);
    CHECK(nobody->error().code == Errc::kGone);
  }

  TEST_CASE("an engine is notified when the job of another one is sealed or can no longer be") {
    TestEngine::Options options;
    options.session.scheduler = Id128{7, 7};
    Fixture f(options);
    f.engine->scheduler = Id128{7, 7};
    EngineMemory memory = engine_memory(2, 8 * 1024, kBlocks);
    SlowDevice device;
    TestEngine decode({.socket = f.server.socket(), .instance = "decode"}, memory, device);
    decode.wait_ready();
    CacheSession& session = decode.session();
    const Id128 server = session.status().server;
    const auto wait = [&](std::uint64_t number) {
      return session.await_job(server, {f.engine->scheduler, number}, seconds(10)).value();
    };
    f.device.hold();
    const auto ticket = wait(1);
    REQUIRE(f.engine->start_save(1, numbers_from(1, 5), blocks_from(0, 5)));
    CHECK(f.server.metric_becomes("pegaflow_reservations", 1));
    CHECK_FALSE(session.take_wait(ticket));

    f.device.allow_all();

    const auto sealed = session.take_wait(ticket, kHang);
    REQUIRE(sealed);
    CHECK(sealed->value() == 1);  // The last job that is over.
    CHECK(decode.lookup(numbers_from(1, 5)).value().blocks == 5);
    CHECK(session.take_wait(ticket)->error().code == Errc::kGone);  // A result is taken once.

    const auto never = wait(2);
    CHECK(f.server.metric_becomes("pegaflow_job_waits", 1));
    f.engine->close_session();
    const auto gone = session.take_wait(never, kHang);
    REQUIRE(gone);
    CHECK(gone->error().code == Errc::kGone);

    const auto other = session.await_job(Id128::random(), {f.engine->scheduler, 1}, seconds(10));
    CHECK(session.take_wait(other.value(), kHang)->error().code == Errc::kGone);
    CHECK(session.await_job(server, {}, Duration::zero()).error().code == Errc::kInvalidArgument);
    CHECK(session.await_job(server, {}, seconds(11)).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a part of a claim can be loaded") {
    Fixture f;
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();

    CHECK(f.engine->load(claimed.token, blocks_from(20, 3), 5).blocks == 3);

    CHECK(f.engine->wrong_blocks(numbers_from(6, 3), blocks_from(20, 3)) == 0);
  }

  TEST_CASE("blocks that exist are skipped") {
    Fixture f;
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));

    const Mover::Finished some = f.engine->save(numbers_from(6, 10), blocks_from(20, 10));
    CHECK_FALSE(some.error);
    CHECK(some.blocks == 5);
    CHECK(some.skipped == 5);
    const Mover::Finished none = f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    CHECK_FALSE(none.error);
    CHECK(none.blocks == 0);
    CHECK(none.skipped == 10);
    CHECK(f.device.batches() == 2);
  }

  TEST_CASE("a rank whose bytes another rank saves reports its saves at once, and loads") {
    TestEngine::Options options;
    options.mover.saves = false;
    Fixture f(std::move(options));

    const Mover::Finished saved = f.engine->save(numbers_from(1, 10), blocks_from(0, 10));

    CHECK_FALSE(saved.error);
    CHECK(saved.blocks == 0);
    CHECK(saved.skipped == 10);
    CHECK(f.server.metric("pegaflow_pool_slots{state=\"reserved\"}") == 0);
    CHECK(f.engine->lookup(numbers_from(1, 10)).value().blocks == 0);
  }

  TEST_CASE("a page that fails fails its save, and the keys can be saved again") {
    Fixture f;
    f.device.fail_page(4);

    const Mover::Finished failed = f.engine->save(numbers_from(1, 10), blocks_from(0, 10));

    CHECK(code_of(failed) == Errc::kIo);
    CHECK(failed.blocks == 0);
    CHECK(f.engine->lookup(numbers_from(1, 10)).value().blocks == 0);
    CHECK(f.engine->save(numbers_from(1, 10), blocks_from(0, 10)).blocks == 10);
  }

  TEST_CASE("a page that fails ends its load there, and the failed blocks are named") {
    Fixture f;
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();
    f.device.fail_page(4);

    const Mover::Finished failed = f.engine->load(claimed.token, blocks_from(20, 10));

    CHECK(code_of(failed) == Errc::kIo);
    CHECK(failed.blocks == 4);
    CHECK(failed.failed_blocks == blocks_from(24, 6));
    CHECK(f.engine->wrong_blocks(numbers_from(1, 4), blocks_from(20, 4)) == 0);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("a device that accepts nothing fails the job, and nothing stays reserved or pinned") {
    Fixture f;
    f.device.fail_next_submit({Errc::kBusy, "full, as injected"});
    CHECK(code_of(f.engine->save(numbers_from(1, 4), blocks_from(0, 4))) == Errc::kBusy);
    CHECK(f.engine->save(numbers_from(1, 4), blocks_from(0, 4)).blocks == 4);

    const auto claimed = f.engine->claim(numbers_from(1, 4)).value();
    f.device.fail_next_submit({Errc::kInternal, "broken, as injected"});
    const Mover::Finished failed = f.engine->load(claimed.token, blocks_from(10, 4));
    CHECK(code_of(failed) == Errc::kInternal);
    CHECK(failed.failed_blocks == blocks_from(10, 4));
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("an unknown claim is gone") {
    Fixture f;
    const Mover::Finished failed = f.engine->load(Id128::random(), blocks_from(0, 4));
    CHECK(code_of(failed) == Errc::kGone);
    CHECK(failed.failed_blocks == blocks_from(0, 4));
    CHECK(f.device.batches() == 0);
  }

  TEST_CASE("a cancelled load is reported after its copies ended") {
    Fixture f;
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();
    f.device.hold();
    f.device.allow_pages(2);
    REQUIRE(f.engine->mover().load(77, claimed.token, 0, blocks_from(20, 10)));
    REQUIRE(f.device.wait_held(kHang));

    f.engine->mover().cancel_load(77);
    f.engine->mover().cancel_load(78);  // An unknown load.
    // Its third page is in flight, so it is not reported, however long that takes: meanwhile a
    // lookup goes to the server and back.
    REQUIRE(f.device.wait_cancels(1, kHang));
    CHECK(f.engine->lookup(numbers_from(1, 1)).value().blocks == 1);
    CHECK(f.engine->mover().take_finished().empty());
    f.device.allow_all();

    const Mover::Finished cancelled = f.engine->next_finished();
    CHECK(cancelled.id == 77);
    CHECK(code_of(cancelled) == Errc::kCancelled);
    CHECK(cancelled.blocks == 3);
    CHECK(cancelled.failed_blocks == blocks_from(23, 7));
    CHECK(f.engine->wrong_blocks(numbers_from(1, 3), blocks_from(20, 3)) == 0);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE(
      "a load past its deadline drops the pages that are not in flight and reports after the "
      "others") {
    TestEngine::Options options;
    // The first page must be in flight by then.
    options.mover.load_patience = seconds(2);
    options.mover.load_bytes_per_second = 1e12;
    Fixture f(options);
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(1, claimed.token, 0, blocks_from(20, 10)));
    REQUIRE(f.device.wait_held(kHang));
    REQUIRE(f.engine->mover().load(2, claimed.token, 0, blocks_from(40, 10)));

    // The second load is queued behind the first, and none of its pages is in flight.
    REQUIRE(f.device.wait_cancels(2, kHang));
    f.device.allow_all();

    const Mover::Finished first = f.engine->next_finished();
    CHECK(first.id == 1);
    CHECK(code_of(first) == Errc::kTimeout);
    CHECK(first.blocks == 1);
    CHECK(first.failed_blocks == blocks_from(21, 9));
    const Mover::Finished second = f.engine->next_finished();
    CHECK(code_of(second) == Errc::kTimeout);
    CHECK(second.blocks == 0);
    CHECK(second.failed_blocks == blocks_from(40, 10));
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("more jobs than max_jobs are rejected until reports are taken") {
    TestEngine::Options options;
    options.mover.max_jobs = 3;
    Fixture f(options);
    f.device.hold();
    for (std::uint64_t job = 1; job <= 3; ++job) {
      REQUIRE(f.engine->start_save(job, {job}, {static_cast<std::uint32_t>(job)}));
    }

    CHECK(f.engine->start_save(4, {4}, {4}).error().code == Errc::kBusy);
    f.device.allow_all();
    for (int i = 0; i < 3; ++i) CHECK(f.engine->next_finished().blocks == 1);

    CHECK(f.engine->start_save(4, {4}, {4}));
    CHECK(f.engine->next_finished().blocks == 1);
  }

  TEST_CASE("a pool smaller than a request saves the blocks that fit, and nothing waits") {
    ServerProcess::Options small;
    small.pool_size = "1mb";  // 64 pages.
    Fixture f({}, small);

    const Mover::Finished saved = f.engine->save(numbers_from(1, 100), blocks_from(0, 100));

    CHECK_FALSE(saved.error);
    CHECK(saved.blocks > 0);
    CHECK(saved.blocks <= 64);
    CHECK(saved.blocks + saved.skipped == 100);
  }

  TEST_CASE("close() waits for the copies in flight and reports every job") {
    Fixture f;
    f.engine->save(numbers_from(1, 4), blocks_from(0, 4));
    const auto claimed = f.engine->claim(numbers_from(1, 4)).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(7, claimed.token, 0, blocks_from(20, 4)));
    REQUIRE(f.device.wait_held(kHang));
    REQUIRE(f.engine->start_save(8, numbers_from(50, 4), blocks_from(8, 4)));

    std::thread closer([&] { f.engine->mover().close(); });
    REQUIRE(f.device.wait_detaching(kHang));
    f.device.allow_all();
    closer.join();

    CHECK(f.engine->mover().status().state == LinkState::kRetired);
    std::vector<Mover::Finished> both;
    both.push_back(f.engine->next_finished());
    both.push_back(f.engine->next_finished());
    const bool save_first = both[0].kind == Kind::kSave;
    const Mover::Finished& save = both[save_first ? 0 : 1];
    const Mover::Finished& load = both[save_first ? 1 : 0];
    CHECK(save.id == 8);
    CHECK(save.blocks == 0);
    CHECK(code_of(save) == Errc::kCancelled);
    CHECK(load.id == 7);
    CHECK(load.blocks == 1);
    CHECK(load.failed_blocks == blocks_from(21, 3));
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    CHECK(f.server.metric_becomes("pegaflow_reservations", 0));
    CHECK(f.server.metric_becomes("pegaflow_parted_connections", 0));
  }
}

TEST_SUITE("claims and resets") {
  TEST_CASE("a forgotten claim is released, before its response as well as after it") {
    Fixture f;
    CacheSession& session = f.engine->session();
    f.engine->save(numbers_from(1, 4), blocks_from(0, 4));
    const auto keys = numbered_keys(numbers_from(1, 4));

    session.forget(session.claim(keys).value());
    const auto answered = session.claim(keys).value();
    REQUIRE(f.server.metric_becomes("pegaflow_claims", 1));
    session.forget(answered);
    CHECK(f.server.metric_becomes("pegaflow_claims", 0));

    const auto taken = f.engine->claim(numbers_from(1, 4)).value();
    CHECK(f.server.metric("pegaflow_claims") == 1);
    session.unclaim(taken.token);
    CHECK(f.server.metric_becomes("pegaflow_claims", 0));
    CHECK(code_of(f.engine->load(taken.token, blocks_from(8, 4))) == Errc::kGone);
  }

  TEST_CASE("a claim on no block has no token") {
    Fixture f;
    const auto claimed = f.engine->claim(numbers_from(1, 4)).value();
    CHECK(claimed.blocks == 0);
    CHECK(claimed.complete);
    CHECK(claimed.token.is_none());
  }

  TEST_CASE("claims end with their session") {
    Fixture f;
    f.engine->save(numbers_from(1, 4), blocks_from(0, 4));
    CHECK(f.engine->claim(numbers_from(1, 4)).value().blocks == 4);
    f.engine->close_session();
    CHECK(f.server.metric_becomes("pegaflow_claims", 0));
  }

  TEST_CASE("without its worker an instance misses everything") {
    Fixture f;
    f.engine->save(numbers_from(1, 4), blocks_from(0, 4));
    f.engine->mover().close();
    const auto found = f.engine->lookup(numbers_from(1, 4)).value();
    CHECK(found.blocks == 0);
    CHECK_FALSE(found.complete);
  }

  TEST_CASE("after a reset no block is found, and a load in flight continues") {
    Fixture f;
    f.engine->save(numbers_from(1, 4), blocks_from(0, 4));
    const auto claimed = f.engine->claim(numbers_from(1, 4)).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(1, claimed.token, 0, blocks_from(20, 4)));
    REQUIRE(f.device.wait_held(kHang));

    const auto first = f.engine->session().reset_cache(kHang);
    REQUIRE(first);
    CHECK(f.engine->lookup(numbers_from(1, 4)).value().blocks == 0);
    CHECK(f.engine->session().reset_cache(kHang).value().generation == first->generation + 1);
    f.device.allow_all();

    CHECK(f.engine->next_finished().blocks == 4);
    CHECK(f.engine->wrong_blocks(numbers_from(1, 4), blocks_from(20, 4)) == 0);
  }

  TEST_CASE("a lookup examines at most 8,192 keys") {
    Fixture f;
    CHECK(f.engine->lookup(numbers_from(1, 9000)).value().blocks == 0);
    CHECK(f.server.metric("pegaflow_cache_block_misses_total") == CacheSession::kMaxKeys);
  }
}

TEST_SUITE("version negotiation") {
  TEST_CASE("a client that speaks the server's version and the next one is served") {
    TestEngine::Options options;
    options.session.minimum_version = options.mover.link.minimum_version = 4;
    options.session.maximum_version = options.mover.link.maximum_version = 5;
    Fixture f(options);
    CHECK(f.engine->save({1}, {0}).blocks == 1);
  }

  TEST_CASE("with the previous version no wait for jobs is available, and everything else is") {
    TestEngine::Options options;
    options.session.minimum_version = options.mover.link.minimum_version = 1;
    options.session.maximum_version = options.mover.link.maximum_version = 1;
    Fixture f(options);
    CacheSession& session = f.engine->session();
    CHECK(f.engine->save({1}, {0}).blocks == 1);

    const auto ticket =
        session.await_job(session.status().server, {f.engine->scheduler, 1}, seconds(2));

    REQUIRE(ticket);
    const auto answer = session.take_wait(*ticket, kHang);
    REQUIRE(answer);
    CHECK(answer->error().code == Errc::kRefused);
    CHECK(f.engine->lookup({1}).value().blocks == 1);
    CHECK(session.status().connections == 1);
  }

  TEST_CASE("a client that speaks only the next version receives which side to upgrade") {
    ServerProcess server;
    EngineMemory memory = engine_memory(1, 4096, 2);
    SlowDevice device;
    TestEngine::Options options;
    options.socket = server.socket();
    for (LinkOptions* link : {&options.session, &options.mover.link}) {
      link->minimum_version = link->maximum_version = 5;
      link->refused_interval = milliseconds(10);
    }
    TestEngine engine(options, memory, device);

    REQUIRE(engine.session().wait_for(LinkState::kRefused, kHang));
    REQUIRE(engine.mover().wait_for(LinkState::kRefused, kHang));

    const std::string why = engine.mover().status().detail;
    INFO(why);
    CHECK(has(why, "refused: "));
    CHECK(has(why, "1 to 4"));
    CHECK(has(why, "5 to 5"));
    CHECK(has(why, "upgrade the server"));
    CHECK(engine.session().lookup(numbered_keys({1})).error().code == Errc::kPeerLost);
    // The client retries by itself.
    CHECK(becomes_at_least(server, "pegaflow_connections_accepted_total", 10));
  }

  TEST_CASE("a second worker of an instance is rejected while the first is connected") {
    Fixture f;
    EngineMemory memory = engine_memory(2, 8 * 1024, 4);
    SlowDevice device;
    TestEngine::Options options;
    options.socket = f.server.socket();
    options.mover.link.refused_interval = milliseconds(10);
    TestEngine second(options, memory, device);

    REQUIRE(second.mover().wait_for(LinkState::kRefused, kHang));
    CHECK(has(second.mover().status().detail, "another process"));
    f.engine->mover().close();

    CHECK(second.mover().wait_for(LinkState::kReady, kHang));
  }

  TEST_CASE("an engine with pages of another size is served beside the first") {
    Fixture f;
    f.engine->save({1}, {0});
    EngineMemory memory = engine_memory(1, 4096, 4);
    SlowDevice device;
    TestEngine::Options options;
    options.socket = f.server.socket();
    options.instance = "other";
    options.model = "other";
    TestEngine other(options, memory, device);
    other.wait_ready();

    CHECK(other.save({1}, {0}).blocks == 1);
    CHECK(other.lookup({1}).value().blocks == 1);
    CHECK(f.engine->lookup({1}).value().blocks == 1);
  }

  TEST_CASE("two ranks save and load their shards, and a job without blocks to save ends on both") {
    ServerProcess server;
    struct OneRank {
      EngineMemory memory = engine_memory(2, 8 * 1024, kBlocks);
      SlowDevice device;
      std::unique_ptr<TestEngine> engine;
    };
    OneRank ranks[2];
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      TestEngine::Options options;
      options.socket = server.socket();
      options.mover.rank = rank;
      options.mover.ranks = 2;
      ranks[rank].engine =
          std::make_unique<TestEngine>(options, ranks[rank].memory, ranks[rank].device);
    }
    for (OneRank& rank : ranks) rank.engine->wait_ready();
    ranks[1].engine->scheduler =
        ranks[0].engine->scheduler;  // Both ranks use the same names of jobs.

    for (OneRank& rank : ranks) {
      const Mover::Finished saved = rank.engine->save(numbers_from(1, 10), blocks_from(0, 10));
      CHECK_FALSE(saved.error);
      CHECK(saved.blocks == 10);
    }
    for (OneRank& rank : ranks) {
      CHECK(rank.engine->save(numbers_from(1, 10), blocks_from(0, 10)).skipped == 10);
    }
    CHECK(server.metric_becomes("pegaflow_reservations", 0));
    const auto claimed = ranks[0].engine->claim(numbers_from(1, 10)).value();
    REQUIRE(claimed.blocks == 10);
    for (OneRank& rank : ranks) {
      CHECK(rank.engine->load(claimed.token, blocks_from(50, 10)).blocks == 10);
      CHECK(rank.engine->wrong_blocks(numbers_from(1, 10), blocks_from(50, 10)) == 0);
    }
  }

  TEST_CASE("a device that rejects the pool is reported, and attached again later") {
    ServerProcess server;
    EngineMemory memory = engine_memory(1, 4096, 2);
    SlowDevice device;
    device.fail_next_attach({Errc::kIo, "no memory to register, as injected"});
    TestEngine::Options options;
    options.socket = server.socket();
    options.mover.link.refused_interval = seconds(1);
    TestEngine engine(options, memory, device);

    REQUIRE(engine.mover().wait_for(LinkState::kRefused, kHang));
    CHECK(has(engine.mover().status().detail, "no memory to register"));

    CHECK(engine.mover().wait_for(LinkState::kReady, kHang));
  }
}

TEST_SUITE("broken invariants") {
  TEST_CASE("a broken invariant retires the mover and leaves the engine running") {
    Fixture f;
    f.engine->save(numbers_from(1, 4), blocks_from(0, 4));
    const auto claimed = f.engine->claim(numbers_from(1, 4)).value();
    f.device.hold();
    REQUIRE(f.engine->start_save(50, numbers_from(50, 2), blocks_from(30, 2)));
    REQUIRE(f.device.wait_held(kHang));
    REQUIRE(f.engine->mover().load(51, claimed.token, 0, blocks_from(20, 4)));
    REQUIRE(f.server.metric_becomes("pegaflow_pins", 1));

    f.device.complete_next_twice();  // A contract violation of the device.
    f.device.allow_all();

    REQUIRE(f.engine->mover().wait_for(LinkState::kRetired, kHang));
    CHECK(has(f.engine->mover().status().detail, "completed batch"));
    std::vector<std::uint64_t> reported{f.engine->next_finished().id, f.engine->next_finished().id};
    std::sort(reported.begin(), reported.end());
    CHECK(reported == std::vector<std::uint64_t>{50, 51});
    CHECK(f.engine->start_save(52, {1}, {0}).error().code == Errc::kPeerLost);
    // The engine's other side continues.
    REQUIRE(f.server.metric_becomes("pegaflow_clients", 1));
    CHECK_FALSE(f.engine->lookup(numbers_from(1, 4)).value().complete);
  }
}

}  // namespace
}  // namespace pegaflow::testing
