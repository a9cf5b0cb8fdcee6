// Waits for the jobs of another engine, at a real server.
#include <memory>

#include <doctest/doctest.h>

#include "tests/integration/wire_engine.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("waits for jobs") {
  TEST_CASE("a waiter is notified when the job is sealed, and other calls overtake the wait") {
    WireEngine engine;
    const auto keys = make_keys(1, 5);
    WireClient decode(engine.io, engine.server.socket());
    decode.hello();
    REQUIRE(decode.attach("decode"));
    const JobId job = engine.job();
    REQUIRE(engine.worker.reserve(job, keys));
    auto sealed = decode.await_job(engine.incarnation, job, 60'000);
    CHECK_FALSE(decode.lookup(keys).complete);  // The call before it is pending.
    CHECK(engine.server.metric("pegaflow_job_waits") == 1);
    CHECK_FALSE(sealed.poll(engine.io.waitScope));

    REQUIRE(engine.worker.publish(job));

    CHECK(sealed.wait(engine.io.waitScope));
    CHECK(engine.server.metric("pegaflow_job_waits") == 0);
    CHECK(engine.server.metric(R"(pegaflow_job_waits_total{result="over"})") == 1);
    // Another server's job, an unknown scheduler, and a job that does not end in time.
    const auto code = [&](const Id128& server, const JobId& which) {
      const Result<void> answer = decode.await_job(server, which, 1).wait(engine.io.waitScope);
      REQUIRE_FALSE(answer);
      return answer.error().code;
    };
    CHECK(code(Id128::random(), job) == Errc::kGone);
    CHECK(code(engine.incarnation, {Id128::random(), 1}) == Errc::kGone);
    CHECK(code(engine.incarnation, engine.job()) == Errc::kTimeout);
    // A connection that has not attached.
    WireClient stranger(engine.io, engine.server.socket());
    stranger.hello();
    const Result<void> refused =
        stranger.await_job(engine.incarnation, job, 1).wait(engine.io.waitScope);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("the answer to a wait reports how far the jobs of that engine are") {
    WireEngine engine;
    WireClient decode(engine.io, engine.server.socket());
    decode.hello();
    REQUIRE(decode.attach("decode"));
    const JobId first = engine.job();
    const auto reached = [&](std::uint64_t number, bool begun = false) {
      return decode.jobs_reached(engine.incarnation, {first.scheduler, number}, 0, begun)
          .wait(engine.io.waitScope);
    };
    CHECK(reached(first.number).up_to == 0);
    REQUIRE(engine.worker.save(engine.pool, first, make_keys(1, 2)));
    for (std::uint64_t number = first.number + 1; number < first.number + 9; ++number) {
      REQUIRE(engine.worker.save(engine.pool, {first.scheduler, number}, make_keys(number, 1)));
    }
    const std::uint64_t last = first.number + 9;
    REQUIRE(engine.worker.reserve({first.scheduler, last}, make_keys(last, 1)));

    const JobsReached over = reached(first.number);
    const JobsReached begun = reached(first.number, true);
    const JobsReached far = reached(last + 1000);
    const JobsReached unknown =
        decode.jobs_reached(engine.incarnation, {Id128::random(), 1}, 0).wait(engine.io.waitScope);

    CHECK(over.ended);
    CHECK(over.up_to == last - 1);
    CHECK(begun.ended);
    CHECK(begun.up_to == last);
    REQUIRE_FALSE(far.ended);
    CHECK(far.ended.error().code == Errc::kTimeout);
    CHECK(far.up_to == last - 1);
    CHECK(unknown.up_to == 0);
  }

  TEST_CASE("a wait ends with the connection that waits, and with the server") {
    WireEngine engine;
    const JobId job = engine.job();
    const Id128 incarnation = engine.incarnation;
    auto left = std::make_unique<WireClient>(engine.io, engine.server.socket());
    left->hello();
    REQUIRE(left->attach("decode"));
    {
      auto wait = left->await_job(incarnation, job, 60'000);
      CHECK_FALSE(left->lookup(make_keys(1, 1)).complete);
      CHECK(engine.server.metric("pegaflow_job_waits") == 1);
      left.reset();
    }
    CHECK(engine.server.metric_becomes("pegaflow_job_waits", 0));
    CHECK(engine.server.metric(R"(pegaflow_job_waits_total{result="cancelled"})") == 1);

    auto wait = engine.scheduler.await_job(incarnation, job, 60'000);
    CHECK(engine.scheduler.lookup(make_keys(1, 1)).complete);
    CHECK(engine.server.terminate() == 0);
    CHECK_THROWS_AS(wait.wait(engine.io.waitScope), kj::Exception);
  }
}

}  // namespace
}  // namespace pegaflow::testing
