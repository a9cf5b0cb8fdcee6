// The operations that rails receive, and the results of batches, without UCX.
#include "transport/dealer.h"

#include <map>
#include <random>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::rails {
namespace {

constexpr Fabric::PeerId kPeer{1};
constexpr RegionId kOurs{0};
constexpr RegionId kTheirs{7};
constexpr std::uint64_t kRegionBytes = std::uint64_t{64} << 20;
constexpr Dealer::Room kMuch{.operations = 100000,
                             .bytes = UINT64_MAX,
                             .background_operations = 100000,
                             .background_bytes = UINT64_MAX};

struct Bench {
  explicit Bench(std::size_t rails_of_it = 1, std::uint64_t piece_bytes = 1 << 20)
      : rails(rails_of_it), dealer({.rails = rails, .piece_bytes = piece_bytes}, clock) {
    dealer.add_region(kOurs, kRegionBytes);
    dealer.add_peer(kPeer, {{.region = kTheirs, .size_bytes = kRegionBytes}});
  }
  [[nodiscard]] Fabric::Batch batch(std::uint64_t ticket, std::vector<Fabric::Chunk> chunks) const {
    return {.ticket = ticket,
            .peer = kPeer,
            .deadline = clock.now() + std::chrono::seconds(1),
            .chunks = std::move(chunks)};
  }
  [[nodiscard]] static Fabric::Chunk chunk(std::uint64_t from, std::uint64_t to,
                                           std::uint64_t size) {
    return {.remote_region = kTheirs,
            .remote_offset = from,
            .local_region = kOurs,
            .local_offset = to,
            .size_bytes = size};
  }
  std::vector<Operation> deal(const Dealer::Room& room = kMuch, std::size_t rail = 0) {
    return dealer.deal(rail, [&room](Fabric::PeerId) { return room; });
  }
  void end(const Operation& operation, Outcome::Kind kind = Outcome::Kind::kDone,
           Errc error = Errc::kInternal) {
    const Outcome outcome{.operation = operation, .kind = kind, .error = error, .detail = "x"};
    dealer.ended({&outcome, 1});
  }

