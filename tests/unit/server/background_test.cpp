#include "server/cache/background.h"

#include <doctest/doctest.h>

#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("Background") {
  TEST_CASE("a reset that another node reports frees its blocks without a further request") {
    Fixture f;
    f.measure();
    REQUIRE(f.service->stats().store.sealed == 4);
    const auto wants = f.service->wants(f.engine);
    REQUIRE(wants);

    f.service->epochs().learn(wants->space, {.counter = 1, .id = 7});

    CHECK(f.service->has_work());
    kj::Timer& timer = f.io.provider->getTimer();
    for (int i = 0; i < 100 && f.service->has_work(); ++i) {
      server::next_turn(timer).wait(f.io.waitScope);
    }
    CHECK(f.service->stats().store.sealed == 0);
    CHECK_FALSE(f.service->has_work());
  }
}

}  // namespace
}  // namespace pegaflow::testing
