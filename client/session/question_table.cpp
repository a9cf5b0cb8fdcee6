#include "client/session/question_table.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace pegaflow {
namespace {

/// The time for which a waiting caller polls for its answer before it sleeps. A small question is
/// answered in half of it, and a sleeping core takes as long again to wake up.
constexpr Duration kPollTime = std::chrono::microseconds(100);

}  // namespace

Result<QuestionTable::Ticket> QuestionTable::add() {
  const std::lock_guard lock(mutex_);
  if (rows_.size() >= capacity_) {
    return fail(Errc::kBusy, "{} questions are pending or not taken", rows_.size());
  }
  rows_.emplace(++last_, std::nullopt);
  return Ticket{last_};
}

bool QuestionTable::answer(Ticket ticket, Result<Outcome> outcome) {
  {
    const std::lock_guard lock(mutex_);
    const auto row = rows_.find(static_cast<std::uint64_t>(ticket));
    if (row == rows_.end()) return false;
    row->second = std::move(outcome);
    events_.fetch_add(1, std::memory_order_release);
  }
  answered_.notify_all();
  return true;
}

std::optional<Result<QuestionTable::Outcome>> QuestionTable::take(Ticket ticket,
                                                                  Duration patience) {
  const std::uint64_t key = static_cast<std::uint64_t>(ticket);
  std::unique_lock lock(mutex_);
  const auto is_decided = [&] {
    const auto row = rows_.find(key);
    return row == rows_.end() || row->second.has_value();
  };
  if (!is_decided()) {
    if (patience <= Duration::zero()) return std::nullopt;
    const Duration awake = std::min(patience, kPollTime);
    poll(lock, awake, is_decided);
    if (!answered_.wait_for(lock, patience - awake, is_decided)) return std::nullopt;
  }
  auto row = rows_.extract(key);
  if (row.empty()) return Result<Outcome>(fail(Errc::kGone, "unknown ticket {}", key));
  return std::move(row.mapped());
}

template <typename Decided>
void QuestionTable::poll(std::unique_lock<std::mutex>& lock, Duration patience, Decided decided) {
  const auto begin = std::chrono::steady_clock::now();
  do {
    const std::uint64_t seen = events_.load(std::memory_order_relaxed);
    lock.unlock();
    // The answering thread may need this core.
    while (events_.load(std::memory_order_acquire) == seen &&
           std::chrono::steady_clock::now() - begin < patience) {
      std::this_thread::yield();
    }
    lock.lock();
  } while (!decided() && std::chrono::steady_clock::now() - begin < patience);
}

bool QuestionTable::await_event(std::uint64_t seen, Duration patience) {
  std::unique_lock lock(mutex_);
  return answered_.wait_for(lock, patience, [&] { return events() != seen; });
}

void QuestionTable::interrupt() {
  {
    const std::lock_guard lock(mutex_);
    events_.fetch_add(1, std::memory_order_release);
  }
  answered_.notify_all();
}

std::optional<QuestionTable::Outcome> QuestionTable::forget(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  auto row = rows_.extract(static_cast<std::uint64_t>(ticket));
  if (row.empty() || !row.mapped() || !*row.mapped()) return std::nullopt;
  return **row.mapped();
}

}  // namespace pegaflow
