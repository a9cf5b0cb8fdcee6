#include <numeric>
#include <unordered_map>
#include <vector>

#include "engine/block_store_impl.h"

namespace pegaflow {

Result<void> BlockStore::check() const {
  PEGA_TRY(impl_->blocks.check());
  PEGA_TRY(impl_->check_holds());
  PEGA_TRY(impl_->check_jobs());
  const MissCounts& misses = impl_->counted.misses;
  const std::uint64_t told = std::accumulate(misses.begin(), misses.end(), std::uint64_t{0});
  if (told != impl_->counted.lookup_misses) {
    return fail(Errc::kInternal, "{} misses have a reason, {} are counted", told,
                impl_->counted.lookup_misses);
  }
  return impl_->check_shares();
}

Result<void> BlockStore::Impl::check_holds() const {
  std::vector<std::uint32_t> holds(blocks.slot_count());
  std::uint64_t listed = 0;
  const auto count = [&](const std::vector<SlotIndex>& list) {
    listed += list.size();
    for (const SlotIndex slot : list) ++holds[slot];
  };
  for (std::uint32_t row = claims.oldest(); row != ClaimTable::kNone; row = claims.newer(row)) {
    count(claims[row].blocks);
  }
  for (std::uint32_t row = pins.oldest(); row != PinTable::kNone; row = pins.newer(row)) {
    count(pins[row].blocks);
  }
  for (const Work& work : queue) {
    if (const auto* const back = std::get_if<GiveBackWork>(&work)) count(back->blocks);
  }
  for (SlotIndex slot = 0; slot < blocks.slot_count(); ++slot) {
    if (slot < blocks.untouched_from() ? blocks[slot].holds != holds[slot] : holds[slot] != 0) {
      return fail(Errc::kInternal, "slot {} has {} holds and counts {}", slot, holds[slot],
                  blocks[slot].holds);
    }
  }
  if (listed != listed_blocks) {
    return fail(Errc::kInternal, "{} blocks are listed, {} are counted", listed, listed_blocks);
  }
  return {};
}

Result<void> BlockStore::Impl::check_jobs() const {
  std::vector<std::uint32_t> owner(blocks.slot_count(), JobTable::kNone);
  std::uint32_t rows = 0;
  std::uint64_t slots = 0;
  for (std::uint32_t row = 0; jobs.knows(row); ++row) {
    const Job& job = jobs[row];
    if (job.slots.empty()) continue;
    ++rows;
    slots += job.slots.size();
    for (const SlotIndex slot : job.slots) {
      const Block& block = blocks[slot];
      if (block.state != SlotState::kWritten || block.owner != row ||
          owner[slot] != JobTable::kNone) {
        return fail(Errc::kInternal, "slot {} is not written by job {} alone", slot, job.id.number);
      }
      owner[slot] = row;
      if (job.fate == Job::Fate::kLive && !block.indexed && may_publish(job)) {
        return fail(Errc::kInternal, "slot {} of job {} has lost its key", slot, job.id.number);
      }
    }
  }
  std::uint64_t by_fate = 0;
  for (const Job::Fate fate :
       {Job::Fate::kLive, Job::Fate::kForgotten, Job::Fate::kWriterLost, Job::Fate::kEnded}) {
    by_fate += jobs.slots(fate);
  }
  if (slots != blocks.written_count() || slots != by_fate || rows > jobs.size()) {
    return fail(Errc::kInternal, "jobs have {} slots, {} are written, {} counted by fate", slots,
                blocks.written_count(), by_fate);
  }
  return {};
}

Result<void> BlockStore::Impl::check_shares() const {
  std::unordered_map<std::uint32_t, std::uint64_t> held;
  std::unordered_map<std::uint32_t, std::uint64_t> pinned_of_claim;
  std::uint64_t lost = 0;
  for (std::uint32_t row = pins.oldest(); row != PinTable::kNone; row = pins.newer(row)) {
    const Pin& pin = pins[row];
    const std::uint32_t claim = claims.find(pin.claim, pin.claim_serial);
    if (claim != ClaimTable::kNone) {
      pinned_of_claim[claim] += pin.blocks.size();
    } else {
      held[pin.instance] += pin.blocks.size();
    }
    if (pin.holder->is_lost) lost += pin.blocks.size();
  }
  for (std::uint32_t row = claims.oldest(); row != ClaimTable::kNone; row = claims.newer(row)) {
    held[claims[row].holder->instance] += claims[row].blocks.size();
    if (pinned_of_claim[row] != claims[row].pinned_blocks) {
      return fail(Errc::kInternal, "a claim counts {} pinned blocks and has {}",
                  claims[row].pinned_blocks, pinned_of_claim[row]);
    }
  }
  std::unordered_map<std::uint32_t, std::uint32_t> holders_of;
  for (const auto& [id, holder] : holders) ++holders_of[holder.instance];
  for (const auto& [number, instance] : instances) {
    if (instance.held_blocks != held[number] || instance.holders != holders_of[number] ||
        (instance.held_blocks == 0 && instance.holders == 0)) {
      return fail(Errc::kInternal, "instance {} counts {} held blocks and has {}", number,
                  instance.held_blocks, held[number]);
    }
    held.erase(number);
  }
  for (const auto& [number, blocks_held] : held) {
    if (blocks_held != 0) return fail(Errc::kInternal, "instance {} is not known", number);
  }
  if (lost != lost_pinned_blocks) {
    return fail(Errc::kInternal, "{} blocks are pinned by lost readers, {} counted", lost,
                lost_pinned_blocks);
  }
  return {};
}

}  // namespace pegaflow
