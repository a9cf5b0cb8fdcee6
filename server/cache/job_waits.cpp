#include "server/cache/job_waits.h"

#include <algorithm>
#include <functional>

#include "base/assert.h"

namespace pegaflow::server {

JobWaits::JobWaits(const engine::BlockStore& store, const Clock& clock, std::size_t max_waits)
    : store_(store), clock_(clock), max_waits_(max_waits) {}

JobWaits::~JobWaits() {
  while (!waits_.empty()) {
    answer(waits_.begin()->first, fail(Errc::kCancelled, "the server stops"));
  }
}

void JobWaits::attached(const Id128& scheduler) {
  if (!scheduler.is_none()) ++schedulers_[scheduler].connections;
}

void JobWaits::detached(const Id128& scheduler) {
  const auto found = schedulers_.find(scheduler);
  if (found == schedulers_.end() || --found->second.connections != 0) return;
  answer_all(found->second, {Errc::kGone, "the scheduler of the job disconnected"});
  schedulers_.erase(found);
}

bool JobWaits::is_attached(const Id128& scheduler) const { return schedulers_.contains(scheduler); }

void JobWaits::begun(const JobId& job, std::uint32_t shard, std::uint32_t shards, bool has_more,
                     const std::vector<bool>& requesters) {
  const auto found = schedulers_.find(job.scheduler);
  if (found == schedulers_.end()) return;
  Scheduler& scheduler = found->second;
  if (scheduler.asked.size() != shards) {
    scheduler.asked.resize(shards, 0);
    scheduler.requested = 0;
    scheduler.requesters.clear();
  }
  PEGA_ASSERT(shard < shards, "shard {} of {}", shard, shards);
  // A slice whose blocks are all there leaves no row in the store: without the last one the job
  // would count as over while others are still to be saved.
  if (!has_more) scheduler.asked[shard] = std::max(scheduler.asked[shard], job.number);
  if (!requesters.empty()) {
    PEGA_ASSERT(requesters.size() == shards, "{} of {} shards", requesters.size(), shards);
    scheduler.requesters.try_emplace(job.number, requesters);
  }
  advance_requested(scheduler);
  // Mostly one job at a time is in flight, so finished ones are removed at once, without a wait.
  static_cast<void>(over_up_to(job.scheduler, scheduler));
  if (!store_.is_saving(job)) return;
  scheduler.begun.insert(job.number);
  if (scheduler.begun.size() <= kMaxBegun) return;
  std::erase_if(scheduler.begun, [&](std::uint64_t number) {
    return !store_.is_saving({job.scheduler, number});
  });
  if (scheduler.begun.size() > kMaxBegun) scheduler.begun.erase(scheduler.begun.begin());
}

void JobWaits::advance_requested(Scheduler& scheduler) {
  const std::vector<std::uint64_t>& asked = scheduler.asked;
  std::uint64_t& requested = scheduler.requested;
  requested = std::max(requested, *std::min_element(asked.begin(), asked.end()));
  auto& jobs = scheduler.requesters;
  if (jobs.size() > kMaxBegun) requested = std::max(requested, jobs.begin()->first);
  const auto is_requested = [&](const auto& job) {
    for (std::size_t shard = 0; shard < asked.size(); ++shard) {
      if (job.second[shard] && asked[shard] < job.first) return false;
    }
    return true;
  };
  while (!jobs.empty() && jobs.begin()->first <= requested + 1) {
    if (jobs.begin()->first > requested && !is_requested(*jobs.begin())) return;
    requested = std::max(requested, jobs.begin()->first);
    jobs.erase(jobs.begin());
  }
}

void JobWaits::lost(const Id128& scheduler) {
  const auto found = schedulers_.find(scheduler);
  if (found == schedulers_.end()) return;
  answer_all(found->second, {Errc::kGone, "a rank of the job's engine disconnected"});
}

std::uint64_t JobWaits::over_up_to(const Id128& name, Scheduler& scheduler) const {
  std::set<std::uint64_t>& begun = scheduler.begun;
  while (!begun.empty() && !store_.is_saving({name, *begun.begin()})) begun.erase(begun.begin());
  return begun.empty() ? scheduler.requested : std::min(scheduler.requested, *begun.begin() - 1);
}

void JobWaits::wait(const Id128& connection, const JobId& job, bool is_served, Duration patience,
                    Answer answer, Until until) {
  const auto refuse = [&](Result<void> result) {
    count(result);
    answer(std::move(result));
  };
  const auto found = schedulers_.find(job.scheduler);
  if (found == schedulers_.end()) {
    return refuse(fail(Errc::kGone, "the scheduler of job {} is not attached", job.number));
  }
  if (!is_served) {
    return refuse(fail(Errc::kGone, "a rank of the engine of job {} is not connected", job.number));
  }
  if (reached(job.scheduler, until) >= job.number) return refuse({});
  if (patience <= Duration::zero()) {
    return refuse(fail(Errc::kTimeout, "job {} is not over", job.number));
  }
  if (waits_.size() >= max_waits_) {
    return refuse(fail(Errc::kBusy, "{} calls wait for jobs already", waits_.size()));
  }
  const WaitId id{++last_id_};
  const TimePoint deadline = clock_.now() + std::min(patience, kLongest);
  waits_.emplace(id, Wait{connection, job, deadline, std::move(answer), until});
  by_deadline_.emplace(deadline, id);
  found->second.waits_for(until).emplace(job.number, id);
}

std::uint64_t JobWaits::reached(const Id128& scheduler, Until until) {
  const auto found = schedulers_.find(scheduler);
  if (found == schedulers_.end()) return 0;
  return until == Until::kBegun ? found->second.requested : over_up_to(scheduler, found->second);
}

void JobWaits::answer(WaitId id, Result<void> result) {
  auto row = waits_.extract(id);
  PEGA_ASSERT(!row.empty(), "wait {} was answered twice", static_cast<std::uint64_t>(id));
  const Wait& wait = row.mapped();
  by_deadline_.erase({wait.deadline, id});
  auto& waits = schedulers_.at(wait.job.scheduler).waits_for(wait.until);
  const auto [begin, end] = waits.equal_range(wait.job.number);
  waits.erase(std::find_if(begin, end, [&](const auto& each) { return each.second == id; }));
  count(result);
  wait.answer(std::move(result));
}

void JobWaits::answer_all(Scheduler& scheduler, const Error& why) {
  for (const Until until : {Until::kOver, Until::kBegun}) {
    auto& waits = scheduler.waits_for(until);
    while (!waits.empty()) answer(waits.begin()->second, tl::unexpected<Error>(why));
  }
}

void JobWaits::count(const Result<void>& result) {
  if (result) {
    ++counted_.over;
  } else if (result.error().code == Errc::kGone) {
    ++counted_.gone;
  } else if (result.error().code == Errc::kTimeout) {
    ++counted_.timed_out;
  } else if (result.error().code == Errc::kBusy) {
    ++counted_.busy;
  } else {
    ++counted_.cancelled;
  }
}

void JobWaits::forget(const Id128& connection) {
  for (auto row = waits_.begin(); row != waits_.end();) {
    const auto [id, wait] = std::pair(row->first, std::cref(row->second));
    ++row;
    if (wait.get().connection == connection) {
      answer(id, fail(Errc::kCancelled, "the connection has ended"));
    }
  }
}

void JobWaits::settle() {
  if (waits_.empty()) return;
  for (auto& [name, scheduler] : schedulers_) {
    auto& begun = scheduler.begun_waits;
    while (!begun.empty() && begun.begin()->first <= scheduler.requested) {
      answer(begun.begin()->second, {});
    }
    if (scheduler.waits.empty()) continue;
    const std::uint64_t over = over_up_to(name, scheduler);
    while (!scheduler.waits.empty() && scheduler.waits.begin()->first <= over) {
      answer(scheduler.waits.begin()->second, {});
    }
  }
}

std::optional<TimePoint> JobWaits::next_deadline() const {
  if (by_deadline_.empty()) return std::nullopt;
  return by_deadline_.begin()->first;
}

void JobWaits::expire() {
  const TimePoint now = clock_.now();
  while (!by_deadline_.empty() && by_deadline_.begin()->first <= now) {
    answer(by_deadline_.begin()->second, fail(Errc::kTimeout, "the job is not over yet"));
  }
}

JobWaits::Stats JobWaits::stats() const {
  Stats stats = counted_;
  stats.waiting = waits_.size();
  return stats;
}

}  // namespace pegaflow::server
