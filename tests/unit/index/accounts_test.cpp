#include "index/placement/accounts.h"

#include <map>
#include <random>
#include <utility>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

constexpr double kRate = 1000;

Accounts::Request request(std::uint64_t id, EngineId engine, double prefill, double placed = 0,
                          RouterId router = 0) {
  return {.id = id,
          .router = router,
          .engine = engine,
          .prompt_tokens = 100,
          .uncached_tokens = static_cast<std::uint32_t>(prefill * kRate),
          .prefill = prefill,
          .placed = placed,
          .ready = placed,
          .first = placed + prefill,
          .expires = placed + 100};
}

Accounts small() { return Accounts({.max_engines = 4, .max_requests = 64, .max_routers = 3}); }

TEST_SUITE("Accounts") {
  TEST_CASE("the wait is the sum of the prefills, and shrinks with time") {
    Accounts accounts = small();

    REQUIRE(accounts.add(request(1, 0, 2)));
    REQUIRE(accounts.add(request(2, 0, 3)));

    CHECK(accounts.wait(0, 0, kRate) == doctest::Approx(5));
    CHECK(accounts.wait(0, 1, kRate) == doctest::Approx(4));
    CHECK(accounts.wait(1, 0, kRate) == 0);
    CHECK(accounts.mean_prefill(0) == doctest::Approx(2.5));
  }

  TEST_CASE("a prefill that takes longer than predicted delays those behind it") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2)));
    REQUIRE(accounts.add(request(2, 0, 3)));

    CHECK(accounts.wait(0, 50, kRate) == doctest::Approx(3));
  }

  TEST_CASE("blocks that are not there yet delay the queue") {
    Accounts accounts = small();
    Accounts::Request late = request(1, 0, 2);
    late.ready = 10;

    REQUIRE(accounts.add(late));

    CHECK(accounts.wait(0, 0, kRate) == doctest::Approx(12));
  }

  TEST_CASE("the first token moves a request to the decodes, once") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2)));
    REQUIRE(accounts.add(request(2, 0, 3)));

    const auto served = accounts.first_token(0, 1, 2.5);

    REQUIRE(served);
    CHECK(served->in_order);
    CHECK(served->seconds == doctest::Approx(2.5));
    CHECK(accounts.prefills(0) == 1);
    CHECK(accounts.decodes(0) == 1);
    CHECK(accounts.wait(0, 2.5, kRate) == doctest::Approx(3));
    CHECK_FALSE(accounts.first_token(0, 1, 3));
    CHECK_FALSE(accounts.first_token(0, 99, 3));
  }

  TEST_CASE("a request that overtakes another one teaches no rate") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2)));
    REQUIRE(accounts.add(request(2, 0, 3)));

    const auto served = accounts.first_token(0, 2, 1);

    REQUIRE(served);
    CHECK_FALSE(served->in_order);
    // The engine was busy with the other one until now.
    CHECK(accounts.wait(0, 1, kRate) == doctest::Approx(2));
    const auto next = accounts.first_token(0, 1, 3);
    REQUIRE(next);
    CHECK(next->in_order);
    CHECK(next->seconds == doctest::Approx(2));
  }

  TEST_CASE("a request that another router's may have overtaken teaches no rate") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2)));
    REQUIRE(accounts.add(request(9, 0, 2, 0.01, 1)));

    // The other one was placed at the same instant: the engine may have computed it first.
    CHECK_FALSE(accounts.first_token(0, 1, 4)->in_order);

    REQUIRE(accounts.add(request(2, 1, 2)));
    REQUIRE(accounts.add(request(8, 1, 2, 1, 1)));
    CHECK(accounts.first_token(0, 2, 2)->in_order);

    // Requests of this router reach the engine in the order in which they were placed.
    REQUIRE(accounts.add(request(3, 2, 2)));
    REQUIRE(accounts.add(request(4, 2, 2, 0.01)));
    CHECK(accounts.first_token(0, 3, 2)->in_order);
  }

  TEST_CASE("a full account refuses, and a repeated request is an error") {
    Accounts accounts({.max_engines = 1, .max_requests = 2, .max_routers = 1});
    REQUIRE(accounts.add(request(1, 0, 1)));
    CHECK(accounts.add(request(1, 0, 1)).error().code == Errc::kInvalidArgument);
    REQUIRE(accounts.add(request(2, 0, 1)));

    CHECK(accounts.add(request(3, 0, 1)).error().code == Errc::kBusy);
    CHECK(accounts.add(request(4, 7, 1)).error().code == Errc::kInvalidArgument);

    REQUIRE(accounts.end(0, 1, 0));
    CHECK(accounts.add(request(3, 0, 1)));
  }

  TEST_CASE("requests expire") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2)));
    REQUIRE(accounts.add(request(2, 1, 2, 50)));

    CHECK(accounts.expire(99, 64) == 0);
    CHECK(accounts.expire(100, 64) == 1);

    CHECK(accounts.find(0, 1) == nullptr);
    CHECK(accounts.find(0, 2) != nullptr);
    CHECK(accounts.wait(0, 100, kRate) == 0);
  }

  TEST_CASE("a heartbeat ends prefills whose end was lost, the oldest first") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2, 0, 1)));
    REQUIRE(accounts.add(request(2, 0, 3, 0, 1)));

    CHECK(accounts.heal(
        {.router = 1, .engine = 0, .prefills = 1, .decodes = 1, .prefill_tokens = 3000}, 2));

    CHECK(accounts.find(1, 1) == nullptr);
    CHECK(accounts.wait(0, 2, kRate) == doctest::Approx(3));
    CHECK(accounts.decodes(0) == 1);
  }

  TEST_CASE("a heartbeat adds placements that were lost, and the next one takes them back") {
    Accounts accounts = small();

    CHECK(accounts.heal(
        {.router = 1, .engine = 0, .prefills = 2, .decodes = 0, .prefill_tokens = 5000}, 0));
    CHECK(accounts.wait(0, 0, kRate) == doctest::Approx(5));

    CHECK(accounts.heal({.router = 1, .engine = 0}, 1));
    CHECK(accounts.wait(0, 1, kRate) == 0);
    CHECK_FALSE(accounts.heal({.router = 1, .engine = 0}, 2));
    CHECK_FALSE(accounts.heal({.router = 9, .engine = 0}, 2));
  }

  TEST_CASE("a router and an engine can be forgotten") {
    Accounts accounts = small();
    REQUIRE(accounts.add(request(1, 0, 2, 0, 1)));
    REQUIRE(accounts.add(request(2, 0, 3, 0, 0)));
    REQUIRE(accounts.add(request(3, 1, 4, 0, 0)));

    accounts.forget_router(1, 0);
    CHECK(accounts.wait(0, 0, kRate) == doctest::Approx(3));

    accounts.forget_engine(0);
    CHECK(accounts.wait(0, 0, kRate) == 0);
    CHECK(accounts.wait(1, 0, kRate) == doctest::Approx(4));
    CHECK(accounts.size() == 1);
  }

  TEST_CASE("random requests end in the same counts as in a map") {
    constexpr unsigned kSeed = 7;
    MESSAGE("seed ", kSeed);
    std::mt19937 random(kSeed);
    Accounts accounts({.max_engines = 4, .max_requests = 200, .max_routers = 3});
    std::map<std::pair<RouterId, std::uint64_t>, bool> known;  // Whether it decodes.

    for (int i = 0; i < 20000; ++i) {
      const auto router = static_cast<RouterId>(random() % 3);
      const std::uint64_t id = random() % 150;
      const double now = i * 0.01;
      const auto found = known.find({router, id});
      switch (random() % 3) {
        case 0: {
          const bool fits = found == known.end() && known.size() < 200;
          CHECK(accounts.add(request(id, random() % 4, 1, now, router)).has_value() == fits);
          if (fits) known[{router, id}] = false;
          break;
        }
        case 1: {
          const bool waits = found != known.end() && !found->second;
          CHECK(accounts.first_token(router, id, now).has_value() == waits);
          if (waits) found->second = true;
          break;
        }
        default:
          CHECK(accounts.end(router, id, now).has_value() == (found != known.end()));
          if (found != known.end()) known.erase(found);
      }
      REQUIRE(accounts.size() == known.size());
    }
    for (const auto& [key, decodes] : known) CHECK(accounts.end(key.first, key.second, 1e6));
    for (EngineId engine = 0; engine < 4; ++engine) {
      CHECK(accounts.wait(engine, 1e6, kRate) == 0);
      CHECK(accounts.decodes(engine) == 0);
    }
  }
}

}  // namespace
}  // namespace pegaflow::index
