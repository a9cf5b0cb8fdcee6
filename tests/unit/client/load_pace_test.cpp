#include "client/load_pace.h"

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

using std::chrono::milliseconds;

constexpr TimePoint kBegin{std::chrono::seconds(100)};

TEST_SUITE("LoadPace") {
  TEST_CASE("a load without a computing time is not judged") {
    const LoadPace pace;
    CHECK_FALSE(pace.is_judged());
    CHECK_FALSE(pace.computing(7));
    CHECK_FALSE(pace.worth(7, kBegin));
  }

  TEST_CASE("a load with an unknown computing time is cut only if its source is stuck") {
    const LoadPace pace(LoadPace::Computing{}, kBegin);
    CHECK(pace.is_judged());
    CHECK_FALSE(pace.is_compared());
    CHECK_FALSE(pace.worth(7, kBegin));
  }

  TEST_CASE(
      "waiting is of use for as long as computing what is left takes, a tenth more, and 8 ms") {
    const LoadPace pace(LoadPace::Computing{.per_block = milliseconds(2)}, kBegin);
    CHECK(pace.computing(100) == milliseconds(200));
    CHECK(pace.worth(100, kBegin) == milliseconds(228));
    CHECK(pace.worth(10, kBegin + milliseconds(150)) == milliseconds(30));
  }

  TEST_CASE("the delay before computing counts from the load's acceptance") {
    const LoadPace pace(
        LoadPace::Computing{.delay = milliseconds(50), .per_block = milliseconds(2)}, kBegin);
    CHECK(pace.computing(10) == milliseconds(70));
    CHECK(pace.worth(10, kBegin + milliseconds(30)) == milliseconds(40 + 4 + 8));
    CHECK(pace.worth(10, kBegin + milliseconds(80)) == milliseconds(20 + 2 + 8));
  }
}

}  // namespace
}  // namespace pegaflow
