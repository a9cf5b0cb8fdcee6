// How long loads wait for blocks in flight, and why they stop.
#include <algorithm>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "server/fetches/fetches.h"
#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

/// Waiting loads of one block each, for an engine that computes a block in `computing`.
std::vector<std::shared_ptr<Fixture::Question>> loads_of_a_block(Fixture& f,
                                                                 const std::vector<Id128>& tokens,
                                                                 Duration computing) {
  std::vector<std::shared_ptr<Fixture::Question>> loads;
  for (const Id128& token : tokens) {
    REQUIRE(f.claim(token, keys(token.low, 1)) == 1);
    loads.push_back(f.open(token, 1, milliseconds(1000), computing));
  }
  return loads;
}

TEST_SUITE("Fetches::open") {
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

  TEST_CASE("answers grow from the first block of a load, and shrink to its last one") {
    constexpr std::uint64_t kLarge = server::Fetches::kLeastGathered;
    Fixture f(256, {.batch_bytes = kLarge, .batches_per_owner = 2}, kLarge);
    REQUIRE(f.claim(kOne, keys(1, 14)) == 14);
    std::vector<std::size_t> answers;
    for (std::size_t first = 0; first < 14; first += answers.back()) {
      const auto waiting = f.open_rest(kOne, first, 14 - first, std::nullopt);
      while (!f.is_answered(waiting)) f.complete();
      answers.push_back(waiting->answer->value().opened.slots.size());
      CHECK(waiting->answer->value().opened.coming == 14 - first - answers.back());
    }
    CHECK(answers == std::vector<std::size_t>{1, 1, 2, 4, 3, 2, 1});
  }

  TEST_CASE("small blocks are gathered until they are worth an answer") {
    Fixture f;
    f.open_first_of_six();
    const auto waiting = f.open_rest(kOne, 1, 5, std::nullopt);
    for (int i = 0; i < 4; ++i) {
      f.complete();
      CHECK_FALSE(f.is_answered(waiting));
    }
    f.complete();
    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 5);
  }

  TEST_CASE("a load that has waited long enough receives each block when it arrives") {
    Fixture f;
    f.open_first_of_six();
    const auto waiting = f.open_rest(kOne, 1, 5, std::nullopt);
    f.clock.advance(server::Fetches::kGatherTime);
    CHECK_FALSE(f.is_answered(waiting));

    f.complete();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 1);
    for (int i = 0; i < 4; ++i) f.complete();
  }

  TEST_CASE("a load gathers for a limited time") {
    // The timer is a real one, and looks again for as long as the clock of the test stands.
    constexpr Duration kLeft = milliseconds(3);
    Fixture f;
    f.open_first_of_six();
    const auto waiting = f.open_rest(kOne, 1, 5, std::nullopt);
    f.clock.advance(server::Fetches::kGatherTime - kLeft);
    f.complete();
    f.complete();
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(kLeft);
    f.look_again(5);

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 2);
    for (int i = 0; i < 3; ++i) f.complete();
  }

  TEST_CASE("a load gathers no longer than its blocks are of use") {
    Fixture f;
    f.open_first_of_six();
    const auto waiting = f.open_rest(kOne, 1, 5, milliseconds(1));
    f.complete();
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(1));
    f.look_again(5);

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 1);
    CHECK(waiting->answer->value().late == Late::kNo);
    for (int i = 0; i < 4; ++i) f.complete();
  }

  TEST_CASE("a load gathers a limited number of bytes") {
    constexpr std::uint64_t kLarge = server::Fetches::kGatherBytes / 2;
    Fixture f(256, {.batch_bytes = kLarge, .batches_per_owner = 2}, kLarge);
    REQUIRE(f.claim(kOne, keys(1, 12)) == 12);
    for (int i = 0; i < 4; ++i) f.complete();
    const auto waiting = f.open_rest(kOne, 4, 8, std::nullopt);
    f.complete();
    CHECK_FALSE(f.is_answered(waiting));

    f.complete();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 2);
    for (int i = 0; i < 6; ++i) f.complete();
  }

  TEST_CASE("a load that gathers receives what has arrived when the next block will not") {
    Fixture f;
    f.open_first_of_six();
    const auto waiting = f.open_rest(kOne, 1, 5, std::nullopt);
    f.complete();
    CHECK_FALSE(f.is_answered(waiting));

    f.complete(Errc::kPeerLost);

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().opened.slots.size() == 1);
    while (!f.fabric.batches.empty()) f.complete();
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

  TEST_CASE("a load whose time is over is slow, also where the rate is unknown") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto waiting = f.open(kOne, 4, milliseconds(10));

    f.clock.advance(milliseconds(10));
    f.look_again();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kSlow);
  }

  TEST_CASE("an owner is stuck half a batch's time and 6 ms after the next batch was due") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto waiting = f.open(kOne, 4, server::Fetches::Wait::kForever);
    const Duration allowed =
        (milliseconds(10) + cluster::SourceRate::kLatency) * 3 / 2 + milliseconds(6);

    f.clock.advance(allowed - milliseconds(1));
    f.look_again();
    CHECK_FALSE(f.is_answered(waiting));
    f.clock.advance(milliseconds(1));
    f.look_again();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kStuck);
    // No other claim waits for it, but one without a time to compare uses it all the same.
    CHECK(f.claim(kTwo, keys(2, 4), milliseconds(1000)).blocks == 0);
    CHECK(f.claim(kTwo, keys(2, 4)) == 4);
  }

  TEST_CASE("of loads that wait for a stuck owner one ends, and the others once that is computed") {
    Fixture f;
    f.measure();
    const auto loads = loads_of_a_block(f, {kOne, kTwo, kThree}, milliseconds(40));
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

  TEST_CASE("an owner that responds again keeps the loads that had not ended") {
    Fixture f;
    f.measure();
    const auto loads = loads_of_a_block(f, {kOne, kTwo}, milliseconds(40));
    f.clock.advance(milliseconds(30));
    f.look_again();
    REQUIRE(f.is_answered(loads[0]));
    CHECK_FALSE(f.is_answered(loads[1]));

    f.complete();
    f.complete();

    REQUIRE(f.is_answered(loads[1]));
    CHECK(loads[1]->answer->value().opened.slots.size() == 1);
  }

  TEST_CASE("an owner that pauses again ends a load only when the former one is computed") {
    Fixture f;
    f.measure();
    const auto loads = loads_of_a_block(f, {kOne, kTwo, kThree}, milliseconds(100));
    f.clock.advance(milliseconds(30));
    f.look_again();
    REQUIRE(f.is_answered(loads[0]));
    f.complete();  // The batch of the load that has ended.

    f.clock.advance(milliseconds(60));
    f.look_again();
    CHECK_FALSE(f.is_answered(loads[1]));
    f.clock.advance(milliseconds(40));
    f.look_again();

    CHECK(f.is_answered(loads[1]));
    CHECK_FALSE(f.is_answered(loads[2]));
  }

  TEST_CASE("an owner that delivers blocks and does not confirm their lease is stuck, too") {
    Fixture f;
    f.measure();
    f.peers.lenders.front().is_confirming = false;
    REQUIRE(f.claim(kOne, keys(1, 1)) == 1);
    const auto waiting = f.open(kOne, 1, server::Fetches::Wait::kForever);
    f.complete();
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(9));
    f.look_again();

    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kStuck);
  }

  TEST_CASE(
      "a load whose blocks are requested from another owner ends when that one is stuck, too") {
    Fixture f;
    f.peers.lenders.resize(2);
    REQUIRE(f.claim(kOne, keys(1, 1)) == 1);
    const auto waiting = f.open(kOne, 1, server::Fetches::Wait::kForever);
    CHECK_FALSE(f.is_answered(waiting));
    f.complete(Errc::kPeerLost);
    REQUIRE(f.fabric.batches.size() == 1);
    CHECK_FALSE(f.is_answered(waiting));

    f.clock.advance(milliseconds(100));
    REQUIRE(f.is_answered_soon(waiting));
    CHECK(waiting->answer->value().late == Late::kStuck);
  }

  TEST_CASE("a load that probes a slow node is not judged by its old rate") {
    Fixture f;
    f.measure();
    f.clock.advance(cluster::SourceRate::kBelieved);
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
    const auto waiting = f.open_rest(kOne, 6, 7, server::Fetches::Wait::kForever);

    f.clock.advance(milliseconds(120));
    f.look_again(6);
    CHECK_FALSE(f.is_answered(waiting));
    f.complete();
    REQUIRE(f.is_answered(waiting));
    CHECK(waiting->answer->value().late == Late::kNo);
    f.complete();
    f.check_rest();
  }

  TEST_CASE("a load that is not judged waits for an owner that is stuck") {
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
}

}  // namespace
}  // namespace pegaflow::testing
