#include "server/cache/job_waits.h"

#include <memory>
#include <optional>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::keys;
using testing::kPage;
using testing::StoreFixture;

constexpr Id128 kScheduler{4, 4};
constexpr Id128 kReader{6, 6};

/// A store whose jobs are begun by two ranks of one engine, and a caller that waits for them.
struct Fixture {
  explicit Fixture(std::size_t max_waits = 4, std::uint32_t shards = 2)
      : f({.pool_bytes = 16 * kPage}), waits(*f.store, f.clock, max_waits) {
    ranks = f.add_ranks(7, shards);
    space = f.store->make_space(f.add_shape(kPage, shards));
    waits.attached(kScheduler);
  }
  static JobId job(std::uint64_t number) { return {kScheduler, number}; }
  void reserve(std::uint32_t shard, std::uint64_t number) {
    const auto reserved = f.store->reserve(ranks[shard], space, job(number), 0, keys(number, 1));
    REQUIRE(reserved);
    waits.begun(job(number), shard, static_cast<std::uint32_t>(ranks.size()), false);
    waits.settle();
  }
  void publish(std::uint32_t shard, std::uint64_t number) {
    REQUIRE(f.store->publish(ranks[shard], job(number)) == 0);
    waits.settle();
  }
  /// The answers come into the vector that is returned: none yet, or one.
  std::shared_ptr<std::vector<Result<void>>> wait(std::uint64_t number,
                                                  Duration patience = seconds(2),
                                                  const Id128& connection = kReader) {
    auto answers = std::make_shared<std::vector<Result<void>>>();
    waits.wait(connection, job(number), true, patience,
               [answers](Result<void> answer) { answers->push_back(std::move(answer)); });
    return answers;
  }
  std::shared_ptr<std::vector<Result<void>>> wait_begun(std::uint64_t number,
                                                        Duration patience = seconds(2)) {
    auto answers = std::make_shared<std::vector<Result<void>>>();
    waits.wait(
        kReader, job(number), true, patience,
        [answers](Result<void> answer) { answers->push_back(std::move(answer)); },
        JobWaits::Until::kBegun);
    return answers;
  }
  static Errc code(const std::vector<Result<void>>& answers) {
    REQUIRE(answers.size() == 1);
    REQUIRE_FALSE(answers[0]);
    return answers[0].error().code;
  }
  static bool is_over(const std::vector<Result<void>>& answers) {
    return answers.size() == 1 && answers[0];
  }

  StoreFixture f;
  JobWaits waits;
  std::vector<engine::HolderId> ranks;
  engine::SpaceId space{};
};

