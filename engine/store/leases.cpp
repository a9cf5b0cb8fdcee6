#include "engine/store/leases.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace pegaflow::engine {

Leases::Leases(const BlockStore::Options& options, const Clock& clock, ResidentBlocks& blocks,
               SpaceTable& spaces, Reclaimer& reclaimer)
    : options_(options),
      clock_(clock),
      blocks_(blocks),
      spaces_(spaces),
      reclaimer_(reclaimer),
      lend_limit_(
          static_cast<std::uint64_t>(static_cast<double>(options.pool_bytes) * options.lend_share)),
      leases_(options.max_leases) {}

Result<BlockStore::Lent> Leases::lend(SpaceId space, std::span<const BlockKey> keys,
                                      Duration time) {
  if (time <= Duration::zero() || time > options_.longest_lease) {
    const auto ms = [](Duration each) {
      return std::chrono::duration_cast<std::chrono::milliseconds>(each).count();
    };
    return fail(Errc::kInvalidArgument, "a lease lasts up to {} ms, not {}",
                ms(options_.longest_lease), ms(time));
  }
  if (leases_.is_full()) return fail(Errc::kBusy, "there are {} leases already", leases_.size());
  const Space* const where = spaces_.live(space);
  if (where == nullptr) return BlockStore::Lent{};

  const std::uint64_t frame_bytes = blocks_.frame_bytes(where->shape);
  const std::uint64_t room = lend_limit_ - std::min(lend_limit_, leases_.bytes());
  auto [frames, is_shortened] = blocks_.hold_prefix(*where, keys, room / frame_bytes);
  if (is_shortened) ++counted_.leases_shortened;
  if (frames.empty()) return BlockStore::Lent{};
  ++counted_.leases_made;
  Lease lease;
  lease.made = clock_.now();
  lease.end = lease.made + time + options_.lease_margin;
  lease.frame_bytes = frame_bytes;
  lease.blocks = FrameList(frames);
  return BlockStore::Lent{leases_.add(std::move(lease)), std::move(frames)};
}

void Leases::end_lease(LeaseId lease) {
  const std::uint32_t row = leases_.find(lease);
  if (row == LeaseTable::kNone) return;
  end(row);
  reclaimer_.do_slice();
}

bool Leases::is_lent(LeaseId lease) const { return leases_.find(lease) != LeaseTable::kNone; }

void Leases::end(std::uint32_t row) { reclaimer_.give_back(leases_.remove(row).blocks); }

void Leases::expire() {
  const TimePoint now = clock_.now();
  for (std::uint32_t i = 0; i < options_.slice_blocks; ++i) {
    const std::uint32_t row = leases_.first_due();
    if (row == LeaseTable::kNone || leases_[row].end > now) return;
    ++counted_.leases_expired;
    end(row);
  }
}

std::optional<TimePoint> Leases::next_deadline() const {
  const std::uint32_t row = leases_.first_due();
  if (row == LeaseTable::kNone) return std::nullopt;
  return leases_[row].end;
}

void Leases::report(BlockStore::Stats& stats) const {
  stats.leases = leases_.size();
  stats.lent = leases_.blocks();
  stats.lent_bytes = leases_.bytes();
  if (leases_.oldest() != LeaseTable::kNone) stats.oldest_lease = leases_[leases_.oldest()].made;
  stats.leases_made = counted_.leases_made;
  stats.leases_expired = counted_.leases_expired;
  stats.leases_shortened = counted_.leases_shortened;
}

}  // namespace pegaflow::engine
