#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

Result<BlockStore::Lent> BlockStore::lend(SpaceId space, std::span<const BlockKey> keys,
                                          Duration time) {
  if (time <= Duration::zero() || time > impl_->options.longest_lease) {
    const auto ms = [](Duration each) {
      return std::chrono::duration_cast<std::chrono::milliseconds>(each).count();
    };
    return fail(Errc::kInvalidArgument, "a lease lasts up to {} ms, not {}",
                ms(impl_->options.longest_lease), ms(time));
  }
  LeaseTable& leases = impl_->leases;
  if (leases.is_full()) return fail(Errc::kBusy, "there are {} leases already", leases.size());
  const Space* const where = impl_->live_space(space);
  if (where == nullptr) return Lent{};

  const std::uint64_t frame_bytes = impl_->blocks.layout(where->shape).frame_bytes();
  const std::uint64_t room = impl_->lend_limit - std::min(impl_->lend_limit, leases.bytes());
  auto [frames, is_shortened] = impl_->hold_prefix(*where, keys, room / frame_bytes);
  if (is_shortened) ++impl_->counted.leases_shortened;
  if (frames.empty()) return Lent{};
  ++impl_->counted.leases_made;
  impl_->listed_blocks += frames.size();
  Lease lease;
  lease.made = impl_->clock.now();
  lease.end = lease.made + time + impl_->options.lease_margin;
  lease.frame_bytes = frame_bytes;
  lease.blocks = FrameList(frames);
  return Lent{leases.add(std::move(lease)), std::move(frames)};
}

void BlockStore::end_lease(LeaseId lease) {
  const std::uint32_t row = impl_->leases.find(lease);
  if (row == LeaseTable::kNone) return;
  impl_->end_lease(row);
  impl_->do_slice();
}

bool BlockStore::is_lent(LeaseId lease) const {
  return impl_->leases.find(lease) != LeaseTable::kNone;
}

void BlockStore::Impl::end_lease(std::uint32_t row) {
  queue.emplace_back(GiveBackWork{leases.remove(row).blocks});
}

void BlockStore::Impl::expire_leases() {
  const TimePoint now = clock.now();
  for (std::uint32_t i = 0; i < options.slice_blocks; ++i) {
    const std::uint32_t row = leases.first_due();
    if (row == LeaseTable::kNone || leases[row].end > now) return;
    ++counted.leases_expired;
    end_lease(row);
  }
}

Result<void> BlockStore::Impl::check_leases() const {
  std::uint32_t rows = 0;
  std::uint64_t listed = 0;
  std::uint64_t bytes = 0;
  for (std::uint32_t row = leases.oldest(); row != LeaseTable::kNone; row = leases.newer(row)) {
    ++rows;
    listed += leases[row].blocks.size();
    bytes += leases[row].blocks.size() * leases[row].frame_bytes;
    if (leases.find(leases[row].id) != row) {
      return fail(Errc::kInternal, "the name of a lease does not lead to it");
    }
  }
  if (rows != leases.size() || rows != leases.due_count() || listed != leases.blocks() ||
      bytes != leases.bytes()) {
    return fail(Errc::kInternal, "{} leases lend {} blocks of {} bytes, {}, {} and {} are counted",
                rows, listed, bytes, leases.size(), leases.blocks(), leases.bytes());
  }
  return {};
}

}  // namespace pegaflow::engine
