#include "engine/eviction/slru.h"

namespace pegaflow::engine {

namespace {

constexpr std::uint32_t kRowsPerProtected = 5;

}  // namespace

void SlruPolicy::sealed(std::uint32_t row, std::uint32_t /*hash*/) {
  rows_[row].note = 0;
  ++known_;
  released(row);
}

void SlruPolicy::taken(std::uint32_t row) {
  list(row).erase(rows_, row);
  rows_[row].note = kProtected;
}

void SlruPolicy::released(std::uint32_t row) {
  rows_.stamp(row);
  list(row).push_back(rows_, row);
  // At most one row too many, except after rows were freed.
  while (protected_.size() > known_ / kRowsPerProtected && !protected_.is_empty()) {
    const std::uint32_t oldest = protected_.front();
    protected_.erase(rows_, oldest);
    rows_[oldest].note = 0;
    new_.push_back(rows_, oldest);
  }
}

void SlruPolicy::freed(std::uint32_t row, std::uint32_t /*hash*/, Freed /*why*/) {
  list(row).erase(rows_, row);
  rows_[row].note = 0;
  --known_;
}

std::uint32_t SlruPolicy::victim() { return new_.is_empty() ? protected_.front() : new_.front(); }

void SlruPolicy::next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const {
  for (const List* const list : {&new_, &protected_}) {
    std::uint32_t row = list->front();
    for (; row != kNone && most != 0; row = list->next(rows_, row), --most) rows.push_back(row);
  }
}

Result<void> SlruPolicy::check(const std::function<bool(std::uint32_t)>& is_evictable) const {
  for (const List* const list : {&new_, &protected_}) {
    std::uint32_t listed = 0;
    for (std::uint32_t row = list->front(); row != kNone; row = list->next(rows_, row)) {
      if (!is_evictable(row) || ++listed > list->size()) {
        return fail(Errc::kInternal, "row {} is listed as evictable and is not", row);
      }
      if ((rows_[row].note == kProtected) != (list == &protected_)) {
        return fail(Errc::kInternal, "row {} is in the wrong list", row);
      }
    }
    if (listed != list->size()) return fail(Errc::kInternal, "a list of rows is broken");
  }
  if (size() > known_) return fail(Errc::kInternal, "{} of {} rows are listed", size(), known_);
  return {};
}

}  // namespace pegaflow::engine
