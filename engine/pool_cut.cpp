#include "engine/pool_cut.h"

#include <algorithm>
#include <utility>

#include "base/page_layout.h"

namespace pegaflow {

Result<std::unique_ptr<PoolCut>> PoolCut::create(const Options& options, const Clock& clock) {
  if (options.pool_bytes < kSlotAlignment) {
    return fail(Errc::kInvalidArgument, "a pool of {} bytes has no room for a page of {}",
                options.pool_bytes, kSlotAlignment);
  }
  BlockStore::Options uncut = options.store;
  uncut.slot_count = 0;
  PEGA_TRY_LET(auto store, BlockStore::create(uncut, clock));
  return std::unique_ptr<PoolCut>(new PoolCut(options.pool_bytes, std::move(store)));
}

PoolCut::PoolCut(std::uint64_t pool_bytes, std::unique_ptr<BlockStore> store)
    : pool_bytes_(pool_bytes), store_(std::move(store)) {}
PoolCut::~PoolCut() = default;

Result<PoolCut::Answer> PoolCut::enter(std::uint32_t instance, std::uint64_t page_bytes) {
  const auto is_same = [&](const Member& member) { return member.instance == instance; };
  if (std::any_of(members_.begin(), members_.end(), is_same)) {
    return fail(Errc::kInvalidArgument, "instance {} is known already", instance);
  }
  if (page_bytes == 0) return fail(Errc::kInvalidArgument, "a page of 0 bytes");
  if (page_bytes > kMaxPageBytes) {
    return fail(Errc::kRefused, "a page of {} bytes passes the limit of {}", page_bytes,
                kMaxPageBytes);
  }
  const std::uint64_t slot_bytes = slot_bytes_for(page_bytes);
  if (slot_bytes > pool_bytes_) {
    return fail(Errc::kRefused, "a page of {} bytes does not fit the pool of {}", page_bytes,
                pool_bytes_);
  }
  members_.push_back({instance, slot_bytes});
  settle();
  return is_served(instance) ? Answer::kServed : Answer::kWaiting;
}

void PoolCut::leave(std::uint32_t instance) {
  std::erase_if(members_, [&](const Member& member) { return member.instance == instance; });
}

bool PoolCut::settle() {
  const auto is_of_this_cut = [&](const Member& member) {
    return member.slot_bytes == slot_bytes_;
  };
  if (members_.empty() || std::any_of(members_.begin(), members_.end(), is_of_this_cut)) {
    return false;
  }
  // None of those who are here has the size of this cut, so all of them wait; the first the
  // longest.
  return cut_for(members_.front().slot_bytes);
}

bool PoolCut::cut_for(std::uint64_t slot_bytes) {
  constexpr std::uint64_t kMaxSlots = std::uint64_t{1} << 31;
  const auto slots = static_cast<std::uint32_t>(std::min(pool_bytes_ / slot_bytes, kMaxSlots));
  // It says kBusy while a page is still reserved, pinned or in quarantine; and without memory for
  // the tables the old cut stays, which serves nobody but loses nothing: the next call tries again.
  if (!store_->recut(slots)) return false;
  slot_bytes_ = slot_bytes;
  ++cuts_;
  return true;
}

bool PoolCut::is_served(std::uint32_t instance) const {
  return std::any_of(members_.begin(), members_.end(), [&](const Member& member) {
    return member.instance == instance && member.slot_bytes == slot_bytes_;
  });
}

bool PoolCut::is_waiting() const {
  return std::any_of(members_.begin(), members_.end(),
                     [&](const Member& member) { return member.slot_bytes != slot_bytes_; });
}

}  // namespace pegaflow
