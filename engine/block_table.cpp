#include "engine/block_table.h"

#include <array>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace pegaflow {

Result<BlockTable> BlockTable::create(std::uint32_t slot_count, EvictionKind eviction) {
  PEGA_TRY_LET(auto blocks, ZeroPages<Block>::create(slot_count));
  PEGA_TRY_LET(auto index, FlatIndex::create(slot_count));
  PEGA_TRY_LET(auto rows, EvictionRows::create(slot_count));
  PEGA_TRY_LET(auto policy, EvictionPolicy::create(eviction, *rows, slot_count));
  index.touch();
  return BlockTable(std::move(blocks), std::move(index), std::move(rows), std::move(policy));
}

BlockTable::BlockTable(ZeroPages<Block> blocks, FlatIndex index, std::unique_ptr<EvictionRows> rows,
                       std::unique_ptr<EvictionPolicy> policy)
    : blocks_(std::move(blocks)),
      index_(std::move(index)),
      rows_(std::move(rows)),
      policy_(std::move(policy)) {}

SlotIndex BlockTable::find(SpaceId space, const BlockKey& key) const {
  return find(hash(space, key), space, key);
}

void BlockTable::prefetch_cell(SlotIndex slot) const { index_.prefetch(hash(slot)); }

void BlockTable::prefetch_victims(std::size_t count) const {
  std::array<std::uint32_t, kGroup> next;
  const std::size_t known = policy_->victims(std::span(next).first(std::min(count, kGroup)));
  for (std::size_t i = 0; i < known; ++i) prefetch_block(next[i]);
  for (std::size_t i = 0; i < known; ++i) prefetch_cell(next[i]);
}

SlotIndex BlockTable::take_free(SpaceId space, const BlockKey& key, std::uint32_t owner) {
  SlotIndex slot = freed_.back();
  if (slot != kNoSlot) {
    freed_.erase(blocks_, slot);
  } else {
    PEGA_ASSERT(untouched_from_ < slot_count(), "no slot of {} is free", slot_count());
    slot = untouched_from_++;
  }
  Block& block = blocks_[slot];
  block.key = key;
  block.space = space;
  block.owner = owner;
  block.state = SlotState::kWritten;
  block.indexed = true;
  index_.insert(hash(space, key), slot);
  ++written_;
  return slot;
}

void BlockTable::unlist(SlotIndex slot) {
  Block& block = blocks_[slot];
  if (!block.indexed) return;
  const bool was_there = index_.erase(hash(slot), slot);
  PEGA_ASSERT(was_there, "slot {} is not in the index", slot);
  block.indexed = false;
}

void BlockTable::seal(SlotIndex slot, std::uint32_t writer, std::uint32_t now_s) {
  Block& block = blocks_[slot];
  PEGA_ASSERT(block.state == SlotState::kWritten && block.indexed, "slot {} cannot be sealed",
              slot);
  block.state = SlotState::kSealed;
  block.owner = writer;
  block.sealed_s = now_s;
  block.rested_s = now_s;
  --written_;
  ++sealed_;
  policy_->sealed(slot, hash(slot));
}

void BlockTable::hold(SlotIndex slot) {
  Block& block = blocks_[slot];
  PEGA_ASSERT(block.state == SlotState::kSealed, "slot {} is held and not sealed", slot);
  if (block.holds++ != 0) {
    policy_->used_again(slot);
    return;
  }
  policy_->taken(slot);
  ++held_;
}

void BlockTable::hold_again(SlotIndex slot) {
  PEGA_ASSERT(blocks_[slot].holds != 0, "slot {} is pinned and not claimed", slot);
  ++blocks_[slot].holds;
}

bool BlockTable::unhold(SlotIndex slot, std::uint32_t now_s) {
  Block& block = blocks_[slot];
  PEGA_ASSERT(block.holds != 0, "slot {} is held by nobody", slot);
  if (--block.holds != 0) return false;
  block.rested_s = now_s;
  --held_;
  policy_->rested(slot);
  return true;
}

void BlockTable::free(SlotIndex slot, EvictionPolicy::Freed why) {
  Block& block = blocks_[slot];
  PEGA_ASSERT(block.state != SlotState::kFree && block.holds == 0, "slot {} is free or held", slot);
  if (block.state == SlotState::kSealed) {
    policy_->freed(slot, hash(slot), why);
    --sealed_;
  } else {
    --written_;
  }
  unlist(slot);
  block.state = SlotState::kFree;
  freed_.push_back(blocks_, slot);
}

SlotIndex BlockTable::recent_at_rest(std::size_t n) const {
  std::vector<SlotIndex> at_rest;
  for (SlotIndex slot = 0; slot < untouched_from_; ++slot) {
    if (is_at_rest(slot)) at_rest.push_back(slot);
  }
  if (n >= at_rest.size()) return kNoSlot;
  const auto nth = at_rest.begin() + static_cast<std::ptrdiff_t>(n);
  std::nth_element(at_rest.begin(), nth, at_rest.end(), [this](SlotIndex left, SlotIndex right) {
    return rows_->age(left) < rows_->age(right);
  });
  return *nth;
}

Result<void> BlockTable::check() const {
  std::uint32_t written = 0;
  std::uint32_t sealed = 0;
  std::uint32_t held = 0;
  std::uint32_t freed = 0;
  std::uint64_t indexed = 0;
  for (SlotIndex slot = 0; slot < untouched_from_; ++slot) {
    const Block& block = blocks_[slot];
    written += block.state == SlotState::kWritten ? 1 : 0;
    sealed += block.state == SlotState::kSealed ? 1 : 0;
    freed += block.state == SlotState::kFree ? 1 : 0;
    held += block.holds != 0 ? 1 : 0;
    indexed += block.indexed ? 1 : 0;
    if (block.holds != 0 && block.state != SlotState::kSealed) {
      return fail(Errc::kInternal, "slot {} is held and not sealed", slot);
    }
    if (block.state == SlotState::kSealed && !block.indexed && block.holds == 0) {
      return fail(Errc::kInternal, "slot {} is at rest and not in the index", slot);
    }
    if (block.indexed &&
        (block.state == SlotState::kFree || find(block.space, block.key) != slot)) {
      return fail(Errc::kInternal, "the index does not lead to slot {}", slot);
    }
  }
  if (written != written_ || sealed != sealed_ || held != held_ || freed != freed_.size() ||
      indexed != index_.size()) {
    return fail(Errc::kInternal,
                "counted {} written, {} sealed, {} held, {} freed, {} indexed slots; kept {}, {}, "
                "{}, {}, {}",
                written, sealed, held, freed, indexed, written_, sealed_, held_, freed_.size(),
                index_.size());
  }
  return check_lists();
}

Result<void> BlockTable::check_lists() const {
  PEGA_TRY(policy_->check([this](SlotIndex slot) { return is_at_rest(slot); }));
  if (policy_->size() != sealed_ - held_) {
    return fail(Errc::kInternal, "{} blocks are listed as at rest, {} are", policy_->size(),
                sealed_ - held_);
  }
  std::uint32_t freed = 0;
  for (SlotIndex slot = freed_.front(); slot != kNoSlot; slot = freed_.next(blocks_, slot)) {
    if (blocks_[slot].state != SlotState::kFree || ++freed > freed_.size()) {
      return fail(Errc::kInternal, "slot {} is listed as free and is not", slot);
    }
  }
  if (freed != freed_.size()) return fail(Errc::kInternal, "the list of free slots is broken");
  return {};
}

}  // namespace pegaflow
