#include "engine/rights/claim_table.h"

#include <utility>

namespace pegaflow::engine {

namespace {

std::uint32_t hash(const Id128& token) noexcept { return mix_hash(token.high, token.low); }

}  // namespace

Result<ClaimTable> ClaimTable::create(std::uint32_t max_claims) {
  PEGA_TRY_LET(auto by_token, FlatIndex::create(max_claims));
  return ClaimTable(max_claims, std::move(by_token));
}

ClaimTable::ClaimTable(std::uint32_t max_claims, FlatIndex by_token)
    : max_claims_(max_claims), by_token_(std::move(by_token)) {}

std::uint32_t ClaimTable::find(const Id128& token) const {
  return by_token_.find(hash(token), [&](std::uint32_t row) { return rows_[row].token == token; });
}

std::uint32_t ClaimTable::openable(const Id128& token) const {
  const std::uint32_t row = find(token);
  if (row == kNone) return row;
  const Claim& claim = rows_[row];
  const bool is_doomed = claim.holder->is_lost || claim.holder->is_gone || claim.space->is_retired;
  return is_doomed ? kNone : row;
}

std::uint32_t ClaimTable::find(std::uint32_t row, std::uint64_t serial) const {
  return rows_[row].serial == serial ? row : kNone;
}

std::uint32_t ClaimTable::add(Claim claim) {
  const std::uint32_t row = rows_.add();
  claim.serial = next_serial_++;
  by_token_.insert(hash(claim.token), row);
  rows_[row] = std::move(claim);
  rows_[row].next_together = row;
  by_age_.push_back(rows_, row);
  unopened_.push_back(rows_, row);
  rows_[row].holder->claims.push_back(rows_, row);
  rows_[row].space->claims.push_back(rows_, row);
  return row;
}

void ClaimTable::extend(std::uint32_t row, std::span<const FrameIndex> more) {
  rows_[row].blocks = FrameList(rows_[row].blocks, more);
}

void ClaimTable::join(std::uint32_t row, std::uint32_t other) {
  rows_[other].next_together = std::exchange(rows_[row].next_together, other);
}

void ClaimTable::mark_opened(std::uint32_t row) {
  for (; !rows_[row].is_opened; row = rows_[row].next_together) {
    unopened_.erase(rows_, row);
    rows_[row].is_opened = true;
  }
}

Claim ClaimTable::remove(std::uint32_t row) {
  std::uint32_t before = row;  // At most one claim for each kind of blocks is in the ring.
  while (rows_[before].next_together != row) before = rows_[before].next_together;
  rows_[before].next_together = rows_[row].next_together;
  by_token_.erase(hash(rows_[row].token), row);
  by_age_.erase(rows_, row);
  if (!rows_[row].is_opened) unopened_.erase(rows_, row);
  rows_[row].holder->claims.erase(rows_, row);
  rows_[row].space->claims.erase(rows_, row);
  Claim claim = std::move(rows_[row]);
  rows_.remove(row);
  return claim;
}

std::uint32_t ClaimTable::first_to_revoke(TimePoint now, Duration grace) const {
  const std::uint32_t unopened = unopened_.front();
  if (unopened != kNone && now - rows_[unopened].made >= grace) return unopened;
  return by_age_.front();
}

}  // namespace pegaflow::engine
