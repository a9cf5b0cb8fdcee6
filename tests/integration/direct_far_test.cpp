// Blocks that an engine reads out of the memory of an engine of another node while that saves them.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tests/integration/far_worker.h"
#include "tests/support/forked.h"
#include "tests/support/nodes.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;

/// A node with a prefill engine, and one with a decode engine that may ask the first.
struct FarPair {
  explicit FarPair(const std::string& prefill_group = "pd", bool prefill_has_network = true,
                   bool decode_has_network = true, Mover::Options mover = patient_mover())
      : prefill(p.socket(), "prefill", prefill_group, prefill_has_network),
        decode(d.socket(), "decode", "pd", decode_has_network, std::move(mover)) {
    REQUIRE(sees(d, at[0]));
  }

  [[nodiscard]] Id128 node() const { return prefill.engine->session().status().server; }

  /// Begins a save whose first page stays in flight until the test allows it.
  void begin_save(std::uint64_t job, const Numbers& numbers, const Blocks& blocks) {
    prefill.device->hold();
    REQUIRE(prefill.engine->start_save(job, numbers, blocks));
    REQUIRE(finds_offered(numbers, numbers.size()));
  }

  [[nodiscard]] CacheSession::Answer lookup(const Numbers& numbers) {
    CacheSession& session = decode.engine->session();
    const auto ticket = session.lookup(numbered_keys(numbers), 0, {.prefill_node = node()}).value();
    return session.take(ticket, kHang).value().value();
  }

  bool finds_offered(const Numbers& numbers, std::size_t count) {
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (lookup(numbers).offered != count) {
      if (std::chrono::steady_clock::now() >= end) return false;
    }
    return true;
  }

  Result<void> follow(std::uint64_t load, const Numbers& numbers, const Blocks& blocks,
                      Duration patience = kHang) {
    return decode.follow(load, numbers, blocks, node(), patience);
  }

  /// Neither node has a read, a wait or a pin left.
  void check_nothing_is_left() {
    CHECK(p.metric_becomes("pegaflow_direct_reads", 0));
    CHECK(p.metric_becomes("pegaflow_direct_waits", 0));
    CHECK(d.metric_becomes("pegaflow_direct_waits", 0));
    CHECK(d.metric_becomes("pegaflow_pins", 0));
    CHECK(d.metric_becomes("pegaflow_claims", 0));
    CHECK(p.metric_becomes("pegaflow_leases", 0));
  }

  std::vector<std::string> at = node_addresses(2);
  ServerProcess p{node_options(at[0], {at[0]})};
  ServerProcess d{node_options(at[1], {at[0]})};
  FarWorker prefill;
  FarWorker decode;
};

