#include "client/question_table.h"

#include <utility>

namespace pegaflow {

Result<QuestionTable::Ticket> QuestionTable::add() {
  const std::lock_guard lock(mutex_);
  if (rows_.size() >= capacity_) {
    return fail(Errc::kBusy, "{} questions are under way or not taken", rows_.size());
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
    if (patience <= Duration::zero() || !answered_.wait_for(lock, patience, is_decided)) {
      return std::nullopt;
    }
  }
  auto row = rows_.extract(key);
  if (row.empty()) return Result<Outcome>(fail(Errc::kGone, "nobody asks by ticket {}", key));
  return std::move(row.mapped());
}

std::optional<QuestionTable::Outcome> QuestionTable::forget(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  auto row = rows_.extract(static_cast<std::uint64_t>(ticket));
  if (row.empty() || !row.mapped() || !*row.mapped()) return std::nullopt;
  return **row.mapped();
}

}  // namespace pegaflow
