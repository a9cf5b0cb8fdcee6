#include "cluster/open_questions.h"

#include <chrono>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::cluster {
namespace {

using std::chrono::milliseconds;

TimePoint at(int ms) { return TimePoint(milliseconds(1000 + ms)); }

TEST_SUITE("OpenQuestions") {
  TEST_CASE("many deadlines that are missed at once are one silence, counted from the oldest") {
    OpenQuestions open;
    std::vector<OpenQuestions::Number> asked;
    for (int i = 0; i < 100; ++i) asked.push_back(open.ask(at(i)));
    CHECK_FALSE(open.is_silent());

    int silences = 0;
    for (const auto number : asked) silences += open.missed(number) ? 1 : 0;

    CHECK(silences == 1);
    CHECK(open.silent_since() == at(0));
  }

  TEST_CASE("any answer ends a silence, also a late one") {
    OpenQuestions open;
    const auto first = open.ask(at(0));
    const auto second = open.ask(at(1));
    CHECK(open.missed(first));
    CHECK(open.missed(second) == false);

    open.answered(first, at(20));
    CHECK_FALSE(open.is_silent());
    CHECK_FALSE(open.silent_since());

    // The other one is still owed, and the silence counts from the answer.
    const auto third = open.ask(at(30));
    CHECK(open.missed(third));
    CHECK(open.silent_since() == at(20));
  }

  TEST_CASE("a peer that answers others meanwhile is not silent about one") {
    OpenQuestions open;
    const auto slow = open.ask(at(0));
    const auto quick = open.ask(at(1));
    open.answered(quick, at(2));

    CHECK_FALSE(open.missed(slow));
    CHECK_FALSE(open.is_silent());
  }

  TEST_CASE("a question with a long time to work is not overdue before its end") {
    OpenQuestions open;
    open.ask(at(5000));
    const auto lookup = open.ask(at(100));
    CHECK(open.missed(lookup));
    CHECK(open.silent_since() == at(100));
  }

  TEST_CASE("a question that ended without an answer is not overdue") {
    OpenQuestions open;
    const auto lookup = open.ask(at(0));
    open.ended(lookup);
    CHECK_FALSE(open.missed(lookup));
  }
}

}  // namespace
}  // namespace pegaflow::cluster
