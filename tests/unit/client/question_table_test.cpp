#include "client/session/question_table.h"

#include <thread>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

QuestionTable::Outcome outcome(std::size_t blocks) {
  return {.answer = {.blocks = blocks, .complete = true, .token = {}}};
}

TEST_SUITE("QuestionTable") {
  TEST_CASE("an answer is returned once") {
    QuestionTable table(4);
    const auto ticket = table.add().value();
    CHECK_FALSE(table.take(ticket, Duration::zero()));

    CHECK(table.answer(ticket, outcome(7)));

    CHECK(table.take(ticket, Duration::zero()).value().value().answer.blocks == 7);
    CHECK(table.take(ticket, Duration::zero()).value().error().code == Errc::kGone);
  }

  TEST_CASE("the answer wakes a waiting thread") {
    QuestionTable table(4);
    const auto ticket = table.add().value();
    std::thread other([&] { CHECK(table.answer(ticket, outcome(7))); });

    const auto answer = table.take(ticket, seconds(30));

    other.join();
    REQUIRE(answer);
    CHECK(answer->value().answer.blocks == 7);
  }

  TEST_CASE("without an answer a wait ends with its patience") {
    QuestionTable table(4);
    CHECK_FALSE(table.take(table.add().value(), milliseconds(1)));
  }

  TEST_CASE("an answer to any question, or an interruption, wakes a thread that waits for events") {
    QuestionTable table(4);
    const auto ticket = table.add().value();
    const std::uint64_t before = table.events();
    CHECK_FALSE(table.await_event(before, milliseconds(1)));
    std::thread other([&] { CHECK(table.answer(ticket, outcome(7))); });

    CHECK(table.await_event(before, seconds(30)));

    other.join();
    CHECK(table.await_event(before, seconds(30)));  // It came before the wait.
    const std::uint64_t answered = table.events();
    CHECK(answered == before + 1);
    std::thread another([&] { table.interrupt(); });
    CHECK(table.await_event(answered, seconds(30)));
    another.join();
  }

  TEST_CASE("an answer to a forgotten question is no event") {
    QuestionTable table(4);
    const auto ticket = table.add().value();
    const std::uint64_t before = table.events();
    table.forget(ticket);
    CHECK_FALSE(table.answer(ticket, outcome(7)));
    CHECK(table.events() == before);
  }

  TEST_CASE("the answer to a forgotten question is returned to the caller") {
    QuestionTable table(4);
    const auto early = table.add().value();
    CHECK_FALSE(table.forget(early));
    CHECK_FALSE(table.answer(early, outcome(7)));

    const auto late = table.add().value();
    CHECK(table.answer(late, outcome(8)));
    CHECK(table.forget(late).value().answer.blocks == 8);

    const auto failed = table.add().value();
    CHECK(table.answer(failed, fail(Errc::kTimeout, "late")));
    CHECK_FALSE(table.forget(failed));
  }

  TEST_CASE("a full table returns kBusy, and taking an answer makes room") {
    QuestionTable table(2);
    const auto first = table.add().value();
    CHECK(table.add());
    CHECK(table.add().error().code == Errc::kBusy);
    CHECK(table.answer(first, outcome(1)));
    CHECK(table.add().error().code == Errc::kBusy);  // It was not taken yet.
    table.take(first, Duration::zero());
    CHECK(table.add());
  }
}

}  // namespace
}  // namespace pegaflow
