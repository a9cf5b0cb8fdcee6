#pragma once
/// \file
/// The claims: by token, by age, and which of them is revoked first.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/clock.h"
#include "base/error.h"
#include "engine/rights/rows.h"
#include "engine/tables/flat_index.h"
#include "engine/tables/row_table.h"

namespace pegaflow::engine {

/// Keeps each claim in its lists: by age, unopened, of its holder, of its generation.
class ClaimTable {
 public:
  static constexpr std::uint32_t kNone = FlatIndex::kNone;

  /// Errors: kOutOfCapacity.
  static Result<ClaimTable> create(std::uint32_t max_claims);

  [[nodiscard]] bool is_full() const noexcept { return !has_room_for(1); }
  [[nodiscard]] bool has_room_for(std::size_t claims) const noexcept {
    return claims <= max_claims_ - rows_.size();
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return rows_.size(); }
  [[nodiscard]] std::uint32_t find(const Id128& token) const;
  /// The row of a claim that may be opened, or kNone. It may not once its holder has left or its
  /// generation was retired, even if the queued work has not reached the claim yet.
  [[nodiscard]] std::uint32_t openable(const Id128& token) const;
  /// The row if it is still the claim with that serial.
  [[nodiscard]] std::uint32_t find(std::uint32_t row, std::uint64_t serial) const;
  /// Its token is not in use and the table is not full. Its serial and lists are set here.
  std::uint32_t add(Claim claim);
  /// Appends blocks to the claim.
  void extend(std::uint32_t row, std::span<const FrameIndex> more);
  /// The claims of `row` and of `other`, which is alone, are revoked together from now on.
  void join(std::uint32_t row, std::uint32_t other);
  /// Marks it and those that are revoked together with it.
  void mark_opened(std::uint32_t row);
  /// Counts blocks of the claim's size that were pinned through it, or are no longer pinned.
  void add_pinned(std::uint32_t row, std::size_t blocks) {
    Claim& claim = rows_[row];
    claim.pinned_bytes += blocks * claim.frame_bytes;
  }
  void drop_pinned(std::uint32_t row, std::size_t blocks) {
    Claim& claim = rows_[row];
    claim.pinned_bytes -= blocks * claim.frame_bytes;
  }
  /// Removes the claim from every list and returns it.
  Claim remove(std::uint32_t row);

  /// The claim to revoke first: the oldest that was not opened within `grace`, else the oldest.
  [[nodiscard]] std::uint32_t first_to_revoke(TimePoint now, Duration grace) const;

  [[nodiscard]] const Claim& operator[](std::uint32_t row) const noexcept { return rows_[row]; }
  [[nodiscard]] std::uint32_t oldest() const noexcept { return by_age_.front(); }
  [[nodiscard]] std::uint32_t newer(std::uint32_t row) const { return by_age_.next(rows_, row); }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return rows_.memory_bytes() + by_token_.memory_bytes();
  }

 private:
  ClaimTable(std::uint32_t max_claims, FlatIndex by_token);

  std::uint32_t max_claims_;
  std::uint64_t next_serial_ = 1;
  RowTable<Claim> rows_;
  FlatIndex by_token_;
  IndexList<&Claim::by_age> by_age_;      ///< Oldest first.
  IndexList<&Claim::unopened> unopened_;  ///< Oldest first.
};

}  // namespace pegaflow::engine
