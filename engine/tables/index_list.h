#pragma once
/// \file
/// Doubly linked lists through the rows of a table: no memory of their own, removal in O(1).

#include <cstdint>

namespace pegaflow::engine {

/// The place of one row in one IndexList. All zero bytes: first or last of nothing.
struct IndexLink {
  std::uint32_t previous_plus_1 = 0;
  std::uint32_t next_plus_1 = 0;
};

/// A list of row numbers, linked through the member `kLink` of the rows. The table is passed to
/// each call (anything with operator[]), so a list is 16 bytes and can live in a row itself.
template <auto kLink>
class IndexList {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  [[nodiscard]] bool is_empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  /// kNone when it is empty.
  [[nodiscard]] std::uint32_t front() const noexcept { return front_plus_1_ - 1; }
  [[nodiscard]] std::uint32_t back() const noexcept { return back_plus_1_ - 1; }

  template <typename Rows>
  [[nodiscard]] static std::uint32_t next(const Rows& rows, std::uint32_t row) noexcept {
    return (rows[row].*kLink).next_plus_1 - 1;
  }
  template <typename Rows>
  [[nodiscard]] static std::uint32_t previous(const Rows& rows, std::uint32_t row) noexcept {
    return (rows[row].*kLink).previous_plus_1 - 1;
  }

  template <typename Rows>
  void push_back(Rows& rows, std::uint32_t row) noexcept {
    rows[row].*kLink = {back_plus_1_, 0};
    if (back_plus_1_ != 0) {
      (rows[back()].*kLink).next_plus_1 = row + 1;
    } else {
      front_plus_1_ = row + 1;
    }
    back_plus_1_ = row + 1;
    ++size_;
  }

  /// `row` is in this list.
  template <typename Rows>
  void erase(Rows& rows, std::uint32_t row) noexcept {
    const IndexLink link = rows[row].*kLink;
    if (link.previous_plus_1 != 0) {
      (rows[link.previous_plus_1 - 1].*kLink).next_plus_1 = link.next_plus_1;
    } else {
      front_plus_1_ = link.next_plus_1;
    }
    if (link.next_plus_1 != 0) {
      (rows[link.next_plus_1 - 1].*kLink).previous_plus_1 = link.previous_plus_1;
    } else {
      back_plus_1_ = link.previous_plus_1;
    }
    rows[row].*kLink = {};
    --size_;
  }

 private:
  std::uint32_t front_plus_1_ = 0;
  std::uint32_t back_plus_1_ = 0;
  std::uint32_t size_ = 0;
};

}  // namespace pegaflow::engine
