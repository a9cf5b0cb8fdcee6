#pragma once
/// \file
/// The blocks in the pool, and the record of added and removed blocks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/frames/block_table.h"
#include "engine/frames/victims_ahead.h"
#include "engine/rights/space_table.h"
#include "engine/tables/frame_list.h"
#include "engine/tables/journal.h"
#include "engine/tables/key_hash.h"
#include "engine/tables/lost_blocks.h"

namespace pegaflow::engine {

/// Owns the rows of all frames, and changes them together with what must follow: the journal, the
/// reasons of losses, the ages of lost blocks. So no block comes or goes unrecorded.
///
/// It knows no claim, pin, lease or job, only the count of holds on each block. Thread-bound.
class ResidentBlocks {
 public:
  /// `options`, `clock` and `spaces` outlive it.
  ResidentBlocks(const BlockStore::Options& options, const Clock& clock, const SpaceTable& spaces,
                 BlockTable table, LostBlocks losses);

  /// For queries and prefetches.
  [[nodiscard]] const BlockTable& table() const noexcept { return table_; }
  [[nodiscard]] const Block& operator[](FrameIndex frame) const noexcept { return table_[frame]; }
  [[nodiscard]] std::uint64_t frame_bytes(ShapeId shape) const noexcept {
    return table_.layout(shape).frame_bytes();
  }

  /// Updates the time of the records below. Call it once for each call or slice, because reading
  /// the clock costs as much as handling a block.
  void read_clock();

  // ---- holds: claims, pins and leases

  /// Whether `server_share` allows holding this block, or, for kNoFrame, a block that is not held
  /// yet.
  [[nodiscard]] bool may_hold(const Space& space, FrameIndex frame) const {
    const bool is_held = frame != kNoFrame && table_[frame].holds != 0;
    return is_held || table_.held_bytes() + frame_bytes(space.shape) <= held_limit_;
  }
  /// The bytes of blocks that are not held yet and that `server_share` allows to hold.
  [[nodiscard]] std::uint64_t room_to_hold() const {
    return held_limit_ - std::min(held_limit_, table_.held_bytes());
  }
  struct HeldPrefix {
    std::vector<FrameIndex> frames;
    bool is_shortened = false;  ///< `room` or the server's share cut the prefix.
  };
  /// Holds the longest sealed prefix of `keys` within the server's share, up to `room` blocks.
  HeldPrefix hold_prefix(const Space& space, std::span<const BlockKey> keys, std::uint64_t room);
  /// Finds the block of every key; returns false if one of them is not readable.
  [[nodiscard]] bool find_all(const Space& space, std::span<const BlockKey> keys,
                              std::vector<FrameIndex>& found) const;
  [[nodiscard]] std::size_t count_not_held(std::span<const FrameIndex> frames) const;
  /// Holds readable blocks.
  void hold_all(std::span<const FrameIndex> frames);
  /// Holds a block that is sealed or in flight.
  void hold(FrameIndex frame) {
    table_.hold(frame);
    ++holds_;
  }
  /// Whether a held block is sealed and was not invalidated.
  [[nodiscard]] bool is_openable(FrameIndex frame) const {
    return table_[frame].state == FrameState::kSealed && table_[frame].indexed;
  }
  /// Adds a hold to each of these held blocks, or to none of them if one is not openable.
  /// Errors: kBusy when that block is in flight, else kGone.
  Result<void> hold_again(std::span<const FrameIndex> frames);
  /// Removes the last block of the list and ends a hold on it. After the last hold, frees a block
  /// that lookups cannot find: invalidated, of a retired generation, or not fetched successfully.
  void give_back_last(FrameList& frames) {
    const FrameIndex frame = frames[frames.size() - 1];
    frames.pop_back();
    --holds_;
    give_back(frame);
  }
  /// All holds, each of which is an entry in the list of a claim, pin, lease or queued work.
  [[nodiscard]] std::uint64_t holds() const noexcept { return holds_; }

  // ---- blocks that come

  /// Takes a free frame of `shape` for a block that job row `owner` writes.
  FrameIndex take_to_save(const Space& space, const BlockKey& key, std::uint32_t owner,
                          Depth depth) {
    return table_.take_free(space.shape, space.id, key, owner, depth);
  }
  FrameIndex take_to_fetch(const Space& space, const BlockKey& key) {
    return table_.take_for_fetch(space.shape, space.id, key);
  }
  /// Makes the key of `present` free for another frame: evicts a sealed block, whose extent is
  /// leaving, or removes a block that will never be sealed from the index.
  void free_key(FrameIndex present);
  /// Seals a block that is whole; `writer` is kReplica for one that was fetched from another node,
  /// kRestored for one from a disk.
  void seal(FrameIndex frame, std::uint32_t writer) {
    table_.seal(frame, writer, second_);
    note(frame, true);
  }
  /// Records once more that the block of this frame is present.
  void note_present(FrameIndex frame) { note(frame, true); }
  /// Frees the frame of a save that failed, and that no process can write to any longer.
  void discard(FrameIndex frame);
  /// The block in flight will not arrive, but its frame may still be written. Returns false when
  /// this was reported before.
  bool give_up(FrameIndex frame);
  /// Nothing can write any longer to the frame of a block that was given up.
  void quiesced(FrameIndex frame);

  // ---- blocks that go

