#include "engine/eviction/lru.h"

namespace pegaflow::engine {

void LruPolicy::sealed(std::uint32_t row, std::uint32_t /*hash*/) { released(row); }

void LruPolicy::taken(std::uint32_t row) { evictable_.erase(rows_, row); }

void LruPolicy::released(std::uint32_t row) {
  rows_.stamp(row);
  evictable_.push_back(rows_, row);
}

void LruPolicy::freed(std::uint32_t row, std::uint32_t /*hash*/, Freed /*why*/) {
  evictable_.erase(rows_, row);
}

void LruPolicy::next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const {
  std::uint32_t row = evictable_.front();
  for (; row != kNone && most != 0; row = evictable_.next(rows_, row), --most) rows.push_back(row);
}

Result<void> LruPolicy::check(const std::function<bool(std::uint32_t)>& is_evictable) const {
  std::uint32_t listed = 0;
  std::uint32_t age = ~std::uint32_t{0};
  for (std::uint32_t row = evictable_.front(); row != kNone; row = evictable_.next(rows_, row)) {
    if (!is_evictable(row) || ++listed > evictable_.size()) {
      return fail(Errc::kInternal, "row {} is listed as evictable and is not", row);
    }
    if (rows_.age(row) >= age) {
      return fail(Errc::kInternal, "row {} is older than the one before it", row);
    }
    age = rows_.age(row);
  }
  if (listed != evictable_.size()) return fail(Errc::kInternal, "the list of rows is broken");
  return {};
}

}  // namespace pegaflow::engine
