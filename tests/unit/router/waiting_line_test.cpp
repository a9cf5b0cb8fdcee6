#include "router/routing/waiting_line.h"

#include <algorithm>
#include <array>
#include <list>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::router {
namespace {

/// Decode engines with room for one request each, and requests that wait for them.
struct Fixture {
  explicit Fixture(const char* engines, bool passes_unknown_models = false) {
    Fleet::Options options;
    options.max_inflight = {1, 1};
    options.passes_unknown_models = passes_unknown_models;
    fleet = std::make_unique<Fleet>(options,
                                    std::array<std::unique_ptr<Policy>, kRoleCount>{
                                        std::move(make_policy("round-robin", 1).value()),
                                        std::move(make_policy("round-robin", 1).value())},
                                    clock);
    fleet->set(EngineList::parse(engines).value());
    for (const auto& engine : all()) engine->inflight = 1;
  }

  [[nodiscard]] const std::vector<std::shared_ptr<Engine>>& all() const { return fleet->engines(); }

  WaitingLine::Place& join(const std::string& name, Fleet::Request request = {},
                           std::uint64_t key = 0, std::uint64_t tokens = 1) {
    REQUIRE(fleet->choose(Role::kDecode, request).why == Fleet::Why::kBusy);
    places.push_back({std::move(request), [this, name](const Fleet::Choice& choice) {
                        if (choice.engine) ++choice.engine->inflight;
                        called.push_back(name + " " +
                                         (choice.engine ? choice.engine->url.host
                                          : choice.why == Fleet::Why::kDown ? "down"
                                          : choice.why == Fleet::Why::kBusy ? "pushed out"
                                                                            : "none"));
                      }});
    places.back().key = key;
    places.back().tokens = tokens;
    has_joined = line.join(places.back(), most, clock.now());
    return places.back();
  }
  /// A request of `engine` has ended.
  void end_one(const std::shared_ptr<Engine>& engine) {
    --engine->inflight;
    line.serve(*fleet, engine, clock.now());
  }

  ManualClock clock;
  std::unique_ptr<Fleet> fleet;
  WaitingLine line;
  std::list<WaitingLine::Place> places;
  std::vector<std::string> called;
  std::size_t most = 1000;  ///< Requests in the line.
  bool has_joined = false;  ///< The last one.
};

using Calls = std::vector<std::string>;

TEST_SUITE("waiting_line") {
  TEST_CASE("first come, first served") {
    Fixture f("decode http://d:1");
    f.join("a");
    auto& left = f.join("b");
    f.join("c");
    CHECK(f.line.size() == 3);
    f.end_one(f.all()[0]);
    f.line.leave(left);
    f.end_one(f.all()[0]);
    CHECK(f.called == Calls{"a d", "c d"});
    CHECK(f.line.size() == 0);
    f.end_one(f.all()[0]);
    CHECK(f.all()[0]->inflight == 0);
  }

  TEST_CASE(
      "an engine serves the first request that may use it, and the others keep their places") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.join("not e", {.excluded = {"http://e:1"}});
    f.join("any");
    f.join("any too");
    f.end_one(f.all()[0]);
    CHECK(f.called == Calls{"any e"});
    f.end_one(f.all()[1]);
    CHECK(f.called == Calls{"any e", "not e f"});
    f.end_one(f.all()[1]);
    CHECK(f.called == Calls{"any e", "not e f", "any too f"});
  }

