// Blocks that an engine reads out of another engine's memory while that saves them.
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/integration/direct_worker.h"
#include "tests/support/forked.h"
#include "tests/support/server_process.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;

/// A prefill engine, a decode engine, and their server.
struct Pair {
  explicit Pair(const std::string& prefill_group = "pd", const std::string& decode_group = "pd")
      : prefill(server.socket(), "prefill", prefill_group),
        decode(server.socket(), "decode", decode_group) {}
  ~Pair() {
    prefill.device.allow_all();
    decode.device.allow_all();
  }

  /// Begins a save whose first page stays in flight until the test allows it.
  void begin_save(std::uint64_t job, const Numbers& numbers, const Blocks& blocks) {
    prefill.device.hold();
    REQUIRE(prefill.engine->start_save(job, numbers, blocks));
    REQUIRE(decode.finds_offered(numbers, numbers.size()));
  }

  /// Both engines use the cache again, and blocks are read directly as before.
  void read_again(const Numbers& numbers) {
    prefill.engine->wait_ready();
    decode.engine->wait_ready();
    begin_save(2, numbers, blocks_from(0, 8));
    REQUIRE(decode.follow(10, numbers, blocks_from(20, 8)));
    CHECK(decode.engine->next_finished().direct_bytes == 8 * DirectWorker::kPage);
    CHECK(decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
  }

  ServerProcess server;
  DirectWorker prefill;
  DirectWorker decode;
};

TEST_SUITE("direct reads") {
  TEST_CASE("an engine loads blocks while another one saves them") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    CHECK(f.decode.engine->lookup(numbers).value().blocks == 0);

    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.id == 9);
    CHECK(loaded.blocks == 8);
    CHECK(loaded.bytes == 8 * DirectWorker::kPage);
    CHECK(loaded.direct_bytes == loaded.bytes);
    CHECK(loaded.failed_blocks.empty());
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
    CHECK(f.decode.memory.gaps_are_whole());
    CHECK(f.prefill.engine->mover().take_finished().empty());

    f.prefill.device.allow_all();

