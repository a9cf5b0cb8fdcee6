#pragma once
/// \file
/// One row for each slot of the pool: which block is in it, whether it is findable, and its place
/// in the order of eviction.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/block_store.h"
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
  IndexLink rest;           ///< Its place among the blocks at rest, or among the free slots.
  std::uint32_t holds = 0;  ///< Claims and pins that contain it.
  std::uint32_t owner = 0;  ///< kWritten: the row of its reservation. kSealed: its writer's tag.
  SlotState state = SlotState::kFree;
  bool indexed = false;  ///< find() sees it. A forgotten block whose key was reserved anew is not.
};
static_assert(sizeof(Block) == 64);

/// The slots, the index from (space, key) to slot, and the list of blocks at rest. It changes
/// states as told; why and when is decided above it.
class BlockTable {
 public:
  /// Errors: kOutOfCapacity.
  static Result<BlockTable> create(std::uint32_t slot_count);

  /// The slot of a block, sealed or written, or kNoSlot.
  [[nodiscard]] SlotIndex find(SpaceId space, const BlockKey& key) const;
  /// Fetches what find() of these keys will touch. 32 keys at a time hide the misses behind each
  /// other: a lookup of 8,192 cold keys is 9 times faster so than through a map.
  static constexpr std::size_t kGroup = 32;
  void prefetch(SpaceId space, std::span<const BlockKey> group) const;
  /// Fetches what hold(), unhold() or free() of a block will touch.
  void prefetch_block(SlotIndex slot) const { __builtin_prefetch(&blocks_[slot], 1); }
  void prefetch_neighbours(SlotIndex slot) const;
  void prefetch_cell(SlotIndex slot) const;

  [[nodiscard]] bool has_free() const noexcept { return free_count() != 0; }
  /// Puts a block that is not in the index into a free slot: written, owned by `owner`.
  SlotIndex take_free(SpaceId space, const BlockKey& key, std::uint32_t owner);
  /// Makes a written block unfindable; its slot stays as it is.
  void unlist(SlotIndex slot);
  /// A written block is whole: it comes to rest as the most recent one.
  void seal(SlotIndex slot, std::uint32_t writer);

  /// One claim or pin more on a sealed block, or one less. After the last one it comes to rest as
  /// the most recent block; unhold() says whether it did.
  void hold(SlotIndex slot);
  bool unhold(SlotIndex slot);
  /// Frees a written slot, or one at rest.
  void free(SlotIndex slot);

  /// kNoSlot when nothing is at rest.
  [[nodiscard]] SlotIndex oldest_at_rest() const noexcept { return at_rest_.front(); }
  [[nodiscard]] SlotIndex newest_at_rest() const noexcept { return at_rest_.back(); }
  [[nodiscard]] SlotIndex older(SlotIndex slot) const { return at_rest_.previous(blocks_, slot); }
  [[nodiscard]] SlotIndex newer(SlotIndex slot) const { return at_rest_.next(blocks_, slot); }

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
    return blocks_.size_bytes() + index_.memory_bytes();
  }

  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] Result<void> check() const;

 private:
  BlockTable(ZeroPages<Block> blocks, FlatIndex index);
  [[nodiscard]] static std::uint32_t hash(SpaceId space, const BlockKey& key) noexcept;
  [[nodiscard]] Result<void> check_lists() const;

  ZeroPages<Block> blocks_;
  FlatIndex index_;
  IndexList<&Block::rest> at_rest_;  ///< Oldest first.
  IndexList<&Block::rest> freed_;
  std::uint32_t untouched_from_ = 0;
  std::uint32_t written_ = 0;
  std::uint32_t sealed_ = 0;
  std::uint32_t held_ = 0;
};

}  // namespace pegaflow
