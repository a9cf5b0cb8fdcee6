#include "router/routing/waiting_line.h"

#include <list>
#include <string>
#include <vector>

#include <doctest/doctest.h>

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

  WaitingLine::Place& join(const std::string& name, Fleet::Request request = {}) {
    REQUIRE(fleet->choose(Role::kDecode, request).why == Fleet::Why::kBusy);
    places.push_back({std::move(request), [this, name](const Fleet::Choice& choice) {
                        if (choice.engine) ++choice.engine->inflight;
                        called.push_back(name + " " +
                                         (choice.engine ? choice.engine->url.host
                                          : choice.why == Fleet::Why::kDown ? "down"
                                                                            : "none"));
                      }});
    line.join(places.back());
    return places.back();
  }
  /// A request of `engine` has ended.
  void end_one(const std::shared_ptr<Engine>& engine) {
    --engine->inflight;
    line.serve(*fleet, engine);
  }

  ManualClock clock;
  std::unique_ptr<Fleet> fleet;
  WaitingLine line;
  std::list<WaitingLine::Place> places;
  std::vector<std::string> called;
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
    f.line.serve(*f.fleet, e);
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
    f.line.serve_all(*f.fleet);
    CHECK(f.called == Calls{"a e"});
    CHECK(f.line.size() == 2);
  }

  TEST_CASE("a request that no engine can serve receives the reason") {
    Fixture f("decode http://e:1\ndecode http://f:1");
    f.join("not e", {.excluded = {"http://e:1"}});
    f.join("a");
    f.all()[1]->is_up = false;
    f.line.serve_all(*f.fleet);
    CHECK(f.called == Calls{"not e down"});
    f.join("not f", {.excluded = {"http://f:1"}});
    f.fleet->set(EngineList::parse("decode http://f:1").value());
    f.all()[0]->inflight = 1;
    f.all()[0]->is_up = true;
    f.line.serve_all(*f.fleet);
    CHECK(f.called == Calls{"not e down", "not f none"});
    CHECK(f.line.size() == 1);
  }
}

}  // namespace
}  // namespace pegaflow::router
