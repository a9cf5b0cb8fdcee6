#pragma once
/// \file
/// One row for each slot of the pool: which block is in it, and whether it is findable.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/block_store.h"
#include "engine/eviction.h"
#include "engine/flat_index.h"
#include "engine/index_list.h"
#include "engine/zero_pages.h"

namespace pegaflow {

enum class SlotState : std::uint8_t {
  kFree = 0,
  kWritten,  ///< A reservation owns it; forgotten ones too: then it is in quarantine.
  kSealed,   ///< Whole. Findable while its space lives.
};

/// What is in one slot; one cache line.
struct alignas(64) Block {
  BlockKey key;
  SpaceId space{};
  IndexLink free;              ///< Its place among the free slots.
  std::uint32_t holds = 0;     ///< Claims and pins that contain it.
  std::uint32_t owner = 0;     ///< kWritten: the row of its reservation. kSealed: its writer's tag.
  std::uint32_t sealed_s = 0;  ///< When it was sealed, and when it came to rest last, in seconds
  std::uint32_t rested_s = 0;  ///< of whoever says so; kSealed only.
  SlotState state = SlotState::kFree;
  /// find() sees it. Not so a forgotten block whose key was reserved anew, and a condemned one.
  bool indexed = false;
};
static_assert(sizeof(Block) == 64);

/// The slots, the index from (space, key) to slot, and the policy that orders the blocks at rest.
/// It changes states as told; why and when is decided above it.
class BlockTable {
 public:
  /// Errors: kOutOfCapacity.
  static Result<BlockTable> create(std::uint32_t slot_count, EvictionKind eviction);

  /// The slot of a block, sealed or written, or kNoSlot.
  [[nodiscard]] SlotIndex find(SpaceId space, const BlockKey& key) const;
  /// Calls `use(i, find(space, keys[i]))` for each key in order, until it says false; returns how
  /// often it said true. While one group of keys is used, the rows of the next one and the index
  /// cells of the one behind it are on their way, so that misses hide behind each other.
  template <typename Use>
  std::size_t find_each(SpaceId space, std::span<const BlockKey> keys, Use&& use) const;
  static constexpr std::size_t kGroup = 32;
  /// Fetches what hold(), unhold() or free() of a block will touch; the second call, once the first
  /// has arrived, what lies beside it in the order of eviction.
  void prefetch_block(SlotIndex slot) const {
    prefetch_row(slot);
    rows_->prefetch(slot);
  }
  void prefetch_neighbours(SlotIndex slot) const { rows_->prefetch_neighbours(slot); }
  void prefetch_cell(SlotIndex slot) const;

  [[nodiscard]] bool has_free() const noexcept { return free_count() != 0; }
  /// Puts a block that is not in the index into a free slot: written, owned by `owner`.
  SlotIndex take_free(SpaceId space, const BlockKey& key, std::uint32_t owner);
  /// Makes a block that is written, or held, unfindable; its slot stays as it is.
  void unlist(SlotIndex slot);
  /// A written block is whole: it comes to rest, a new one.
  void seal(SlotIndex slot, std::uint32_t writer, std::uint32_t now_s);

  /// A claim more on a sealed block; a pin more on one that is claimed; one of them less. After the
  /// last one it comes to rest again; unhold() says whether it did.
  void hold(SlotIndex slot);
  void hold_again(SlotIndex slot);
  bool unhold(SlotIndex slot, std::uint32_t now_s);
  /// Frees a written slot, or one at rest.
  void free(SlotIndex slot) { free(slot, EvictionPolicy::Freed::kDropped); }
  /// Frees the victim.
  void evict(SlotIndex slot) { free(slot, EvictionPolicy::Freed::kEvicted); }

  /// The block at rest that goes next; kNoSlot when nothing is at rest.
  [[nodiscard]] SlotIndex victim() { return policy_->victim(); }
  /// Fetches what evicting the next `count` victims will touch; at most kGroup.
  void prefetch_victims(std::size_t count) const;
  /// The `n`-th block counted from the one that came to rest last, or kNoSlot. O(slots).
  [[nodiscard]] SlotIndex recent_at_rest(std::size_t n) const;

