// Blocks that an engine reads out of the pool of another node into its own memory.
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/integration/far_worker.h"
#include "tests/support/forked.h"
#include "tests/support/nodes.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kPage = FarWorker::kPage;

/// A node that has blocks, with an engine that saves them, and one whose engine loads them.
struct Pools {
  explicit Pools(const std::string& direct_pool = "force", const std::string& pool_size = "64mb",
                 const std::string& group = "pools", Mover::Options mover = patient_mover(),
                 std::size_t piece_bytes = kPage / 2, Duration coming_patience = kHang)
      : owner(node_options(at[0], at, {}, pool_size)),
        here(node_options(at[1], at, {"--direct-pool", direct_pool}, pool_size)),
        writer(owner.socket(), "writer", group, true, patient_mover(), piece_bytes),
        reader(here.socket(), "reader", group, true,
               with_patience(std::move(mover), coming_patience), piece_bytes) {
    REQUIRE(sees(here, at[0]));
    REQUIRE(sees(owner, at[1]));
  }

  static Mover::Options with_patience(Mover::Options mover, Duration coming_patience = kHang) {
    mover.coming_patience = coming_patience;
    return mover;
  }

  void save(const Numbers& numbers) {
    const Mover::Finished saved = writer.engine->save(numbers, blocks_from(0, numbers.size()));
    REQUIRE(error_of(saved) == "");
  }

  /// Claims all of the blocks.
  [[nodiscard]] CacheSession::Answer claim(FarWorker& worker, const Numbers& numbers) const {
    CacheSession::Answer claimed = worker.engine->claim(numbers).value();
    REQUIRE(claimed.blocks == numbers.size());
    return claimed;
  }

  /// Claims, loads and checks all of them, and ends the claim.
  Mover::Finished load(FarWorker& worker, const Numbers& numbers, std::uint32_t to = 0) const {
    const CacheSession::Answer claimed = claim(worker, numbers);
    Mover::Finished loaded = worker.engine->load(claimed.token, blocks_from(to, numbers.size()));
    CHECK(worker.engine->wrong_blocks(numbers, blocks_from(to, numbers.size()),
                                      loaded.failed_blocks) == 0);
    worker.engine->session().unclaim(claimed.token);
    return loaded;
  }

  /// Begins to load blocks into blocks 0, 1, ... of the reader, whose reads wait.
  CacheSession::Answer begin_held_load(std::uint64_t load, const Numbers& numbers) {
    CacheSession::Answer claimed = claim(reader, numbers);
    reader.how.is_held = true;
    REQUIRE(reader.engine->mover().load(load, claimed.token, 0, blocks_from(0, numbers.size())));
    REQUIRE(here.metric_becomes("pegaflow_direct_pool_reads", 1));
    return claimed;
  }

  void check_nothing_is_left() const {
    for (const char* const name :
         {"pegaflow_direct_pool_claims", "pegaflow_direct_pool_reads", "pegaflow_claims",
          "pegaflow_pins", "pegaflow_fetch_bytes", "pegaflow_fetch_batches"}) {
      CHECK_MESSAGE(here.metric_becomes(name, 0), name);
    }
    CHECK(owner.metric_becomes("pegaflow_leases", 0));
  }

  std::vector<std::string> at = node_addresses(2);
  ServerProcess owner;
  ServerProcess here;
  FarWorker writer;
  FarWorker reader;
};

double pool_blocks(const ServerProcess& server, const std::string& result) {
  return server.metric("pegaflow_direct_pool_blocks_total{result=\"" + result + "\"}");
}