    const Mover::Finished saved = f.prefill.engine->next_finished();
    CHECK(error_of(saved) == "");
    CHECK(saved.blocks == 8);
    CHECK(f.decode.engine->lookup(numbers).value().blocks == 8);
    CHECK(f.decode.engine->lookup(numbers).value().offered == 0);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("an engine in another process is read by a device of host memory") {
    ServerProcess server;
    const Numbers numbers = numbers_from(1, 40);
    const Forked prefill([&] { save_held(server.socket(), numbers, blocks_from(10, 40)); });
    EngineMemory memory = engine_memory(2, DirectWorker::kPage / 2, 64);
    const auto device = HostDevice::create({.threads = 2}).value();
    TestEngine::Options options{.socket = server.socket(), .instance = "decode"};
    options.mover.direct_group = "pd";
    TestEngine decode(options, memory, *device);
    decode.wait_ready();

    REQUIRE(decode.mover().load_following(1, numbered_keys(numbers), blocks_from(0, 40), kHang));

    const Mover::Finished loaded = decode.next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.direct_bytes == 40 * DirectWorker::kPage);
    CHECK(decode.wrong_blocks(numbers, blocks_from(0, 40)) == 0);
    CHECK(memory.gaps_are_whole());
  }

  TEST_CASE("a load takes blocks from the pool and from the other engine") {
    Pair f;
    const Numbers numbers = numbers_from(1, 12);
    CHECK(f.prefill.engine->save(numbers_from(1, 5), blocks_from(0, 5)).blocks == 5);
    f.begin_save(20, numbers_from(6, 7), blocks_from(5, 7));

    REQUIRE(f.decode.follow(1, numbers, blocks_from(30, 12)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 12);
    CHECK(loaded.bytes == 12 * DirectWorker::kPage);
    CHECK(loaded.direct_bytes == 7 * DirectWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(30, 12)) == 0);
  }

  TEST_CASE("a load waits for blocks that the other engine computes later") {
    Pair f;
    const Numbers numbers = numbers_from(1, 10);
    REQUIRE(f.decode.follow(1, numbers, blocks_from(30, 10)));

    f.prefill.device.hold();
    REQUIRE(f.prefill.engine->start_save(1, numbers_from(1, 4), blocks_from(0, 4)));
    REQUIRE(f.decode.device.wait_copied(4, kHang));
    CHECK(f.decode.engine->mover().take_finished().empty());
    REQUIRE(f.prefill.engine->start_save(2, numbers_from(5, 6), blocks_from(4, 6)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.direct_bytes == 10 * DirectWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(30, 10)) == 0);
  }

  TEST_CASE("a scheduler learns that the other engine has begun a job") {
    Pair f;
    CacheSession& session = f.decode.engine->session();
    const Id128 server = session.status().server;
    const JobId job{f.prefill.engine->scheduler, 1};
    const auto begun = session.await_job(server, job, std::chrono::seconds(10), true).value();
    const auto ended = session.await_job(server, job, std::chrono::seconds(10)).value();
    f.prefill.device.hold();
    REQUIRE(f.prefill.engine->start_save(1, numbers_from(1, 3), blocks_from(0, 3)));

    const auto answer = session.take_wait(begun, kHang);
    REQUIRE(answer);
    CHECK(answer->value() == 1);  // The last job that has begun.
    CHECK(f.decode.engine->lookup(numbers_from(1, 5)).value().offered == 3);
    CHECK_FALSE(session.take_wait(ended));
    f.prefill.device.allow_all();
    CHECK(session.take_wait(ended, kHang).value());
  }

  TEST_CASE("blocks that no engine saves fail after the patience") {
    Pair f;
    CHECK(f.prefill.engine->save(numbers_from(1, 2), blocks_from(0, 2)).blocks == 2);

    REQUIRE(f.decode.follow(1, numbers_from(1, 5), blocks_from(30, 5), milliseconds(50)));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 2);
    CHECK(loaded.took >= milliseconds(50));
    CHECK(loaded.failed_blocks == blocks_from(32, 3));
    CHECK(f.decode.engine->wrong_blocks(numbers_from(1, 2), blocks_from(30, 2)) == 0);
  }

  TEST_CASE("many loads of long prompts that wait do not hold up the saves of their engine") {
    ServerProcess server;
    DirectWorker decode(server.socket(), "decode", "pd", patient_mover());
    constexpr std::size_t kLoads = 300;
    constexpr std::size_t kKeys = 2048;
    Blocks blocks(kKeys);
    for (std::size_t i = 0; i < kKeys; ++i) {
      blocks[i] = static_cast<std::uint32_t>(i % DirectWorker::kBlocks);
    }
    for (std::size_t load = 1; load <= kLoads; ++load) {
      REQUIRE(decode.follow(load, numbers_from(load * 10'000, kKeys), blocks, kHang));
    }
    CHECK_FALSE(decode.engine->save(numbers_from(1, 4), blocks_from(0, 4)).error);
  }

  TEST_CASE("as many loads as another group may have in wait do not end the load of an engine") {
    ServerProcess server;
    DirectWorker others(server.socket(), "others", "another group", patient_mover());
    DirectWorker prefill(server.socket(), "prefill");
    DirectWorker decode(server.socket(), "decode");
    for (std::uint64_t load = 1; load <= Mover::Options().max_jobs; ++load) {
      REQUIRE(others.follow(load, numbers_from(load * 100, 2), blocks_from(0, 2), kHang));
    }
    REQUIRE(decode.follow(1, numbers_from(1, 4), blocks_from(0, 4), kHang));
    CHECK_FALSE(prefill.engine->save(numbers_from(1, 4), blocks_from(0, 4)).error);
    CHECK(decode.engine->next_finished().blocks == 4);
  }

  TEST_CASE("a block in the pool is loaded soon after there is room for its pin") {
    ServerProcess::Options options;
    options.pool_size = "4mb";
    ServerProcess server(options);
    DirectWorker prefill(server.socket(), "prefill");
    DirectWorker decode(server.socket(), "decode");
    for (std::uint64_t first : {1, 61, 121}) {
      CHECK(prefill.engine->save(numbers_from(first, 60), blocks_from(0, 60)).blocks == 60);
    }
    const auto claim = decode.engine->claim(numbers_from(1, 180));
    REQUIRE(claim);
    REQUIRE(claim->blocks < 180);  // The limit of claims.
    REQUIRE(decode.follow(1, numbers_from(175, 5), blocks_from(0, 5), std::chrono::seconds(6)));
    decode.engine->session().unclaim(claim->token);
    CHECK(decode.engine->next_finished().blocks == 5);
  }

  TEST_CASE("engines of another group, or without one, are not read") {
    for (const std::string other : {"else", ""}) {
      CAPTURE(other);
      ServerProcess server;
      DirectWorker prefill(server.socket(), "prefill", other);
      DirectWorker decode(server.socket(), "decode", "pd");
      const Numbers numbers = numbers_from(1, 4);
      prefill.device.hold();
      REQUIRE(prefill.engine->start_save(1, numbers, blocks_from(0, 4)));
      CHECK(server.metric_becomes("pegaflow_reservations", 1));
      CHECK(decode.engine->lookup(numbers).value().offered == 0);
      REQUIRE(decode.follow(1, numbers, blocks_from(30, 4), milliseconds(50)));
      CHECK(code_of(decode.engine->next_finished()) == Errc::kTimeout);

      REQUIRE(decode.follow(2, numbers, blocks_from(30, 4)));
      prefill.device.allow_all();

      const Mover::Finished loaded = decode.engine->next_finished();
      CHECK(error_of(loaded) == "");
      CHECK(loaded.direct_bytes == 0);
      CHECK(decode.engine->wrong_blocks(numbers, blocks_from(30, 4)) == 0);
    }
  }

  TEST_CASE("a save that may be refused is not offered") {
    Pair f;
    const Numbers numbers = numbers_from(1, 4);
    f.prefill.device.hold();
    for (std::uint32_t i = 0; i < 4; ++i) f.prefill.memory.fill(i, numbers[i]);
    REQUIRE(f.prefill.engine->mover().save(f.prefill.engine->scheduler, 1, 0,
                                           numbered_keys(numbers), blocks_from(0, 4),
                                           Device::Event::kNow, {}, true));
    CHECK(f.server.metric_becomes("pegaflow_reservations", 1));

    CHECK(f.decode.engine->lookup(numbers).value().offered == 0);
  }

  TEST_CASE("a mover without a group, or with an older server, refuses to follow") {
    Pair f("pd", "");
    CHECK(f.decode.follow(1, numbers_from(1, 2), blocks_from(0, 2)).error().code == Errc::kRefused);
    const auto invalid = [&](const Numbers& numbers, const Blocks& blocks, Duration patience) {
      return f.prefill.follow(1, numbers, blocks, patience).error().code;
    };
    CHECK(invalid({}, {}, kHang) == Errc::kInvalidArgument);
    CHECK(invalid({1, 2}, {1}, kHang) == Errc::kInvalidArgument);
    CHECK(invalid({1}, {DirectWorker::kBlocks}, kHang) == Errc::kInvalidArgument);
    CHECK(invalid({1}, {1}, Duration(-1)) == Errc::kInvalidArgument);

    // A connection that speaks an older version of the wire has no features.
    Mover::Options old = patient_mover();
    old.link.maximum_version = 3;
    DirectWorker older(f.server.socket(), "older", "pd", old);
    CHECK(older.follow(1, numbers_from(1, 2), blocks_from(0, 2)).error().code == Errc::kRefused);
    CHECK(older.engine->save(numbers_from(1, 2), blocks_from(0, 2)).blocks == 2);
  }

  TEST_CASE("a save is reported once no other engine reads its blocks") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    REQUIRE(f.decode.device.wait_held(kHang));

    f.prefill.device.allow_all();
    REQUIRE(f.prefill.device.wait_copied(8, kHang));
    while (f.decode.engine->lookup(numbers).value().blocks != 8) std::this_thread::yield();

    CHECK(f.prefill.engine->mover().take_finished().empty());
    f.decode.device.allow_all();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.direct_bytes == loaded.bytes);
    CHECK(f.prefill.engine->next_finished().blocks == 8);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
  }

  TEST_CASE("an engine that reads for too long loads the blocks from the pool instead") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    REQUIRE(f.decode.device.wait_held(kHang));
    f.prefill.device.allow_all();

    const Mover::Finished saved = f.prefill.engine->next_finished();  // After 2 s.
    CHECK(error_of(saved) == "");
    CHECK(saved.blocks == 8);
    f.prefill.overwrite(blocks_from(0, 8));
    f.decode.device.allow_all();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 8);
    CHECK(loaded.direct_bytes == 0);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
  }

  TEST_CASE("blocks of a save that fails do not count once they may be overwritten") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.prefill.device.fail_page(3);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.hold();
    f.decode.device.allow_pages(2);
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8), milliseconds(200)));
    REQUIRE(f.decode.device.wait_held(kHang));

    f.prefill.device.allow_all();
    CHECK(code_of(f.prefill.engine->next_finished()) == Errc::kIo);
    f.prefill.overwrite(blocks_from(0, 8));
    f.decode.device.allow_all();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 0);
    CHECK(loaded.direct_bytes == 0);
    CHECK(loaded.failed_blocks == blocks_from(20, 8));
  }

  TEST_CASE("a page that the device cannot read is loaded from the pool") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.fail_page(3);
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    REQUIRE(f.decode.device.wait_copied(3, kHang));
    CHECK(f.decode.engine->lookup(numbers).value().blocks == 0);
    f.prefill.device.allow_all();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 8);
    CHECK(loaded.direct_bytes == 3 * DirectWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
  }

  TEST_CASE("a load whose direct batch the device rejects gets the blocks from the pool") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.fail_next_submit({Errc::kBusy, "full, as injected"});
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    REQUIRE(f.decode.follow(10, numbers, blocks_from(30, 8)));
    const Mover::Finished other = f.decode.engine->next_finished();
    CHECK(other.id == 10);
    CHECK(other.direct_bytes == 8 * DirectWorker::kPage);
    f.prefill.device.allow_all();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(loaded.id == 9);
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 8);
    CHECK(loaded.direct_bytes == 0);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
  }

  TEST_CASE("a load that waits, or that reads another engine, can be cancelled") {
    Pair f;
    REQUIRE(f.decode.follow(1, numbers_from(1, 4), blocks_from(20, 4)));
    f.decode.engine->mover().cancel_load(1);
    const Mover::Finished waiting = f.decode.engine->next_finished();
    CHECK(code_of(waiting) == Errc::kCancelled);
    CHECK(waiting.failed_blocks == blocks_from(20, 4));

    f.begin_save(1, numbers_from(1, 4), blocks_from(0, 4));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(2, numbers_from(1, 4), blocks_from(20, 4)));
    REQUIRE(f.decode.device.wait_held(kHang));
    f.decode.engine->mover().cancel_load(2);
    REQUIRE(f.decode.device.wait_cancels(1, kHang));
    f.decode.device.allow_all();
    const Mover::Finished reading = f.decode.engine->next_finished();
    CHECK(code_of(reading) == Errc::kCancelled);
    CHECK(reading.blocks == 1);
    CHECK(f.decode.engine->wrong_blocks({1}, {20}) == 0);

    f.prefill.device.allow_all();
    CHECK(f.prefill.engine->next_finished().blocks == 4);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("a mover that is closed ends loads that wait, and saves that are being read") {
    Pair f;
    f.begin_save(1, numbers_from(1, 4), blocks_from(0, 4));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(1, numbers_from(1, 4), blocks_from(20, 4), milliseconds(300)));
    REQUIRE(f.decode.device.wait_held(kHang));
    f.prefill.device.allow_all();
    while (f.decode.engine->lookup(numbers_from(1, 4)).value().blocks != 4) {
      std::this_thread::yield();
    }
    f.prefill.engine->mover().close();
    CHECK(f.prefill.engine->next_finished().blocks == 4);
    f.prefill.overwrite(blocks_from(0, 4));
    f.decode.device.allow_all();
    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(f.decode.engine->wrong_blocks(numbers_from(1, 4), blocks_from(20, 4),
                                        loaded.failed_blocks) == 0);

    REQUIRE(f.decode.follow(2, numbers_from(100, 4), blocks_from(30, 4)));
    f.decode.engine->mover().close();
    const Mover::Finished waiting = f.decode.engine->next_finished();
    CHECK(code_of(waiting) == Errc::kCancelled);
    CHECK(waiting.failed_blocks == blocks_from(30, 4));
  }

  TEST_CASE("lost connections end saves and loads, and both engines go on afterwards") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    REQUIRE(f.decode.device.wait_held(kHang));

    cut_connections(f.server.socket());
    f.prefill.device.allow_all();
    CHECK(code_of(f.prefill.engine->next_finished()) == Errc::kPeerLost);
    f.prefill.overwrite(blocks_from(0, 8));
    f.decode.device.allow_all();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kPeerLost);
    CHECK(loaded.blocks == 0);
    CHECK(loaded.failed_blocks == blocks_from(20, 8));

    f.read_again(numbers);
  }

  TEST_CASE("a killed server ends saves and loads, and the next one serves both engines") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    REQUIRE(f.decode.device.wait_held(kHang));

    f.server.kill();
    f.prefill.device.allow_all();
    CHECK(code_of(f.prefill.engine->next_finished()) == Errc::kPeerLost);
    f.prefill.overwrite(blocks_from(0, 8));
    f.decode.device.allow_all();
    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kPeerLost);
    CHECK(loaded.failed_blocks == blocks_from(20, 8));

    f.server.start();
    f.read_again(numbers);
  }

  TEST_CASE("no block counts that was read from an engine that was killed") {
    ServerProcess server;
    const Numbers numbers = numbers_from(1, 8);
    Forked prefill([&] { save_held(server.socket(), numbers, blocks_from(0, 8)); });
    DirectWorker decode(server.socket(), "decode");
    REQUIRE(decode.finds_offered(numbers, 8));
    decode.device.hold();
    decode.device.allow_pages(3);
    REQUIRE(decode.follow(1, numbers, blocks_from(20, 8), milliseconds(500)));
    REQUIRE(decode.device.wait_held(kHang));

    prefill.kill();
    decode.device.allow_all();

    const Mover::Finished loaded = decode.engine->next_finished();
    CHECK(code_of(loaded) == Errc::kTimeout);
    CHECK(loaded.blocks == 0);
    CHECK(loaded.direct_bytes == 0);
    CHECK(loaded.failed_blocks == blocks_from(20, 8));
    CHECK(decode.device.peers() == 0);
    // Another engine takes its place.
    DirectWorker heir(server.socket(), "heir");
    heir.device.hold();
    REQUIRE(heir.engine->start_save(1, numbers, blocks_from(0, 8)));
    REQUIRE(decode.follow(2, numbers, blocks_from(20, 8)));
    CHECK(decode.engine->next_finished().direct_bytes == 8 * DirectWorker::kPage);
    CHECK(decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
  }

  TEST_CASE("a mover that retires after a direct read lets its engine live") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    CHECK(f.decode.engine->next_finished().direct_bytes == 8 * DirectWorker::kPage);
    f.prefill.device.allow_all();
    f.prefill.engine->next_finished();

    f.decode.device.complete_next_twice();
    REQUIRE(f.decode.engine->start_save(10, numbers_from(100, 1), blocks_from(40, 1)));

    CHECK(f.decode.engine->mover().wait_for(LinkState::kRetired, kHang));
  }

  TEST_CASE("an engine that left without an end of its process is forgotten at the next load") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    REQUIRE(f.decode.follow(9, numbers, blocks_from(20, 8)));
    CHECK(f.decode.engine->next_finished().direct_bytes == 8 * DirectWorker::kPage);
    CHECK(f.decode.device.peers() == 1);
    f.prefill.device.allow_all();
    f.prefill.engine->next_finished();

    f.prefill.engine->mover().close();
    REQUIRE(f.decode.follow(10, numbers, blocks_from(20, 8)));

    CHECK_FALSE(f.decode.engine->next_finished().error);
    CHECK(f.decode.device.peers() == 0);
  }

  TEST_CASE("an engine that ended is forgotten although nothing is loaded any longer") {
    ServerProcess server;
    const Numbers numbers = numbers_from(1, 8);
    Forked prefill([&] { save_held(server.socket(), numbers, blocks_from(0, 8)); });
    DirectWorker decode(server.socket(), "decode");
    REQUIRE(decode.follow(1, numbers, blocks_from(20, 8)));
    CHECK(decode.engine->next_finished().direct_bytes == 8 * DirectWorker::kPage);
    CHECK(decode.device.peers() == 1);

    prefill.kill();

    const auto end = std::chrono::steady_clock::now() + kHang;
    while (decode.device.peers() != 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    CHECK(decode.device.peers() == 0);
  }

  TEST_CASE("the save of an engine is reported when the engine that read it was killed") {
    ServerProcess server;
    const Numbers numbers = numbers_from(1, 8);
    const Pipe reads;
    Forked decode([&] {
      auto* const worker = new DirectWorker(server.socket(), "decode");
      worker->device.hold();
      if (!worker->follow(1, numbers, blocks_from(20, 8))) {
        throw std::runtime_error("the load was rejected");
      }
      std::thread([worker, &reads] {
        if (worker->device.wait_held(kHang)) reads.send();
      }).detach();
    });
    DirectWorker prefill(server.socket(), "prefill");
    prefill.device.hold();
    REQUIRE(prefill.engine->start_save(1, numbers, blocks_from(0, 8)));
    REQUIRE(reads.receive());
    prefill.device.allow_all();
    while (prefill.engine->lookup(numbers).value().blocks != 8) std::this_thread::yield();
    CHECK(prefill.engine->mover().take_finished().empty());

    decode.kill();

    const Mover::Finished saved = prefill.engine->next_finished();
    CHECK(error_of(saved) == "");
    CHECK(saved.blocks == 8);
  }

  TEST_CASE("pages from the pool are compared with their checksums, direct ones are not") {
    ServerProcess server;
    Mover::Options verified = patient_mover();
    verified.verify = Mover::Verify::kAll;
    DirectWorker prefill(server.socket(), "prefill", "pd", verified);
    DirectWorker decode(server.socket(), "decode", "pd", verified);
    CHECK(prefill.engine->save(numbers_from(1, 3), blocks_from(0, 3)).blocks == 3);
    prefill.device.hold();
    REQUIRE(prefill.engine->start_save(7, numbers_from(4, 4), blocks_from(3, 4)));
    REQUIRE(decode.finds_offered(numbers_from(1, 7), 4));

    REQUIRE(decode.follow(1, numbers_from(1, 7), blocks_from(20, 7)));

    const Mover::Finished loaded = decode.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.verified == 3);
    CHECK(loaded.corrupt == 0);
    CHECK(loaded.direct_bytes == 4 * DirectWorker::kPage);
    CHECK(decode.engine->wrong_blocks(numbers_from(1, 7), blocks_from(20, 7)) == 0);
  }

  TEST_CASE("a load that follows its prefill is not completed early") {
    Pair f;
    f.decode.device.allow_early_completion();
    f.begin_save(1, numbers_from(1, 4), blocks_from(0, 4));
    f.decode.device.hold();
    REQUIRE(f.decode.follow(1, numbers_from(1, 4), blocks_from(20, 4)));
    REQUIRE(f.decode.device.wait_held(kHang));

    CHECK(f.decode.engine->mover().follow(Device::Queue::kDefault, kHang).empty());

    f.decode.device.allow_all();
    CHECK_FALSE(f.decode.engine->next_finished().error);
  }
}

}  // namespace
}  // namespace pegaflow::testing