  TEST_CASE("an engine that is above its limit, down or removed has no room") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.join("a");
    const auto e = f.all()[0];
    e->inflight = 2;
    f.end_one(e);
    e->is_up = false;
    f.end_one(e);
    e->is_up = true;
    f.fleet->set(EngineList::parse("decode http://f:1").value());
    f.line.serve(*f.fleet, e, f.clock.now());
    CHECK(f.called.empty());
  }

  TEST_CASE("an engine serves the first request for one of its models") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.all()[0]->models.set({"a"});
    f.all()[1]->models.set({"b"});
    f.join("b", {.model = "b"});
    f.join("a", {.model = "a"});
    f.end_one(f.all()[0]);
    f.end_one(f.all()[1]);
    CHECK(f.called == Calls{"a e", "b f"});
  }

  TEST_CASE("a request for an unlisted model is served where any engine may have it") {
    Fixture f("decode http://e:1", true);
    f.all()[0]->models.set({"a"});
    f.join("b", {.model = "b"});
    f.end_one(f.all()[0]);
    CHECK(f.called == Calls{"b e"});
  }

  TEST_CASE("when engines change, all requests that find room are served and the rest waits") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.join("not e", {.excluded = {"http://e:1"}});
    f.join("a");
    f.join("b");
    f.all()[0]->inflight = 0;
    f.line.serve_all(*f.fleet, f.clock.now());
    CHECK(f.called == Calls{"a e"});
    CHECK(f.line.size() == 2);
  }

  TEST_CASE("a request that no engine can serve receives the reason") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.join("not e", {.excluded = {"http://e:1"}});
    f.join("a");
    f.all()[1]->is_up = false;
    f.line.serve_all(*f.fleet, f.clock.now());
    CHECK(f.called == Calls{"not e down"});
    f.join("not f", {.excluded = {"http://f:1"}});
    f.fleet->set(EngineList::parse("decode http://f:1").value());
    f.all()[0]->inflight = 1;
    f.all()[0]->is_up = true;
    f.line.serve_all(*f.fleet, f.clock.now());
    CHECK(f.called == Calls{"not e down", "not f none"});
    CHECK(f.line.size() == 1);
  }

  TEST_CASE("clients take turns by the tokens of their prompts") {
    Fixture f("decode http://d:1");
    for (int i = 0; i < 4; ++i) f.join("flood", {}, 1, 100);
    f.join("long", {}, 2, 150);
    f.join("short", {}, 3, 10);
    for (int i = 0; i < 6; ++i) f.end_one(f.all()[0]);
    CHECK(f.called == Calls{"short d", "flood d", "long d", "flood d", "flood d", "flood d"});
  }

  TEST_CASE("a client whose request fits no engine collects no credit meanwhile") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.all()[0]->models.set({"a"});
    f.all()[1]->models.set({"b"});
    for (int i = 0; i < 3; ++i) f.join("b", {.model = "b"}, 1, 100);
    for (int i = 0; i < 6; ++i) f.join("a", {.model = "a"}, 2, 100);
    for (int i = 0; i < 3; ++i) f.join("A", {.model = "a"}, 1, 100);
    for (int i = 0; i < 4; ++i) f.end_one(f.all()[0]);
    // As if it had no request for the other engine.
    CHECK(f.called == Calls{"A e", "a e", "A e", "a e"});
  }

  TEST_CASE("of clients that always wait none gets more than one request's tokens before another") {
    constexpr std::uint64_t kMost = 5000;
    constexpr std::size_t kClients = 5;
    std::mt19937 random(static_cast<unsigned>(testing::seed()));
    Fixture f("decode http://d:1");
    std::array<std::uint64_t, kClients> served{};
    std::list<WaitingLine::Place> places;
    const auto join = [&](std::size_t client) {
      // Some send long prompts and some short ones.
      const std::uint64_t tokens = 1 + random() % (client % 2 == 0 ? kMost : kMost / 50);
      places.push_back({.request = {},
                        .called =
                            [&served, client, tokens](const Fleet::Choice& choice) {
                              ++choice.engine->inflight;
                              served[client] += tokens;
                            },
                        .key = client,
                        .tokens = tokens});
      REQUIRE(f.line.join(places.back(), 1000, f.clock.now()));
    };
    // The first one floods the line, the others have one request at a time, or a few.
    for (int i = 0; i < 500; ++i) join(0);
    for (int step = 0; step < 5000; ++step) {
      for (std::size_t client = 1; client < kClients; ++client) {
        while (f.line.tokens_before(client, 0) < kMost * client) join(client);
      }
      if (f.line.tokens_before(0, 0) < kMost) join(0);
      f.end_one(f.all()[0]);
      const auto [least, most] = std::minmax_element(served.begin(), served.end());
      CHECK(*most - *least < kMost);
    }
  }

  TEST_CASE("in a full line the client with the most requests makes room for the others") {
    Fixture f("decode http://d:1");
    f.most = 4;
    for (const char* name : {"a", "b", "c", "d"}) f.join(name, {}, 1);
    f.join("e", {}, 1);
    CHECK_FALSE(f.has_joined);
    f.join("x", {}, 2);
    CHECK(f.has_joined);
    f.join("y", {}, 2);
    CHECK(f.has_joined);
    f.join("z", {}, 2);
    CHECK_FALSE(f.has_joined);
    CHECK(f.called == Calls{"d pushed out", "c pushed out"});
    CHECK(f.line.size() == 4);
    CHECK(f.line.clients() == 2);
  }

  TEST_CASE("a line without places refuses") {
    Fixture f("decode http://d:1");
    f.most = 0;
    f.join("a");
    CHECK_FALSE(f.has_joined);
    CHECK(f.line.size() == 0);
  }

  TEST_CASE("the predicted wait is that of the tokens before a request, at the speed of the line") {
    Fixture f("decode http://d:1");
    CHECK_FALSE(f.line.predicted_wait(1, 100, f.clock.now()));
    for (int i = 0; i < 20; ++i) f.join("a", {}, 1 + i % 2, 100);
    for (int i = 0; i < 6; ++i) {
      f.clock.advance(std::chrono::seconds(1));
      f.end_one(f.all()[0]);
    }
    // 100 tokens a second.
    const auto wait = [&](std::uint64_t key, std::uint64_t tokens) {
      return std::chrono::duration<double>(*f.line.predicted_wait(key, tokens, f.clock.now()))
          .count();
    };
    CHECK(f.line.tokens() == 14 * 100);
    CHECK(wait(1, 100) == doctest::Approx(7 + 7 + 1).epsilon(0.01));
    // A new client shares the engine with two others.
    CHECK(wait(3, 100) == doctest::Approx(3.0).epsilon(0.01));
    // While nothing is served, the wait grows.
    const double before = wait(3, 100);
    f.clock.advance(std::chrono::seconds(10));
    CHECK(wait(3, 100) > 1.5 * before);
  }

  TEST_CASE("time without a line does not count for the predicted wait") {
    Fixture f("decode http://d:1");
    for (int round = 0; round < 2; ++round) {
      f.join("a", {}, 1, 100);
      f.clock.advance(std::chrono::seconds(1));
      f.end_one(f.all()[0]);
      f.clock.advance(std::chrono::hours(1));
    }
    const auto wait = f.line.predicted_wait(2, 100, f.clock.now());
    REQUIRE(wait);
    CHECK(*wait < std::chrono::milliseconds(1100));
  }
}

}  // namespace
}  // namespace pegaflow::router