  [[nodiscard]] const Block& operator[](SlotIndex slot) const noexcept { return blocks_[slot]; }

  [[nodiscard]] std::uint32_t slot_count() const noexcept {
    return static_cast<std::uint32_t>(blocks_.size());
  }
  /// Slots from here on have never been used since the table was made.
  [[nodiscard]] std::uint32_t untouched_from() const noexcept { return untouched_from_; }
  [[nodiscard]] std::uint32_t free_count() const noexcept {
    return freed_.size() + slot_count() - untouched_from_;
  }
  [[nodiscard]] std::uint32_t written_count() const noexcept { return written_; }
  [[nodiscard]] std::uint32_t sealed_count() const noexcept { return sealed_; }
  [[nodiscard]] std::uint32_t held_count() const noexcept { return held_; }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return blocks_.size_bytes() + index_.memory_bytes() + rows_->memory_bytes() +
           policy_->memory_bytes();
  }

  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] Result<void> check() const;

 private:
  BlockTable(ZeroPages<Block> blocks, FlatIndex index, std::unique_ptr<EvictionRows> rows,
             std::unique_ptr<EvictionPolicy> policy);
  void prefetch_row(SlotIndex slot) const { __builtin_prefetch(&blocks_[slot], 1); }
  void free(SlotIndex slot, EvictionPolicy::Freed why);
  [[nodiscard]] std::uint32_t hash(SlotIndex slot) const noexcept {
    return hash(blocks_[slot].space, blocks_[slot].key);
  }
  [[nodiscard]] bool is_at_rest(SlotIndex slot) const {
    return blocks_[slot].state == SlotState::kSealed && blocks_[slot].holds == 0;
  }
  [[nodiscard]] static std::uint32_t hash(SpaceId space, const BlockKey& key) noexcept {
    // The engine's hash is uniform; its second word is zero where the algorithm has 8 bytes only.
    std::uint64_t second = 0;
    std::memcpy(&second, key.bytes.data() + sizeof second, sizeof second);
    return mix_hash(key.hash(), second + static_cast<std::uint64_t>(space) * 0x9E3779B97F4A7C15ULL);
  }
  [[nodiscard]] SlotIndex find(std::uint32_t hash, SpaceId space, const BlockKey& key) const {
    return index_.find(hash, [&](std::uint32_t row) {
      return blocks_[row].space == space && blocks_[row].key == key;
    });
  }
  [[nodiscard]] Result<void> check_lists() const;

  ZeroPages<Block> blocks_;
  FlatIndex index_;
  std::unique_ptr<EvictionRows> rows_;
  std::unique_ptr<EvictionPolicy> policy_;  ///< Refers to `rows_`.
  IndexList<&Block::free> freed_;
  std::uint32_t untouched_from_ = 0;
  std::uint32_t written_ = 0;
  std::uint32_t sealed_ = 0;
  std::uint32_t held_ = 0;
};

template <typename Use>
std::size_t BlockTable::find_each(SpaceId space, std::span<const BlockKey> keys, Use&& use) const {
  std::array<std::uint32_t, 4 * kGroup> hashes;
  const auto group = [&](std::size_t begin, auto&& each) {
    const std::size_t end = std::min(begin + kGroup, keys.size());
    for (std::size_t i = begin; i < end; ++i) each(i, hashes[i % hashes.size()]);
  };
  const auto fetch_cell = [&](std::size_t i, std::uint32_t& key_hash) {
    key_hash = hash(space, keys[i]);
    index_.prefetch(key_hash);
  };
  const auto fetch_block = [&](std::size_t, std::uint32_t key_hash) {
    const std::uint32_t guess = index_.first_guess(key_hash);
    if (guess != FlatIndex::kNone) prefetch_row(guess);
  };
  group(0, fetch_cell);
  group(kGroup, fetch_cell);
  group(0, fetch_block);
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    group(begin + 2 * kGroup, fetch_cell);
    group(begin + kGroup, fetch_block);
    const std::size_t end = std::min(begin + kGroup, keys.size());
    for (std::size_t i = begin; i < end; ++i) {
      if (!use(i, find(hashes[i % hashes.size()], space, keys[i]))) return i;
    }
  }
  return keys.size();
}

}  // namespace pegaflow
