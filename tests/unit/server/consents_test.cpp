#include "server/direct/consents.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::server {
namespace {

using std::chrono::milliseconds;

using Answer = Consents::Answer;

constexpr SourceId kNone{};
constexpr SourceId kSource{1};
constexpr SourceId kFirst{2};
constexpr SourceId kSecond{3};
constexpr SourceId kThird{4};

struct Fixture {
  Fixture() {
    consents.joined(kSource, true);
    for (const SourceId reader : {kFirst, kSecond, kThird}) consents.joined(reader, false);
    consents.permitted(kSource, kNone, kNone, now);
  }
  /// The source does what it is asked for.
  std::optional<SourceId> turn() {
    const auto next = consents.next(kSource, now);
    if (next) consents.permitted(kSource, *next, kNone, now);
    return next;
  }

  Consents consents;
  TimePoint now{std::chrono::hours(1)};
};

TEST_SUITE("Consents") {
  TEST_CASE("a worker reads once the source has permitted it") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.consents.take_news());
    CHECK(f.consents.next(kSource, f.now) == kFirst);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    f.consents.permitted(kSource, kFirst, kNone, f.now);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kTurn);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kTurn);
    CHECK_FALSE(f.turn());
  }

  TEST_CASE("a worker that waits no longer gets no turn") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kWait);
    CHECK(f.consents.take_news());
    f.consents.gave_up(kThird);
    CHECK_FALSE(f.consents.take_news());
    f.consents.gave_up(kFirst);
    CHECK(f.consents.take_news());
    CHECK(f.turn() == kSecond);
  }

  TEST_CASE("a turn passes on behind the last read") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.turn() == kFirst);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kTurn);
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kWait);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);  // Another one waits.
    CHECK_FALSE(f.turn());
    (void)f.consents.take_news();
    f.consents.ended(kSource);
    CHECK(f.consents.take_news());
    CHECK(f.turn() == kSecond);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kTurn);
  }

  TEST_CASE("a worker has a time to begin in its turn although others wait") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.turn() == kFirst);
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kWait);
    CHECK_FALSE(f.turn());
    CHECK(f.consents.look_again(kSource) == f.now + Consents::kTurn);
    SUBCASE("which it uses") {
      CHECK(f.consents.begin(kSource, kFirst) == Answer::kTurn);
      f.consents.ended(kSource);
      CHECK(f.turn() == kSecond);
    }
    SUBCASE("which it lets pass") {
      f.now += Consents::kTurn;
      CHECK(f.turn() == kSecond);
    }
    SUBCASE("or leaves in") {
      f.consents.left(kFirst);
      CHECK(f.turn() == kSecond);
    }
  }

  TEST_CASE("a source permits no worker once its reader has left") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.turn() == kFirst);
    f.consents.left(kFirst);
    CHECK(f.turn() == kNone);
    CHECK_FALSE(f.turn());
  }

  TEST_CASE("a worker that left while it waited, or while it was asked for, gets no turn") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    f.consents.left(kFirst);
    CHECK_FALSE(f.turn());
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kWait);
    CHECK(f.consents.next(kSource, f.now) == kSecond);
    f.consents.left(kSecond);
    f.consents.permitted(kSource, kSecond, kNone, f.now);
    CHECK(f.turn() == kNone);
  }

  TEST_CASE("a source that repeats its last call is asked again when the worker asks again") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.consents.next(kSource, f.now) == kFirst);
    f.consents.permitted(kSource, kNone, kNone, f.now);
    CHECK_FALSE(f.turn());
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.turn() == kFirst);
  }

  TEST_CASE("a worker that a source cannot permit tries itself, and gets no turn there again") {
    Fixture f;
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kWait);
    CHECK(f.consents.next(kSource, f.now) == kFirst);
    f.consents.permitted(kSource, kNone, kFirst, f.now);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kRefused);
    CHECK(f.turn() == kSecond);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kRefused);
    CHECK(f.consents.begin(kSource, kSecond) == Answer::kTurn);
    SUBCASE("until it has left") {
      f.consents.left(kFirst);
      f.consents.joined(kFirst, false);
      CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    }
    SUBCASE("but one that was not asked for is not refused") {
      f.consents.permitted(kSource, kSecond, kThird, f.now);
      CHECK(f.consents.begin(kSource, kThird) == Answer::kWait);
    }
  }

  TEST_CASE("workers that ask again at once behind each read all get their turns") {
    Fixture f;
    std::map<SourceId, int> turns;
    const std::array<SourceId, 3> readers{kFirst, kSecond, kThird};
    for (const SourceId reader : readers) CHECK(f.consents.begin(kSource, reader) == Answer::kWait);
    for (int i = 0; i < 300; ++i) {
      const auto asked = f.consents.next(kSource, f.now);
      REQUIRE(asked);
      // The one before asks again while the source is being asked.
      for (const SourceId reader : readers) {
        if (turns[reader] != 0) CHECK(f.consents.begin(kSource, reader) == Answer::kWait);
      }
      f.consents.permitted(kSource, *asked, kNone, f.now);
      REQUIRE(f.consents.begin(kSource, *asked) == Answer::kTurn);
      ++turns[*asked];
      f.consents.ended(kSource);
    }
    for (const SourceId reader : readers) CHECK(turns[reader] == 100);
  }

  TEST_CASE("only the last wait of a source counts") {
    Fixture f;
    const auto former = f.consents.permitted(kSource, kNone, kNone, f.now);
    const auto later = f.consents.permitted(kSource, kNone, kNone, f.now);
    CHECK_FALSE(f.consents.is_waiting(kSource, former));
    CHECK(f.consents.is_waiting(kSource, later));
    f.consents.left(kSource);
    CHECK_FALSE(f.consents.is_waiting(kSource, later));
  }

  TEST_CASE("memory of a source that has left, or that is unknown, is not read") {
    Fixture f;
    CHECK(f.consents.begin(SourceId{77}, kFirst) == Answer::kWait);
    f.consents.left(kSource);
    CHECK(f.consents.begin(kSource, kFirst) == Answer::kWait);
    f.consents.ended(kSource);
  }

  TEST_CASE("in any order of calls only the permitted worker reads, and each gets its turn") {
    std::mt19937 random(pegaflow::testing::seed());
    Fixture f;
    std::vector<SourceId> readers{kFirst, kSecond, kThird};
    std::uint64_t last = 10;
    SourceId kernel = kNone;  // Whom the source's process permits.
    std::optional<SourceId> asked;
    std::map<SourceId, std::size_t> reads;
    std::map<SourceId, std::size_t> denied;  // Looks in a row.
    for (int step = 0; step < 50000; ++step) {
      const SourceId one = readers[random() % readers.size()];
      switch (random() % 8) {
        case 0:
        case 1:
        case 2:
          if (const Answer answer = f.consents.begin(kSource, one); answer == Answer::kRefused) {
            denied[one] = 0;
          } else if (answer == Answer::kTurn) {
            REQUIRE(kernel == one);
            REQUIRE_FALSE(asked);
            ++reads[one];
            denied[one] = 0;
          } else {
            ++denied[one];
          }
          break;
        case 3:
          if (reads[one] != 0) {
            f.consents.ended(kSource);
            --reads[one];
          }
          break;
        case 4:
        case 5:
          if (asked) {
            // Mostly the source does it; sometimes it cannot, or repeats its last call.
            const auto how = random() % 16;
            const SourceId said = how == 0 ? kNone : how == 1 ? kernel : *asked;
            kernel = said;
            const SourceId refused = how == 0 && random() % 4 == 0 ? *asked : kNone;
            f.consents.permitted(kSource, said, refused, f.now);
            asked.reset();
          } else if (const auto next = f.consents.next(kSource, f.now)) {
            for (const auto& [reader, count] : reads) REQUIRE(count == 0);
            asked = next;
          }
          break;
        case 6:
          f.now += milliseconds(random() % 20);
          break;
        default:
          if (random() % 50 != 0) break;
          for (; reads[one] != 0; --reads[one]) f.consents.ended(kSource);
          f.consents.left(one);
          denied.erase(one);
          for (SourceId& each : readers) {
            if (each == one) each = SourceId{++last};
          }
          f.consents.joined(SourceId{last}, false);
      }
      for (const auto& [reader, count] : denied) REQUIRE(count < 500);
    }
  }
}

}  // namespace
}  // namespace pegaflow::server