TEST_SUITE("direct reads between nodes") {
  TEST_CASE("an engine loads blocks while an engine of another node saves them") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    CHECK(f.lookup(numbers).blocks == 0);

    REQUIRE(f.follow(9, numbers, blocks_from(20, 8)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 8);
    CHECK(loaded.direct_bytes == 8 * FarWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
    CHECK(f.decode.memory.gaps_are_whole());
    CHECK(f.d.metric("pegaflow_fetch_bytes_total") == 0);
    CHECK(f.d.metric("pegaflow_direct_far_reads_total") == 1);
    CHECK(f.d.metric("pegaflow_direct_far_read_blocks_total") == 8);
    CHECK(f.prefill.engine->mover().take_finished().empty());

    f.prefill.device->allow_all();
    CHECK(f.prefill.engine->next_finished().blocks == 8);
    CHECK(f.lookup(numbers).blocks == 8);
    CHECK(f.lookup(numbers).offered == 0);
    f.check_nothing_is_left();
  }

  TEST_CASE("a load waits at the other node for blocks that its engine computes later") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 10);
    REQUIRE(f.follow(1, numbers, blocks_from(30, 10)));
    REQUIRE(f.p.metric_becomes("pegaflow_direct_waits", 1));

    f.prefill.device->hold();
    REQUIRE(f.prefill.engine->start_save(1, numbers_from(1, 4), blocks_from(0, 4)));
    REQUIRE(f.d.metric_becomes("pegaflow_direct_far_reads_total", 1));
    CHECK(f.decode.engine->mover().take_finished().empty());
    REQUIRE(f.prefill.engine->start_save(2, numbers_from(5, 6), blocks_from(4, 6)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.direct_bytes == 10 * FarWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(30, 10)) == 0);
    f.prefill.device->allow_all();
    f.check_nothing_is_left();
  }

  TEST_CASE("a load takes blocks from the other node's pool and from its engine's memory") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 12);
    CHECK(f.prefill.engine->save(numbers_from(1, 5), blocks_from(0, 5)).blocks == 5);
    f.prefill.device->hold();
    REQUIRE(f.prefill.engine->start_save(20, numbers_from(6, 7), blocks_from(5, 7)));

    // Those in the pool are not offered.
    REQUIRE(f.finds_offered(numbers, 7));
    CHECK(f.lookup(numbers).blocks == 5);
    REQUIRE(f.follow(1, numbers, blocks_from(30, 12)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 12);
    CHECK(loaded.direct_bytes == 7 * FarWorker::kPage);
    CHECK(f.d.metric("pegaflow_fetch_bytes_total") == 5 * FarWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(30, 12)) == 0);
    f.prefill.device->allow_all();
    f.check_nothing_is_left();
  }

  TEST_CASE("a scheduler learns that an engine of another node has begun a job") {
    FarPair f;
    CacheSession& session = f.decode.engine->session();
    const JobId job{f.prefill.engine->scheduler, 1};
    const auto begun = session.await_job(f.node(), job, std::chrono::seconds(10), true).value();
    f.prefill.device->hold();
    REQUIRE(f.prefill.engine->start_save(1, numbers_from(1, 3), blocks_from(0, 3)));
    const auto answer = session.take_wait(begun, kHang);
    REQUIRE(answer);
    CHECK(answer->value() == 1);
    f.prefill.device->allow_all();
  }

  TEST_CASE("an engine without a network is not told of another node's begun jobs or offers") {
    FarPair f("pd", true, false);
    CacheSession& session = f.decode.engine->session();
    const JobId job{f.prefill.engine->scheduler, 1};
    const auto begun = session.await_job(f.node(), job, std::chrono::seconds(10), true).value();
    const auto answer = session.take_wait(begun, kHang);
    REQUIRE(answer);
    CHECK(answer->error().code == Errc::kRefused);
    f.prefill.device->hold();
    REQUIRE(f.prefill.engine->start_save(1, numbers_from(1, 3), blocks_from(0, 3)));
    REQUIRE(f.p.metric_becomes("pegaflow_direct_offered_blocks", 3));
    CHECK(f.lookup(numbers_from(1, 3)).offered == 0);
  }

  TEST_CASE("engines of another group, or without a network, are loaded through the pools") {
    for (const bool is_other_group : {true, false}) {
      CAPTURE(is_other_group);
      FarPair f(is_other_group ? "else" : "pd", is_other_group);
      const Numbers numbers = numbers_from(1, 4);
      f.prefill.device->hold();
      REQUIRE(f.prefill.engine->start_save(1, numbers, blocks_from(0, 4)));
      REQUIRE(f.p.metric_becomes("pegaflow_reservations", 1));
      CHECK(f.lookup(numbers).offered == 0);
      REQUIRE(f.follow(2, numbers, blocks_from(30, 4)));
      REQUIRE(f.p.metric_becomes("pegaflow_direct_waits", 1));
      f.prefill.device->allow_all();

      const Mover::Finished loaded = f.decode.engine->next_finished();
      CHECK(error_of(loaded) == "");
      CHECK(loaded.direct_bytes == 0);
      CHECK(loaded.blocks == 4);
      CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(30, 4)) == 0);
      f.check_nothing_is_left();
    }
  }

  TEST_CASE("blocks that no engine saves fail after the patience") {
    FarPair f;
    CHECK(f.prefill.engine->save(numbers_from(1, 2), blocks_from(0, 2)).blocks == 2);
    REQUIRE(f.follow(1, numbers_from(1, 5), blocks_from(30, 5), milliseconds(1500)));
    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 2);
    CHECK(loaded.failed_blocks == blocks_from(32, 3));
    CHECK(f.decode.engine->wrong_blocks(numbers_from(1, 2), blocks_from(30, 2)) == 0);
    f.check_nothing_is_left();
  }

  TEST_CASE("a load that is cancelled while it waits leaves nothing at either node") {
    FarPair f;
    REQUIRE(f.follow(1, numbers_from(1, 4), blocks_from(30, 4)));
    REQUIRE(f.p.metric_becomes("pegaflow_direct_waits", 1));
    f.decode.engine->mover().cancel_load(1);
    CHECK(code_of(f.decode.engine->next_finished()) == Errc::kCancelled);
    f.check_nothing_is_left();
  }

  TEST_CASE("an engine that ends while it waits leaves nothing at either node") {
    FarPair f;
    REQUIRE(f.follow(1, numbers_from(1, 4), blocks_from(30, 4)));
    REQUIRE(f.p.metric_becomes("pegaflow_direct_waits", 1));
    f.decode.engine.reset();
    f.check_nothing_is_left();
    // The prefill engine's save waits for no reader.
    CHECK(f.prefill.engine->save(numbers_from(1, 4), blocks_from(0, 4)).blocks == 4);
  }

  TEST_CASE("blocks of an engine that has closed are not read") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    REQUIRE(f.follow(9, numbers, blocks_from(20, 8)));
    CHECK(f.decode.engine->next_finished().direct_bytes == 8 * FarWorker::kPage);
    f.prefill.device->allow_all();
    f.prefill.engine->mover().close();
    // Its guards are gone; the other engine's process reads what is left of its memory, or nothing.
    f.prefill.engine.reset();
    REQUIRE(f.decode.follow(10, numbers_from(100, 2), blocks_from(30, 2), Id128::random(),
                            milliseconds(300)));
    CHECK(code_of(f.decode.engine->next_finished()) == Errc::kTimeout);
    CHECK(f.d.metric_becomes("pegaflow_direct_waits", 0));
  }

  TEST_CASE("blocks that were overwritten before they were read do not count") {
    for (const bool ignores_guards : {false, true}) {
      CAPTURE(ignores_guards);
      Mover::Options mover = patient_mover();
      mover.mistakes.checks_guards_first = ignores_guards;
      FarPair f("pd", true, true, mover);
      const Numbers numbers = numbers_from(1, 8);
      f.begin_save(1, numbers, blocks_from(0, 8));
      f.decode.how.is_held = true;
      REQUIRE(f.follow(9, numbers, blocks_from(20, 8)));
      REQUIRE(f.d.metric_becomes("pegaflow_direct_far_reads_total", 1));
      f.prefill.device->allow_all();
      // The save waits for the reader, for 2 s.
      CHECK(f.prefill.engine->next_finished().blocks == 8);
      for (const std::uint32_t block : blocks_from(0, 8)) f.prefill.memory.fill(block, 0xBAD);
      f.decode.how.is_held = false;

      const Mover::Finished loaded = f.decode.engine->next_finished();
      CHECK(loaded.blocks == 8);
      const std::size_t wrong = f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8));
      // The planted mistake shows that the guards are what keeps these bytes out.
      CHECK((wrong != 0) == ignores_guards);
      CHECK((loaded.direct_bytes != 0) == ignores_guards);
      f.check_nothing_is_left();
    }
  }

  TEST_CASE("a load that is cancelled while its blocks cannot be fetched ends at once") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 4);
    CHECK(f.prefill.engine->save(numbers, blocks_from(0, 4)).blocks == 4);
    // Another engine of the decode engine's node saves them, so they cannot be fetched.
    FarWorker other(f.d.socket(), "other", "another group");
    other.device->hold();
    REQUIRE(other.engine->start_save(1, numbers, blocks_from(0, 4)));
    REQUIRE(f.d.metric_becomes("pegaflow_reservations", 1));
    REQUIRE(f.follow(1, numbers, blocks_from(30, 4)));
    REQUIRE(f.d.metric_becomes("pegaflow_direct_waits", 1));
    const auto begin = std::chrono::steady_clock::now();
    f.decode.engine->mover().cancel_load(1);
    CHECK(code_of(f.decode.engine->next_finished()) == Errc::kCancelled);
    // Its question alone may take 10 s.
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));

    // One that is late neither leaves a pin nor ends before its time.
    REQUIRE(f.follow(2, numbers, blocks_from(30, 4), milliseconds(600)));
    CHECK(code_of(f.decode.engine->next_finished()) == Errc::kTimeout);
    other.device->allow_all();
    CHECK(other.engine->next_finished().blocks == 4);
    f.check_nothing_is_left();
  }

  TEST_CASE("a killed prefill engine ends a load with what was read") {
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess p(node_options(at[0], {at[0]}));
    const ServerProcess d(node_options(at[1], {at[0]}));
    REQUIRE(sees(d, at[0]));
    const Numbers numbers = numbers_from(1, 8);
    auto prefill = std::make_unique<Forked>([&] {
      auto* const worker = new FarWorker(p.socket(), "prefill");
      worker->device->hold();
      if (!worker->engine->start_save(1, numbers_from(1, 4), blocks_from(0, 4))) {
        throw std::runtime_error("the save was rejected");
      }
    });
    FarWorker decode(d.socket(), "decode");
    REQUIRE(p.metric_becomes("pegaflow_direct_offered_blocks", 4));
    FarWorker witness(p.socket(), "witness");
    const Id128 node = witness.engine->session().status().server;

    REQUIRE(decode.follow(1, numbers, blocks_from(20, 8), node, std::chrono::seconds(3)));
    REQUIRE(p.metric_becomes("pegaflow_direct_waits", 1));
    prefill.reset();

    const Mover::Finished loaded = decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 4);
    CHECK(decode.engine->wrong_blocks(numbers_from(1, 4), blocks_from(20, 4)) == 0);
    CHECK(p.metric_becomes("pegaflow_direct_reads", 0));
  }

  TEST_CASE("an engine that hangs while it is read is not read again at once") {
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess p(node_options(at[0], {at[0]}));
    const ServerProcess d(node_options(at[1], {at[0]}));
    REQUIRE(sees(d, at[0]));
    const Numbers numbers = numbers_from(1, 8);
    const Forked prefill([&] {
      auto* const worker = new FarWorker(p.socket(), "prefill");
      worker->device->hold();
      if (!worker->engine->start_save(1, numbers_from(1, 4), blocks_from(0, 4))) {
        throw std::runtime_error("the save was rejected");
      }
    });
    FarWorker decode(d.socket(), "decode");
    FarWorker witness(p.socket(), "witness", "another group");
    REQUIRE(p.metric_becomes("pegaflow_direct_offered_blocks", 4));
    prefill.signal(SIGSTOP);

    const Id128 node = witness.engine->session().status().server;
    REQUIRE(decode.follow(1, numbers, blocks_from(20, 8), node, std::chrono::seconds(4)));
    REQUIRE(d.metric_becomes("pegaflow_direct_far_reads_total", 1));
    // Its blocks come through the pools instead, from whichever engine has saved them.
    CHECK(witness.engine->save(numbers, blocks_from(0, 8)).blocks == 8 - 4);

    const Mover::Finished loaded = decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.direct_bytes == 0);
    CHECK(loaded.blocks == 0);
    CHECK(d.metric("pegaflow_direct_far_reads_total") == 1);
    CHECK(p.metric_becomes("pegaflow_direct_reads", 0));
    CHECK(d.metric_becomes("pegaflow_direct_waits", 0));
    // Without the engine that hangs, nothing waits for it.
    REQUIRE(decode.follow(2, numbers_from(5, 4), blocks_from(30, 4), node));
    const Mover::Finished next = decode.engine->next_finished();
    CHECK(error_of(next) == "");
    CHECK(next.blocks == 4);
    CHECK(decode.engine->wrong_blocks(numbers_from(5, 4), blocks_from(30, 4)) == 0);
    prefill.signal(SIGCONT);
  }

  TEST_CASE("a load goes on when the other node's server is killed, until its patience is over") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers_from(1, 4), blocks_from(0, 4));
    REQUIRE(f.follow(1, numbers, blocks_from(20, 8), std::chrono::seconds(3)));
    REQUIRE(f.p.metric_becomes("pegaflow_direct_waits", 1));
    f.p.kill();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 4);
    CHECK(f.decode.engine->wrong_blocks(numbers_from(1, 4), blocks_from(20, 4)) == 0);
    CHECK(f.d.metric_becomes("pegaflow_direct_waits", 0));
    // The engine goes on with its own node.
    CHECK(f.decode.engine->save(numbers_from(50, 4), blocks_from(0, 4)).blocks == 4);
    f.prefill.device->allow_all();
  }

  TEST_CASE("blocks of a generation that was reset are neither offered nor read") {
    FarPair f;
    const Numbers numbers = numbers_from(1, 4);
    f.begin_save(1, numbers, blocks_from(0, 4));
    CacheSession& session = f.decode.engine->session();
    const auto ticket = session.ask_reset(kHang).value();
    REQUIRE(session.take_reset(ticket, kHang));
    CHECK(f.finds_offered(numbers, 0));
    REQUIRE(f.follow(1, numbers, blocks_from(20, 4), milliseconds(500)));
    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 0);
    f.prefill.device->allow_all();
    f.check_nothing_is_left();
  }

  TEST_CASE("blocks that are rewritten as soon as their save has ended are right or named") {
    FarPair f;
    std::minstd_rand random(seed());
    std::uint64_t next = 1;
    std::size_t direct = 0;
    for (std::size_t round = 0; round < direct_rounds(60); ++round) {
      const std::size_t count = 1 + random() % 16;
      const Numbers numbers = numbers_from(next, count);
      next += count;
      const Blocks from = blocks_from(static_cast<std::uint32_t>(random() % 40), count);
      const Blocks to = blocks_from(static_cast<std::uint32_t>(random() % 40), count);
      const bool is_first = random() % 2 == 0;
      if (is_first) REQUIRE(f.follow(round, numbers, to));
      const bool is_held = random() % 3 == 0;
      if (is_held) f.prefill.device->hold();
      REQUIRE(f.prefill.engine->start_save(round + 1, numbers, from));
      if (!is_first) REQUIRE(f.follow(round, numbers, to));
      if (is_held) {
        if (random() % 2 == 0) std::this_thread::yield();
        f.prefill.device->allow_all();
      }
      CHECK_FALSE(f.prefill.engine->next_finished().error);
      for (const std::uint32_t block : from) f.prefill.memory.fill(block, 0xBAD);
      const Mover::Finished loaded = f.decode.engine->next_finished();
      CHECK(error_of(loaded) == "");
      direct += loaded.direct_bytes / FarWorker::kPage;
      REQUIRE(f.decode.engine->wrong_blocks(numbers, to) == 0);
    }
    CHECK(direct > 0);
    f.check_nothing_is_left();
  }
}

}  // namespace
}  // namespace pegaflow::testing