  std::size_t rails;
  ManualClock clock;
  Dealer dealer;
};

TEST_SUITE("Dealer") {
  TEST_CASE("bytes that are contiguous at both ends are one operation, and no others are") {
    Bench bench;
    bench.dealer.add(bench.batch(
        1, {Bench::chunk(0, 0, 100), Bench::chunk(100, 100, 50), Bench::chunk(150, 500, 50),
            Bench::chunk(300, 550, 50), Bench::chunk(350, 600, 2 << 20)}));

    const std::vector<Operation> dealt = bench.deal();

    REQUIRE(dealt.size() == 5);
    CHECK(dealt[0].size_bytes == 150);
    CHECK(dealt[1].size_bytes == 50);
    CHECK(dealt[2].size_bytes == 50);
    CHECK(dealt[3].size_bytes == 1 << 20);
    CHECK(dealt[4].remote_offset == 350 + (1 << 20));
    CHECK(dealt[4].size_bytes == 1 << 20);
    for (const Operation& operation : dealt) bench.end(operation);
    const auto completions = bench.dealer.take_completions();
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].quiesced);
    for (const auto& result : completions[0].chunks) CHECK_FALSE(result);
  }

  TEST_CASE("a small batch is cut for all rails, but not below the smallest piece") {
    Bench bench(4);
    bench.dealer.add(bench.batch(1, {Bench::chunk(0, 0, 1 << 20)}));
    for (std::size_t rail = 0; rail < 4; ++rail) {
      const auto first = bench.deal(kMuch, rail);
      REQUIRE(first.size() == 1);
      CHECK(first[0].size_bytes == 128 << 10);
    }
    Bench small(4);
    small.dealer.add(small.batch(2, {Bench::chunk(0, 0, 128 << 10)}));
    CHECK(small.deal().at(0).size_bytes == 64 << 10);
  }

  TEST_CASE("a batch that is cancelled or late completes at once, quiesced with its operations") {
    Bench bench;
    for (const bool late : {false, true}) {
      bench.dealer.add(bench.batch(1, {Bench::chunk(0, 0, 3 << 20)}));
      const std::vector<Operation> dealt = bench.deal({.operations = 2, .bytes = 2 << 20});
      REQUIRE(dealt.size() == 2);
      if (late) {
        bench.clock.advance(std::chrono::seconds(2));
        CHECK(bench.dealer.next_time() <= bench.clock.now());
        bench.dealer.on_time(bench.clock.now());
      } else {
        bench.dealer.cancel(1);
      }
      auto completions = bench.dealer.take_completions();
      REQUIRE(completions.size() == 1);
      CHECK_FALSE(completions[0].quiesced);
      CHECK(completions[0].chunks[0] == (late ? Errc::kTimeout : Errc::kCancelled));
      CHECK(bench.deal().empty());

      bench.end(dealt[0]);
      CHECK_FALSE(bench.dealer.has_completions());
      bench.end(dealt[1], Outcome::Kind::kRetry);
      completions = bench.dealer.take_completions();
      REQUIRE(completions.size() == 1);
      CHECK(completions[0].quiesced);
      CHECK(completions[0].chunks.empty());
    }
  }

  TEST_CASE("operations of a broken path go to other rails, three times at most") {
    Bench bench(2);
    bench.dealer.add(bench.batch(1, {Bench::chunk(0, 0, 4096)}));
    for (int tries = 1; tries <= 3; ++tries) {
      const std::vector<Operation> dealt = bench.deal();
      REQUIRE(dealt.size() == 1);
      bench.end(dealt[0], Outcome::Kind::kRetry);
    }
    const auto completions = bench.dealer.take_completions();
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].chunks[0] == Errc::kPeerLost);
  }

  TEST_CASE("a peer is lost when no rail reaches it, or when it is another incarnation") {
    const Error broke{Errc::kPeerLost, "it broke"};
    Bench bench(2);
    bench.dealer.add(bench.batch(1, {Bench::chunk(0, 0, 4096)}));
    CHECK_FALSE(bench.dealer.path_down(kPeer, 0, broke, false));
    CHECK_FALSE(bench.dealer.path_down(kPeer, 0, broke, false));
    bench.dealer.path_up(kPeer, 0);
    CHECK_FALSE(bench.dealer.path_down(kPeer, 1, broke, false));
    CHECK_FALSE(bench.dealer.has_completions());
    CHECK(bench.dealer.path_down(kPeer, 0, broke, false));
    CHECK(bench.dealer.take_completions().at(0).chunks[0] == Errc::kPeerLost);
    bench.dealer.add(bench.batch(2, {Bench::chunk(0, 0, 4096)}));
    CHECK(bench.dealer.take_completions().at(0).chunks[0] == Errc::kPeerLost);

    Bench other(2);
    other.dealer.add(other.batch(1, {Bench::chunk(0, 0, 4096)}));
    CHECK(other.dealer.path_down(kPeer, 1, {Errc::kGone, "another incarnation"}, true));
    CHECK(other.dealer.take_completions().at(0).chunks[0] == Errc::kGone);
  }

  TEST_CASE(
      "the foreground goes first, and the background gets none of the room that it waits for") {
    Bench bench;
    Fabric::Batch background = bench.batch(1, {Bench::chunk(0, 0, 8 << 20)});
    background.priority = Fabric::Priority::kBackground;
    bench.dealer.add(std::move(background));
    bench.dealer.add(bench.batch(2, {Bench::chunk(0, 8 << 20, 2 << 20)}));
    const Dealer::Room room{
        .operations = 1, .bytes = 1 << 20, .background_operations = 1, .background_bytes = 1 << 20};
    for (int i = 0; i < 2; ++i) {
      const auto dealt = bench.deal(room);
      REQUIRE(dealt.size() == 1);
      CHECK_FALSE(dealt[0].background);
    }
    CHECK(bench.deal(room).at(0).background);
    // Its part of the window is full, the window is not.
    CHECK(bench.deal({.operations = 5, .bytes = 5 << 20}).empty());
  }

  TEST_CASE("a slow rail skips operations that the others finish sooner, and takes later ones") {
    Bench bench(2);
    const auto pass = [&bench](std::size_t rail, Duration each) {
      for (const Operation& operation : bench.deal({.operations = 1, .bytes = 1 << 20}, rail)) {
        bench.clock.advance(each);
        bench.end(operation);
      }
    };
    // The measured pace: the first rail reads 1 MiB in 0.1 ms, the second in 1 ms.
    bench.dealer.add(bench.batch(1, {Bench::chunk(0, 0, 64 << 20)}));
    for (int i = 0; i < 10; ++i) pass(0, std::chrono::microseconds(100));
    for (int i = 0; i < 2; ++i) pass(1, std::chrono::milliseconds(1));
    bench.dealer.cancel(1);
    (void)bench.dealer.take_completions();

    // The other rail reads 9 MiB in 0.9 ms alone, and 18 MiB in 1.8 ms.
    bench.dealer.add(bench.batch(2, {Bench::chunk(0, 0, 9 << 20)}));
    CHECK(bench.deal(kMuch, 1).empty());
    bench.dealer.add(bench.batch(3, {Bench::chunk(16 << 20, 16 << 20, 9 << 20)}));
    const std::vector<Operation> ahead = bench.deal(kMuch, 1);
    REQUIRE(ahead.size() == 1);
    CHECK(ahead[0].remote_offset == 16 << 20);

    // Alone it takes all; after a long pause its pace is unknown.
    const Error broke{Errc::kPeerLost, "it broke"};
    CHECK_FALSE(bench.dealer.path_down(kPeer, 0, broke, false));
    CHECK(bench.deal(kMuch, 1).size() == 17);
    bench.dealer.path_up(kPeer, 0);
    Bench rested(2);
    rested.dealer.add(rested.batch(1, {Bench::chunk(0, 0, 1 << 20)}));
    const std::vector<Operation> first = rested.deal(kMuch, 1);
    REQUIRE(first.size() == 1);
    rested.clock.advance(std::chrono::milliseconds(1));
    rested.end(first[0]);
    for (const Operation& operation : rested.deal(kMuch, 1)) rested.end(operation);
    CHECK(rested.dealer.has_completions());
    rested.clock.advance(std::chrono::seconds(1));
    rested.dealer.add(rested.batch(2, {Bench::chunk(0, 0, 64 << 20)}));
    CHECK(rested.deal(kMuch, 1).size() == 1);
  }

  TEST_CASE("whatever the outcomes, each byte is requested as often as necessary, and no more") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 200; ++round) {
      Bench bench(1 + random() % 4, 4096 * (1 + random() % 20));
      std::vector<Fabric::Chunk> chunks;
      std::uint64_t at = 0;
      for (std::uint64_t i = 0; i < 1 + random() % 40; ++i) {
        const std::uint64_t size = 1 + random() % 100000;
        chunks.push_back(Bench::chunk(at, at, size));
        at += size + (random() % 2 == 0 ? 0 : 10);
      }
      bench.dealer.add(bench.batch(1, chunks));
      std::map<std::uint64_t, std::uint64_t> brought;  // Local begin and size.
      std::vector<Operation> open;
      while (!bench.dealer.has_completions()) {
        const auto dealt =
            bench.deal({.operations = 1 + random() % 3, .bytes = 10 << 20}, random() % bench.rails);
        bench.clock.advance(std::chrono::microseconds(random() % 50));
        open.insert(open.end(), dealt.begin(), dealt.end());
        // A rail may leave it to a faster one; but not all of them.
        for (std::size_t rail = 0; open.empty() && rail < bench.rails; ++rail)
          open = bench.deal(kMuch, rail);
        if (bench.dealer.has_completions()) break;
        REQUIRE_FALSE(open.empty());
        const std::size_t which = random() % open.size();
        const Operation operation = open[which];
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
        if (operation.tries < 2 && random() % 4 == 0) {
          bench.end(operation, Outcome::Kind::kRetry);
        } else {
          REQUIRE(brought.emplace(operation.local_offset, operation.size_bytes).second);
          CHECK(operation.remote_offset == operation.local_offset);
          bench.end(operation);
        }
      }
      CHECK(open.empty());
      const auto completions = bench.dealer.take_completions();
      for (const auto& result : completions.at(0).chunks) CHECK_FALSE(result);
      for (const Fabric::Chunk& chunk : chunks) {
        std::uint64_t next = chunk.local_offset;
        while (next < chunk.local_offset + chunk.size_bytes) {
          const auto part = std::prev(brought.upper_bound(next));
          REQUIRE(part->first + part->second > next);
          next = part->first + part->second;
        }
      }
    }
  }
}

}  // namespace
}  // namespace pegaflow::rails
