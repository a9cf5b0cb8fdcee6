#include "router/routing/fleet.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

struct Fixture {
  explicit Fixture(const char* engines) {
    Fleet::Options options;
    options.breaker.failures = 1;
    options.max_inflight = {1, 2};
    fleet = std::make_unique<Fleet>(options,
                                    std::array<std::unique_ptr<Policy>, kRoleCount>{
                                        std::move(make_policy("round-robin", 1).value()),
                                        std::move(make_policy("round-robin", 1).value())},
                                    clock);
    fleet->set(EngineList::parse(engines).value());
  }
  Fleet::Choice decode(const std::vector<const Engine*>& tried = {}) {
    return fleet->choose(Role::kDecode, {.tried = tried});
  }

  ManualClock clock;
  std::unique_ptr<Fleet> fleet;
};

TEST_SUITE("fleet") {
  TEST_CASE("URLs are host and port, and nothing else") {
    CHECK(EngineUrl::parse("http://a.b-c:81/").value().text == "http://a.b-c:81");
    CHECK(EngineUrl::parse("http://a").value().port == "80");
    const EngineUrl six = EngineUrl::parse("http://[::1]:8000").value();
    CHECK(six.host == "::1");
    CHECK(six.port == "8000");
    CHECK_FALSE(six.is_name);
    const EngineUrl name = EngineUrl::parse("dns://engines.svc:8000/").value();
    CHECK(name.text == "dns://engines.svc:8000");
    CHECK(name.host == "engines.svc");
    CHECK(name.is_name);
    for (const char* const bad :
         {"", "dns://", "dns:a:1", "a:1", "https://a:1", "http://", "http://:1",
          "http://a:", "http://a:x", "http://a:65536", "http://a:0", "http://a/v1", "http://u@a:1",
          "http://[::1", "http://a b", "http://[::1]x", "http://a\r\nX: y"}) {
      CAPTURE(bad);
      CHECK(EngineUrl::parse(bad).error().code == Errc::kInvalidArgument);
    }
  }

  TEST_CASE("errors in lists of engines name the line") {
    const EngineList list =
        EngineList::parse("# all\nprefill http://p:1 # one\n\n  decode\thttp://d:1\r\n").value();
    CHECK(list.by_role[0].size() == 1);
    CHECK(list.by_role[1].size() == 1);
    CHECK(EngineList::parse("decode http://d:1\nencode x").error().detail.find("line 2") == 0);
    CHECK(EngineList::parse("decode ftp://d").error().detail.find("line 1") == 0);
  }

  TEST_CASE("the reason for having no engine is reported") {
    Fixture f("decode http://d:1");
    CHECK(f.fleet->choose(Role::kPrefill, {}).why == Fleet::Why::kNone);
    const auto found = f.decode();
    REQUIRE(found.why == Fleet::Why::kFound);
    found.engine->inflight = 2;
    CHECK(f.decode().why == Fleet::Why::kBusy);
    found.engine->is_up = false;
    CHECK(f.decode().why == Fleet::Why::kDown);
    CHECK_FALSE(f.fleet->any_up(Role::kDecode));
  }

  TEST_CASE("engines that were tried, or whose breaker is open, come last") {
    Fixture f("decode http://d:1\ndecode http://d:2\ndecode http://d:3");
    const auto& all = f.fleet->engines();
    all[0]->breaker.failed(f.clock.now());
    const std::vector<const Engine*> tried = {all[1].get()};
    for (int i = 0; i < 4; ++i) CHECK(f.decode(tried).engine == all[2]);
    all[2]->is_up = false;
    CHECK(f.decode(tried).engine == all[1]);
    all[1]->is_up = false;
    CHECK(f.decode(tried).engine == all[0]);  // Trying is better than refusing.
  }

  TEST_CASE("an excluded engine receives nothing, even if there is no other") {
    Fixture f("decode http://d:1\ndecode http://d:2");
    for (int i = 0; i < 4; ++i) {
      const auto choice = f.fleet->choose(Role::kDecode, {.excluded = {"http://d:1"}});
      CHECK(choice.engine == f.fleet->engines()[1]);
    }
    const Fleet::Request both{.excluded = {"http://d:1", "http://d:2"}};
    CHECK(f.fleet->choose(Role::kDecode, both).why == Fleet::Why::kNone);
  }

  TEST_CASE("a model goes to engines that list it, or else to engines without a list") {
    Fixture f("decode http://d:1\ndecode http://d:2\ndecode http://d:3");
    const auto& all = f.fleet->engines();
    const Fleet::Request a{.model = "a"};
    CHECK_FALSE(f.fleet->is_unknown_model("a"));
    CHECK(all[0]->models.set({"a", "adapter"}));
    CHECK_FALSE(all[0]->models.set({"a", "adapter"}));
    all[1]->models.set({"b"});
    for (int i = 0; i < 4; ++i) CHECK(f.fleet->choose(Role::kDecode, a).engine == all[0]);
    const Fleet::Request other{.model = "other"};
    for (int i = 0; i < 4; ++i) CHECK(f.fleet->choose(Role::kDecode, other).engine == all[2]);
    CHECK_FALSE(f.fleet->is_unknown_model("other"));
    CHECK(f.fleet->unnamed_model() == "a");

    all[0]->is_up = false;
    CHECK(f.fleet->choose(Role::kDecode, a).engine == all[2]);  // It may have the model.
    all[2]->models.set({"c"});
    CHECK(f.fleet->choose(Role::kDecode, a).why == Fleet::Why::kDown);
    CHECK(f.fleet->is_unknown_model("other"));
    CHECK_FALSE(f.fleet->is_unknown_model("a"));  // Its engine is only down.
    CHECK(f.fleet->choose(Role::kDecode, other).why == Fleet::Why::kNone);
  }

  TEST_CASE("while an engine without a list is down, another engine reports the missing model") {
    Fixture f("decode http://d:1\ndecode http://d:2");
    const auto& all = f.fleet->engines();
    all[0]->models.set({"a"});
    all[1]->is_up = false;
    CHECK(f.fleet->choose(Role::kDecode, {.model = "b"}).engine == all[0]);
    CHECK_FALSE(f.fleet->is_unknown_model("b"));
  }

  TEST_CASE("requests need no model name while all engines serve one model") {
    Fixture f("prefill http://p:1\ndecode http://d:1\ndecode http://d:2");
    const auto& all = f.fleet->engines();
    CHECK(f.fleet->unnamed_model().empty());
    all[1]->models.set({"a"});
    all[2]->models.set({"b", "a"});
    CHECK(f.fleet->unnamed_model().empty());
    all[0]->models.set({"b"});
    CHECK(f.fleet->unnamed_model() == "a");
    CHECK(f.fleet->choose(Role::kPrefill, {.model = "a"}).why == Fleet::Why::kNone);
  }

  TEST_CASE("a prefill engine that announces no blocks receives one prompt in ten seconds") {
    Fixture f("prefill http://p:1");
    Engine& engine = *f.fleet->engines()[0];
    for (int i = 0; i < HandoverWatch::kMisses; ++i) {
      CHECK(f.fleet->choose(Role::kPrefill, {}).why == Fleet::Why::kFound);
      CHECK(engine.handover.missed(f.clock.now()) == (i == HandoverWatch::kMisses - 1));
    }
    CHECK(f.fleet->choose(Role::kPrefill, {}).why == Fleet::Why::kSuspended);
    f.clock.advance(HandoverWatch::kRetryTime);
    CHECK(f.fleet->choose(Role::kPrefill, {}).why == Fleet::Why::kFound);
    engine.handover.started(f.clock.now());
    CHECK(f.fleet->choose(Role::kPrefill, {}).why == Fleet::Why::kSuspended);
    CHECK(engine.handover.worked());
    CHECK(f.fleet->choose(Role::kPrefill, {}).why == Fleet::Why::kFound);
    CHECK_FALSE(engine.handover.is_suspended());
  }

  TEST_CASE("a new list keeps the state of engines that stay") {
    Fixture f("prefill http://a:1\ndecode http://a:1\ndecode http://b:1\ndecode http://b:1");
    REQUIRE(f.fleet->engines().size() ==
            3);  // One URL in two roles is two engines; listed twice it is one.
    const auto gone = f.fleet->engines()[1];
    const auto stays = f.fleet->engines()[2];
    stays->is_up = false;
    f.fleet->set(EngineList::parse("decode http://b:1\ndecode http://c:1").value());
    CHECK(gone->is_removed);
    CHECK(f.fleet->engines()[0] == stays);
    CHECK_FALSE(stays->is_up);
    CHECK_FALSE(f.fleet->has(Role::kPrefill));
    CHECK(f.decode().engine->url.text == "http://c:1");
  }
}

}  // namespace
}  // namespace pegaflow::router
