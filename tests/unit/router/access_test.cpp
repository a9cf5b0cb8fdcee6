#include "router/config/access.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

using Kind = AccessList::Verdict::Kind;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_SUITE("access") {
  TEST_CASE("only keys of the file are accepted, by their whole text") {
    AccessList list = AccessList::parse("# keys\n\nann k-1\nbob k-2 5\n", 0).value();
    CHECK(list.size() == 2);
    CHECK(list.check("k-1", {}).kind == Kind::kAllowed);
    CHECK(list.check("k-1", {}).name == "ann");
    for (const char* const bad : {"", "k-", "k-11", "K-1", "ann"}) {
      CHECK(list.check(bad, {}).kind == Kind::kUnknown);
    }
  }

  TEST_CASE("a rate is enforced over time, with a burst of one second") {
    ManualClock clock;
    AccessList list = AccessList::parse("bob k 2\nann l\n", 1).value();
    for (const bool allowed : {true, true, false}) {
      CHECK((list.check("k", clock.now()).kind == Kind::kAllowed) == allowed);
    }
    CHECK(list.check("k", clock.now()).retry_after == milliseconds(500));
    clock.advance(milliseconds(500));
    CHECK(list.check("k", clock.now()).kind == Kind::kAllowed);
    CHECK(list.check("k", clock.now()).kind == Kind::kTooOften);
    clock.advance(seconds(100));
    int allowed = 0;
    while (list.check("k", clock.now()).kind == Kind::kAllowed) ++allowed;
    CHECK(allowed == 2);
    // The default rate applies to keys without one.
    CHECK(list.check("l", clock.now()).kind == Kind::kAllowed);
    CHECK(list.check("l", clock.now()).kind == Kind::kTooOften);
  }

  TEST_CASE("an invalid line is reported without its key") {
    for (const char* const bad :
         {"ann", "ann secret 1 2", "ann secret x", "ann secret -1", "bob secret\nann secret"}) {
      const auto parsed = AccessList::parse(bad, 0);
      REQUIRE_FALSE(parsed);
      CHECK(parsed.error().code == Errc::kInvalidArgument);
      CHECK(parsed.error().detail.find("line ") == 0);
      CHECK(parsed.error().detail.find("secret") == std::string::npos);
    }
  }

  TEST_CASE("a text without a key is rejected") {
    for (const char* const bad : {"", "# none\n\n"}) {
      CHECK(AccessList::parse(bad, 0).error().code == Errc::kInvalidArgument);
    }
  }

  TEST_CASE("a list that is read again gives no client more requests") {
    ManualClock clock;
    AccessList old = AccessList::parse("ann k 1\nbob l 1\n", 0).value();
    CHECK(old.check("k", clock.now()).kind == Kind::kAllowed);
    CHECK(old.check("l", clock.now()).kind == Kind::kAllowed);
    AccessList list = AccessList::parse("ann k 1\nbob l 2\neve m 1", 0).value();
    list.continue_from(old);
    CHECK(list.check("k", clock.now()).kind == Kind::kTooOften);
    CHECK(list.check("l", clock.now()).kind == Kind::kAllowed);  // Its rate has changed.
    CHECK(list.check("m", clock.now()).kind == Kind::kAllowed);
  }

  TEST_CASE("the scheme Bearer is case-insensitive") {
    CHECK(bearer_key("Bearer k") == "k");
    CHECK(bearer_key("bEARER k") == "k");
    CHECK(bearer_key("Basic k").empty());
    CHECK(bearer_key("Bearer ").empty());
    CHECK(bearer_key("").empty());
  }
}

}  // namespace
}  // namespace pegaflow::router
