#include "engine/eviction/use_lists.h"

#include <cmath>

namespace pegaflow::engine {

void UseLists::set_exponent(double exponent) {
  exponent_ = exponent;
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) weights_[uses] = std::pow(uses, -exponent);
}

UseLists::Oldest UseLists::oldest(const BlockRows& rows) const noexcept {
  Oldest best;
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
    const std::uint32_t row = lists_[uses].front();
    if (row == kNone) continue;
    const double age = (rows.age(row) + 1.0) * weights_[uses];
    if (age > best.age) best = {.row = row, .age = age};
  }
  return best;
}

void UseLists::next(const BlockRows& rows, std::size_t most,
                    std::vector<std::uint32_t>& next_rows) const {
  std::array<std::uint32_t, kMaxUses + 1> next{};
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) next[uses] = lists_[uses].front();
  for (; most != 0; --most) {
    std::uint32_t best = 0;
    double oldest = 0;
    for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
      if (next[uses] == kNone) continue;
      const double age = (rows.age(next[uses]) + 1.0) * weights_[uses];
      if (age <= oldest) continue;
      oldest = age;
      best = uses;
    }
    if (best == 0) return;
    next_rows.push_back(next[best]);
    next[best] = lists_[best].next(rows, next[best]);
  }
}

Result<void> UseLists::check(const BlockRows& rows,
                             const std::function<std::uint32_t(std::uint32_t)>& uses_of,
                             const std::function<bool(std::uint32_t)>& is_evictable) const {
  std::uint32_t listed = 0;
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
    const auto& list = lists_[uses];
    for (std::uint32_t row = list.front(); row != kNone; row = list.next(rows, row)) {
      if (!is_evictable(row) || ++listed > size_) {
        return fail(Errc::kInternal, "row {} is listed as evictable and is not", row);
      }
      if (uses_of(row) != uses) {
        return fail(Errc::kInternal, "row {} has {} uses and is listed under {}", row, uses_of(row),
                    uses);
      }
      const std::uint32_t next = list.next(rows, row);
      if (next != kNone && rows.age(next) >= rows.age(row)) {
        return fail(Errc::kInternal, "row {} is older than the one before it", next);
      }
    }
  }
  if (listed != size_) {
    return fail(Errc::kInternal, "{} rows are listed, {} counted", listed, size_);
  }
  return {};
}

}  // namespace pegaflow::engine
