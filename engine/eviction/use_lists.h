#pragma once
/// \file
/// Evictable rows by their number of uses, and the one whose age weighs most.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/error.h"
#include "engine/tables/block_row.h"
#include "engine/tables/index_list.h"

namespace pegaflow::engine {

/// One list for each number of uses, oldest row first. The next victim is the row with the greatest
/// age divided by uses^k. Thread-bound.
class UseLists {
 public:
  static constexpr std::uint32_t kMaxUses = 8;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  /// k: 0 is LRU.
  void set_exponent(double exponent);
  [[nodiscard]] double exponent() const noexcept { return exponent_; }
  /// uses^-k
  [[nodiscard]] double weight(std::uint32_t uses) const noexcept { return weights_[uses]; }

  /// `uses` is 1 to kMaxUses, and the same when the row is erased.
  void push_back(BlockRows& rows, std::uint32_t row, std::uint32_t uses) noexcept {
    lists_[uses].push_back(rows, row);
    ++size_;
  }
  void erase(BlockRows& rows, std::uint32_t row, std::uint32_t uses) noexcept {
    lists_[uses].erase(rows, row);
    --size_;
  }
  /// Whether the row is younger than all others with so many uses, as push_back() requires.
  [[nodiscard]] bool may_follow(const BlockRows& rows, std::uint32_t row,
                                std::uint32_t uses) const noexcept {
    const std::uint32_t last = lists_[uses].back();
    return last == kNone || rows.age(row) < rows.age(last);
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }

  struct Oldest {
    std::uint32_t row = kNone;
    double age = 0;  ///< Weighted; more than 0 if there is a row.
  };
  [[nodiscard]] Oldest oldest(const BlockRows& rows) const noexcept;
  /// Appends the next rows, at most `most`, as if nothing happened in between.
  void next(const BlockRows& rows, std::size_t most, std::vector<std::uint32_t>& next_rows) const;
  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] Result<void> check(const BlockRows& rows,
                                   const std::function<std::uint32_t(std::uint32_t)>& uses_of,
                                   const std::function<bool(std::uint32_t)>& is_evictable) const;

 private:
  std::array<IndexList<&Block::place>, kMaxUses + 1> lists_;
  std::array<double, kMaxUses + 1> weights_{};
  std::uint32_t size_ = 0;
  double exponent_ = 0;
};

}  // namespace pegaflow::engine
