#include "engine/rights/lease_table.h"

#include <utility>

namespace pegaflow::engine {

std::uint32_t LeaseTable::find(LeaseId id) const {
  const auto row =
      static_cast<std::uint32_t>(static_cast<std::uint64_t>(id) & ((1U << kRowBits) - 1));
  return id != LeaseId{} && rows_.knows(row) && rows_[row].id == id ? row : kNone;
}

LeaseId LeaseTable::add(Lease lease) {
  const std::uint32_t row = rows_.add();
  lease.id = LeaseId{next_serial_++ << kRowBits | row};
  blocks_ += lease.blocks.size();
  bytes_ += lease.blocks.size() * lease.frame_bytes;
  by_end_.emplace(lease.end, lease.id);
  rows_[row] = std::move(lease);
  by_age_.push_back(rows_, row);
  return rows_[row].id;
}

Lease LeaseTable::remove(std::uint32_t row) {
  by_age_.erase(rows_, row);
  by_end_.erase({rows_[row].end, rows_[row].id});
  Lease lease = std::move(rows_[row]);
  rows_.remove(row);
  blocks_ -= lease.blocks.size();
  bytes_ -= lease.blocks.size() * lease.frame_bytes;
  return lease;
}

}  // namespace pegaflow::engine