TEST_SUITE("JobWaits") {
  TEST_CASE("a job is over when all shards have sealed it") {
    Fixture f;
    f.reserve(0, 1);
    f.reserve(1, 1);
    const auto answers = f.wait(1);
    f.publish(1, 1);
    CHECK(answers->empty());

    f.publish(0, 1);

    CHECK(f.is_over(*answers));
    CHECK(f.is_over(*f.wait(1)));
    CHECK(f.waits.stats().over == 2);
    CHECK(f.waits.stats().waiting == 0);
    CHECK_FALSE(f.waits.next_deadline());
  }

  TEST_CASE("a job is over without a shard that does not request it, once all before are known") {
    Fixture f;
    const std::vector<bool> only_first = {true, false};
    const std::vector<bool> only_second = {false, true};
    const auto begun = [&](std::uint32_t shard, std::uint64_t number,
                           const std::vector<bool>& requesters) {
      f.waits.begun(f.job(number), shard, 2, false, requesters);
      f.waits.settle();
    };
    const auto first = f.wait(1);
    const auto third = f.wait(3);
    begun(1, 3, only_second);
    CHECK(first->empty());
    CHECK(third->empty());
    begun(0, 1, only_first);
    CHECK(f.is_over(*first));
    CHECK(third->empty());  // The second one may be of the first shard.
    begun(0, 2, only_first);
    CHECK(f.is_over(*third));
    begun(0, 4, {});
    // The fourth one is of both, and the second shard has not requested it.
    const auto fourth = f.wait(4);
    begun(0, 5, only_first);
    CHECK(fourth->empty());
    begun(1, 6, only_second);
    CHECK(f.is_over(*fourth));
    CHECK(f.is_over(*f.wait(6)));
  }

  TEST_CASE("a wait for a job that no shard has requested yet is pending") {
    Fixture f;
    const auto answers = f.wait(1);
    f.reserve(0, 1);
    f.publish(0, 1);
    CHECK(answers->empty());
    f.reserve(1, 1);
    CHECK(answers->empty());

    f.publish(1, 1);

    CHECK(f.is_over(*answers));
  }

  TEST_CASE("the jobs before it count too, in any order of their ends") {
    Fixture f;
    for (const std::uint64_t number : {1, 2, 3}) {
      f.reserve(0, number);
      f.reserve(1, number);
    }
    const auto second = f.wait(2);
    const auto third = f.wait(3);
    f.publish(0, 2);
    f.publish(1, 2);
    CHECK(second->empty());

    f.publish(0, 1);
    f.publish(1, 1);

    CHECK(f.is_over(*second));
    CHECK(third->empty());
  }

  TEST_CASE("it reports the last job up to which all are over, and up to which all have begun") {
    Fixture f;
    const auto over = [&] { return f.waits.reached(kScheduler); };
    const auto begun = [&] { return f.waits.reached(kScheduler, JobWaits::Until::kBegun); };
    CHECK(over() == 0);
    CHECK(begun() == 0);
    CHECK(f.waits.reached({4, 5}) == 0);  // It is not attached.
    for (const std::uint64_t number : {1, 2, 3}) {
      f.reserve(0, number);
      f.reserve(1, number);
    }
    f.reserve(0, 4);
    CHECK(over() == 0);
    CHECK(begun() == 3);

    f.publish(0, 2);
    f.publish(1, 2);
    CHECK(over() == 0);
    f.publish(0, 1);
    f.publish(1, 1);

    CHECK(over() == 2);
    CHECK(begun() == 3);
    f.waits.detached(kScheduler);
    CHECK(over() == 0);
  }

  TEST_CASE("a job that is dropped is over, and so is one that nothing was reserved for") {
    Fixture f(4, 1);
    f.reserve(0, 1);
    const auto first = f.wait(1);
    const auto third = f.wait(3);
    f.f.store->abandon(f.ranks[0], f.job(1));
    f.waits.settle();
    CHECK(f.is_over(*first));

    // All keys are there already: one rank alone leaves no job.
    f.reserve(0, 2);
    f.publish(0, 2);
    REQUIRE(f.f.store->reserve(f.ranks[0], f.space, f.job(3), 0, keys(2, 1)));
    f.waits.begun(f.job(3), 0, 1, false);
    f.waits.settle();

    CHECK(f.is_over(*third));
  }

  TEST_CASE("a job that the reset of its namespace forgets is over at once") {
    Fixture f;
    f.reserve(0, 1);
    f.reserve(1, 1);
    const auto answers = f.wait(1);

    f.f.store->retire_space(f.space);
    f.waits.settle();

    CHECK(f.is_over(*answers));
  }

  TEST_CASE("a wait ends with its patience, and with the longest wait") {
    Fixture f;
    const auto impatient = f.wait(1, milliseconds(5));
    const auto greedy = f.wait(1, std::chrono::hours(1));
    CHECK(f.waits.next_deadline() == f.f.clock.now() + milliseconds(5));
    CHECK(f.code(*f.wait(1, Duration::zero())) == Errc::kTimeout);

    f.f.clock.advance(milliseconds(5));
    f.waits.expire();
    CHECK(f.code(*impatient) == Errc::kTimeout);
    CHECK(greedy->empty());
    f.f.clock.advance(JobWaits::kLongest);
    f.waits.expire();

    CHECK(f.code(*greedy) == Errc::kTimeout);
    CHECK(f.waits.stats().timed_out == 3);
  }

  TEST_CASE("waits beyond the limit are refused, and there is room again after an answer") {
    Fixture f(2);
    const auto first = f.wait(1);
    const auto second = f.wait(2);
    CHECK(f.code(*f.wait(3)) == Errc::kBusy);
    CHECK(f.waits.stats().busy == 1);
    CHECK(f.waits.stats().waiting == 2);
    f.reserve(0, 1);
    f.reserve(1, 1);
    f.publish(0, 1);
    f.publish(1, 1);
    REQUIRE(f.is_over(*first));

    CHECK(f.wait(3)->empty());
  }

  TEST_CASE("waits for a scheduler that is not attached, or disconnects, end") {
    Fixture f;
    const auto answers = f.wait(1);
    f.waits.attached(kScheduler);  // Its next connection, before the end of this one is seen.
    f.waits.detached(kScheduler);
    CHECK(answers->empty());

    f.waits.detached(kScheduler);

    CHECK(f.code(*answers) == Errc::kGone);
    CHECK(f.code(*f.wait(1)) == Errc::kGone);
    CHECK_FALSE(f.waits.is_attached(kScheduler));
    f.waits.detached(kScheduler);
    f.waits.lost(kScheduler);
    f.waits.attached({});
    CHECK_FALSE(f.waits.is_attached({}));
  }

  TEST_CASE("a wait ends when a rank of the engine disconnects, since nothing can be sealed") {
    Fixture f;
    const auto answers = f.wait(1);
    f.waits.lost(kScheduler);
    CHECK(f.code(*answers) == Errc::kGone);

    std::optional<Result<void>> later;
    f.waits.wait(kReader, f.job(1), false, seconds(1),
                 [&](Result<void> answer) { later = std::move(answer); });

    REQUIRE(later);
    CHECK(later->error().code == Errc::kGone);
    CHECK(f.waits.stats().gone == 2);
  }

  TEST_CASE("a caller that disconnects is answered, and other waits continue") {
    Fixture f;
    const auto left = f.wait(1);
    const auto stays = f.wait(1, seconds(2), Id128{8, 8});

    f.waits.forget(kReader);

    CHECK(f.code(*left) == Errc::kCancelled);
    CHECK(stays->empty());
    CHECK(f.waits.stats().waiting == 1);
    CHECK(f.waits.stats().cancelled == 1);
  }

  TEST_CASE("the destructor answers all waits") {
    std::shared_ptr<std::vector<Result<void>>> answers;
    {
      Fixture f;
      answers = f.wait(1);
    }
    CHECK(Fixture::code(*answers) == Errc::kCancelled);
  }

  TEST_CASE("the record of a scheduler's jobs is bounded") {
    // More jobs in flight than the limit: the oldest count as over.
    StoreFixture f({.pool_bytes = (JobWaits::kMaxBegun + 8) * kPage});
    JobWaits waits(*f.store, f.clock, 4);
    waits.attached(kScheduler);
    const auto begin = [&](std::uint64_t number) {
      const JobId job{kScheduler, number};
      REQUIRE(f.store->reserve(f.holder, f.space, job, 0, keys(number, 1)));
      waits.begun(job, 0, 1, false);
    };
    for (std::uint64_t number = 1; number <= JobWaits::kMaxBegun; ++number) begin(number);
    bool is_first_over = false;
    waits.wait(kReader, {kScheduler, 1}, true, seconds(1),
               [&](const Result<void>& answer) { is_first_over = answer.has_value(); });
    waits.settle();
    CHECK_FALSE(is_first_over);

    begin(JobWaits::kMaxBegun + 1);
    waits.settle();

    CHECK(is_first_over);
  }

  TEST_CASE("the record of jobs that not all shards request is bounded") {
    Fixture f;
    // The first job is unknown, and the second shard requests nothing.
    const auto second = f.wait(2);
    for (std::uint64_t number = 2; number <= JobWaits::kMaxBegun + 1; ++number) {
      f.waits.begun(f.job(number), 0, 2, false, {true, false});
    }
    f.waits.settle();
    CHECK(second->empty());

    f.waits.begun(f.job(JobWaits::kMaxBegun + 2), 0, 2, false, {true, false});
    f.waits.settle();

    CHECK(f.is_over(*second));
  }
}

TEST_CASE("a wait for the begin of a job ends when all ranks have requested its slots") {
  Fixture f;
  const auto begun = f.wait_begun(1);
  const auto over = f.wait(1);
  f.reserve(0, 1);
  CHECK(begun->empty());
  f.reserve(1, 1);
  CHECK(Fixture::is_over(*begun));
  CHECK(over->empty());
  CHECK(Fixture::is_over(*f.wait_begun(1)));
  const auto next = f.wait_begun(2);
  f.publish(0, 1);
  f.publish(1, 1);
  CHECK(Fixture::is_over(*over));
  CHECK(next->empty());
  f.waits.lost(kScheduler);
  CHECK(Fixture::code(*next) == Errc::kGone);
}

TEST_CASE("a wait for the begin of a job ends with its patience and with its connection") {
  Fixture f;
  const auto late = f.wait_begun(1, milliseconds(5));
  f.f.clock.advance(milliseconds(6));
  f.waits.expire();
  CHECK(Fixture::code(*late) == Errc::kTimeout);
  const auto cancelled = f.wait_begun(1);
  f.waits.forget(kReader);
  CHECK(Fixture::code(*cancelled) == Errc::kCancelled);
}

}  // namespace
}  // namespace pegaflow::server