  /// Frees an evictable block, counts it, and records the reason: `why`, or kReset if its
  /// generation is retired.
  void drop(FrameIndex frame, Miss why) { drop(frame, why, false); }
  /// The next evictable block of the shape, or kNoFrame.
  [[nodiscard]] FrameIndex victim(ShapeId shape) { return table_.victim(shape); }
  void begin_save(ShapeId shape, bool may_refuse) { table_.begin_save(shape, may_refuse); }
  [[nodiscard]] bool refuses(ShapeId shape, SpaceId space, const BlockKey& key, FrameIndex victim) {
    return table_.refuses(shape, space, key, victim);
  }
  /// Drops the victim, and prefetches those after it.
  void evict(FrameIndex victim);
  /// Prefetches the memory other than its row that drop() of a block will touch. Call it once the
  /// row itself is in the cache.
  void prefetch_drop(FrameIndex frame) const;
  /// Makes a sealed block with wrong bytes unfindable. Returns false if it was so before.
  bool invalidate(FrameIndex frame);
  /// Records that a block could not be kept.
  void remember_loss(SpaceId space, const BlockKey& key, Miss why) noexcept {
    losses_.remember(key_hash(space, key), why);
  }
  [[nodiscard]] Miss why_lost(SpaceId space, const BlockKey& key) const noexcept {
    return losses_.why(key_hash(space, key));
  }
  void prefetch_loss(SpaceId space, const BlockKey& key) const noexcept {
    losses_.prefetch(key_hash(space, key));
  }
  /// See BlockStore.
  [[nodiscard]] std::optional<std::uint32_t> next_victim_idle_s();

  /// The blocks of a former process: see BlockTable.
  Result<void> restore_shape(std::uint32_t number, const Shape& shape) {
    return table_.restore_shape(number, shape);
  }
  Result<BlockTable::Adopted> adopt(const BlockTable::IsLive& is_live) {
    PEGA_TRY_LET(BlockTable::Adopted adopted, table_.adopt(is_live));
    holds_ += adopted.held.size();
    return adopted;
  }

  // ---- shapes and extents: see BlockTable

  Result<BlockTable::Added> add_shape(const Shape& shape) { return table_.add_shape(shape); }
  void leave_shape(ShapeId shape) { table_.leave_shape(shape); }
  void add_space(ShapeId shape) { table_.add_space(shape); }
  void drop_space(ShapeId shape) { table_.drop_space(shape); }
  std::optional<ShapeId> take_unused() { return table_.take_unused(); }
  bool touch(ShapeId shape, std::size_t page) { return table_.touch(shape, page); }
  bool forget(ShapeId shape, std::size_t page, std::size_t count) {
    return table_.forget(shape, page, count);
  }
  void remove_shape(ShapeId shape) { table_.remove_shape(shape); }
  bool grow(ShapeId shape) { return table_.grow(shape); }
  std::vector<ExtentId> start_exchange(ShapeId shape, FrameIndex victim) {
    return table_.start_exchange(shape, victim);
  }
  void end_exchange(ShapeId shape) { table_.end_exchange(shape); }

  void set_listener(BlockListener* listener) noexcept { table_.set_listener(listener); }

  // ---- the journal: see BlockStore

  Result<void> keep_journal();
  [[nodiscard]] BlockStore::JournalPart journal(std::span<const SpaceId> spaces, std::uint64_t from,
                                                std::size_t limit) const;
  void on_next_entry(std::function<void()> wake) { wake_ = std::move(wake); }
  /// A generation was retired: what its readers of the journal know is void.
  void wake_readers() {
    if (wake_) std::exchange(wake_, nullptr)();
  }

  /// Adds its part of the statistics.
  void report(BlockStore::Stats& stats) const;
  [[nodiscard]] std::uint64_t memory_bytes() const;

 private:
  struct Counters {
    std::uint64_t evictions = 0;
    std::uint64_t evicted_replicas = 0;
    std::uint64_t cleaned = 0;
    std::uint64_t retired = 0;
    std::uint64_t invalidated = 0;
    AgeHistogram evicted_age;
    AgeHistogram dropped_age;
    AgeHistogram evicted_idle;
  };

  /// Records that the block of this frame is present, or is about to be removed.
  void note(FrameIndex frame, bool is_present) {
    if (!journal_) return;
    const Block& block = table_[frame];
    journal_->add(block.space, block.key, is_present, static_cast<Depth>(block.depth));
    wake_readers();
  }
  /// Prefetches what holding the blocks behind frames[i] will touch.
  void prefetch_ahead(std::span<const FrameIndex> frames, std::size_t i) const;
  void drop(FrameIndex frame, Miss why, bool is_victim);
  void give_back(FrameIndex frame);

  const BlockStore::Options& options_;
  const Clock& clock_;
  const SpaceTable& spaces_;
  const TimePoint made_;
  const std::uint64_t held_limit_;  ///< Bytes of held blocks: `server_share`.
  BlockTable table_;
  LostBlocks losses_;
  std::optional<Journal> journal_;  ///< No value until keep_journal() is called.
  std::function<void()> wake_;      ///< See on_next_entry().
  VictimsAhead ahead_;
  std::uint32_t second_ = 0;  ///< Seconds since `made_`, at the last read_clock().
  std::uint64_t holds_ = 0;
  Counters counted_;
};

}  // namespace pegaflow::engine