TEST_SUITE("reads of other nodes' pools") {
  TEST_CASE("an engine reads blocks out of another node's pool into its own memory") {
    Pools f;
    const Numbers numbers = numbers_from(1, 40);
    f.save(numbers);

    const Mover::Finished loaded = f.load(f.reader, numbers, 20);

    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 40);
    CHECK(loaded.bytes == 40 * kPage);
    CHECK(loaded.direct_bytes == 40 * kPage);
    CHECK(f.reader.memory.gaps_are_whole());
    CHECK(pool_blocks(f.here, "loaded") == 40);
    CHECK(f.here.metric("pegaflow_direct_pool_bytes_total") == 40 * kPage);
    CHECK(f.here.metric("pegaflow_load_bytes_total") == 40 * kPage);
    // No byte came into this node's pool.
    CHECK(f.here.metric("pegaflow_fetch_bytes_total") == 0);
    f.check_nothing_is_left();
  }

  TEST_CASE("blocks that a second engine wants come into the pool, and stay there") {
    constexpr std::size_t kPiece = std::size_t{32} << 10;
    Pools f("auto", "64mb", "pools", patient_mover(), kPiece);
    f.save(numbers_from(1, 8));
    CHECK(f.load(f.reader, numbers_from(1, 8)).direct_bytes == 0);  // Measures the rate.
    const Numbers numbers = numbers_from(100, 20);
    f.save(numbers);
    CHECK(f.load(f.reader, numbers).direct_bytes == 20 * 2 * kPiece);

    FarWorker second(f.here.socket(), "second", "pools", true,
                     Pools::with_patience(patient_mover()), kPiece);
    CHECK(f.load(second, numbers).direct_bytes == 0);

    CHECK(f.here.metric("pegaflow_fetch_bytes_total") == 28 * 2 * kPiece);
    CHECK(f.load(f.reader, numbers).direct_bytes == 0);
    CHECK(f.here.metric("pegaflow_fetch_bytes_total") == 28 * 2 * kPiece);
    f.check_nothing_is_left();
  }

  TEST_CASE("a load takes its first blocks from its own node's pool") {
    Pools f;
    const Numbers numbers = numbers_from(1, 30);
    const Numbers head = numbers_from(1, 10);
    REQUIRE(f.reader.engine->save(head, blocks_from(0, 10)).blocks == 10);
    f.save(numbers);

    const Mover::Finished loaded = f.load(f.reader, numbers, 15);

    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 30);
    CHECK(loaded.direct_bytes == 20 * kPage);
    f.check_nothing_is_left();
  }

  TEST_CASE(
      "a load whose card reads nothing gets its blocks through the pool, and the next one "
      "does not try") {
    Pools f;
    const Numbers numbers = numbers_from(1, 20);
    f.save(numbers);
    f.reader.how.is_refused = true;

    const Mover::Finished loaded = f.load(f.reader, numbers, 20);

    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 20);
    CHECK(loaded.direct_bytes == 0);
    CHECK(pool_blocks(f.here, "through_pool") == 20);
    CHECK(f.here.metric("pegaflow_fetch_bytes_total") == 20 * kPage);

    f.save(numbers_from(100, 5));
    CHECK(f.load(f.reader, numbers_from(100, 5)).direct_bytes == 0);
    CHECK(pool_blocks(f.here, "through_pool") == 20);
    f.check_nothing_is_left();
  }

  TEST_CASE("blocks of a reset are not counted although they have been read") {
    Pools f;
    const Numbers numbers = numbers_from(1, 8);
    f.save(numbers);
    const CacheSession::Answer claimed = f.begin_held_load(7, numbers);
    CacheSession& session = f.writer.engine->session();
    REQUIRE(session.take_reset(session.ask_reset(kHang).value(), kHang));
    f.reader.how.is_held = false;

    const Mover::Finished loaded = f.reader.engine->next_finished();

    CHECK(loaded.blocks == 0);
    CHECK(loaded.direct_bytes == 0);
    CHECK(loaded.failed_blocks == blocks_from(0, 8));
    CHECK(pool_blocks(f.here, "unconfirmed") == 8);
    f.reader.engine->session().unclaim(claimed.token);
    f.check_nothing_is_left();
  }

  TEST_CASE("a load that is cancelled while it reads leaves nothing at either node") {
    Pools f;
    const Numbers numbers = numbers_from(1, 8);
    f.save(numbers);
    const CacheSession::Answer claimed = f.begin_held_load(7, numbers);
    f.reader.engine->mover().cancel_load(7);
    f.reader.engine->session().unclaim(claimed.token);
    f.reader.how.is_held = false;
    const Mover::Finished loaded = f.reader.engine->next_finished();
    CHECK(loaded.blocks + loaded.failed_blocks.size() == 8);
    CHECK(f.reader.engine->wrong_blocks(numbers, blocks_from(0, 8), loaded.failed_blocks) == 0);
    f.check_nothing_is_left();
  }

  TEST_CASE("a claim that is never loaded leaves nothing at either node") {
    Pools f;
    f.save(numbers_from(1, 8));
    const CacheSession::Answer claimed = f.claim(f.reader, numbers_from(1, 8));
    CHECK(f.here.metric("pegaflow_direct_pool_claims") == 1);
    CHECK(f.owner.metric("pegaflow_leases") == 1);
    f.reader.engine->session().unclaim(claimed.token);
    f.check_nothing_is_left();

    (void)f.claim(f.reader, numbers_from(1, 8));
    f.reader.engine->close_session();
    f.check_nothing_is_left();
  }

  TEST_CASE("the owner is killed while its pool is read: the load names what did not arrive") {
    Pools f;
    const Numbers numbers = numbers_from(1, 8);
    f.save(numbers);
    const CacheSession::Answer claimed = f.begin_held_load(7, numbers);
    f.owner.kill();
    f.reader.how.is_held = false;

    const Mover::Finished loaded = f.reader.engine->next_finished();

    CHECK(loaded.blocks == 0);
    CHECK(loaded.failed_blocks == blocks_from(0, 8));
    f.reader.engine->session().unclaim(claimed.token);
    CHECK(f.here.metric_becomes("pegaflow_direct_pool_claims", 0));
    CHECK(f.here.metric_becomes("pegaflow_direct_pool_reads", 0));
    // The engine goes on with its own node.
    CHECK(f.reader.engine->save(numbers_from(50, 4), blocks_from(0, 4)).blocks == 4);
  }

  TEST_CASE("an engine that is killed while it reads leaves nothing at either node") {
    Pools f;
    const Numbers numbers = numbers_from(1, 8);
    f.save(numbers);
    auto killed = std::make_unique<Forked>([&] {
      auto* const worker = new FarWorker(f.here.socket(), "killed", "pools", true,
                                         Pools::with_patience(patient_mover()));
      const auto claimed = worker->engine->claim(numbers).value();
      if (claimed.blocks != 8) throw std::runtime_error("the claim is short");
      worker->how.is_held = true;
      if (!worker->engine->mover().load(7, claimed.token, 0, blocks_from(0, 8))) {
        throw std::runtime_error("the load was rejected");
      }
    });
    REQUIRE(f.here.metric_becomes("pegaflow_direct_pool_reads", 1));
    killed.reset();
    f.check_nothing_is_left();
  }

  TEST_CASE("a load whose first blocks take long still gets the others through the pool") {
    Mover::Options mover = patient_mover();
    Pools f("force", "64mb", "pools", std::move(mover), kPage / 2, milliseconds(500));
    const Numbers numbers = numbers_from(1, 20);
    REQUIRE(f.reader.engine->save(numbers_from(1, 4), blocks_from(0, 4)).blocks == 4);
    f.save(numbers);
    f.reader.how.is_refused = true;
    const CacheSession::Answer claimed = f.claim(f.reader, numbers);
    f.reader.device->hold();
    REQUIRE(f.reader.engine->mover().load(7, claimed.token, 0, blocks_from(20, 20)));
    // A load of blocks that no engine has ends after a longer time than the first one waits.
    REQUIRE(f.reader.follow(8, numbers_from(900, 1), blocks_from(50, 1), {}, milliseconds(700)));
    const Mover::Finished late = f.reader.engine->next_finished();
    REQUIRE(late.id == 8);
    CHECK(code_of(late) == Errc::kTimeout);
    f.reader.device->allow_all();
    const Mover::Finished loaded = f.reader.engine->next_finished();
    CHECK(error_of(loaded) == "");
    CHECK(loaded.blocks == 20);
    f.reader.engine->session().unclaim(claimed.token);
    f.check_nothing_is_left();
  }

  TEST_CASE("pages are compared with their checksums: then all blocks come through the pool") {
    Mover::Options mover = patient_mover();
    mover.verify = PageVerification::kAll;
    Pools f("force", "64mb", "pools", std::move(mover));
    const Numbers numbers = numbers_from(1, 6);
    f.save(numbers);
    const Mover::Finished loaded = f.load(f.reader, numbers);
    CHECK(loaded.blocks == 6);
    CHECK(loaded.direct_bytes == 0);
    f.check_nothing_is_left();
  }

  TEST_CASE(
      "under evictions, resets, cancellations and lost connections blocks are right or named") {
    // The owner's pool has room for 64 blocks: it evicts all the time.
    Pools f("force", "1mb");
    std::minstd_rand random(seed());
    std::size_t direct = 0;
    std::size_t failed = 0;
    std::vector<std::uint64_t> firsts;
    for (std::uint64_t round = 0; round < direct_rounds(120); ++round) {
      const std::size_t count = 1 + random() % 24;
      const std::uint64_t first = 1 + round * 100;
      if (random() % 4 != 0 || firsts.empty()) {
        const Mover::Finished saved =
            f.writer.engine->save(numbers_from(first, count), blocks_from(0, count));
        if (!saved.error) firsts.push_back(first);
      }
      if (firsts.empty()) continue;
      const std::uint64_t wanted =
          firsts[firsts.size() - 1 - random() % std::min<std::size_t>(3, firsts.size())];
      const Numbers numbers = numbers_from(wanted, count);
      const auto claimed = f.reader.engine->claim(numbers);
      if (!claimed || claimed->blocks == 0) continue;
      const std::size_t blocks = claimed->blocks;
      const Blocks to = blocks_from(static_cast<std::uint32_t>(random() % 40), blocks);
      for (const std::uint32_t block : to) f.reader.memory.fill(block, 0xBAD);
      f.reader.how.is_held = random() % 3 == 0;
      if (const auto accepted = f.reader.engine->mover().load(round, claimed->token, 0, to);
          !accepted) {
        // The engine learns of a connection that the round before has cut.
        REQUIRE(accepted.error().code == Errc::kPeerLost);
        f.reader.engine->wait_ready();
        continue;
      }
      switch (random() % 8) {
        case 0:
          f.reader.engine->mover().cancel_load(round);
          break;
        case 1:
          f.reader.engine->session().unclaim(claimed->token);
          break;
        case 2: {
          CacheSession& session = f.writer.engine->session();
          REQUIRE(session.take_reset(session.ask_reset(kHang).value(), kHang));
          firsts.clear();
          break;
        }
        case 4:
          CHECK(cut_connections(f.here.socket()) != 0);
          break;
        case 3:
          f.writer.engine->save(numbers_from(1000000 + round * 100, 24), blocks_from(30, 24));
          break;
        default:
          break;
      }
      f.reader.how.is_held = false;
      const Mover::Finished loaded = f.reader.engine->next_finished();
      f.reader.engine->wait_ready();
      CHECK(loaded.blocks + loaded.failed_blocks.size() == blocks);
      REQUIRE(f.reader.engine->wrong_blocks(numbers_from(wanted, blocks), to,
                                            loaded.failed_blocks) == 0);
      direct += loaded.direct_bytes / kPage;
      failed += loaded.failed_blocks.size();
      f.reader.engine->session().unclaim(claimed->token);
    }
    MESSAGE("seed ", seed(), ": ", direct, " blocks were read directly, ", failed, " failed");
    CHECK(direct > 0);
    f.check_nothing_is_left();
  }
}

}  // namespace
}  // namespace pegaflow::testing
