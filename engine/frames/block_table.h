#pragma once
/// \file
/// One row for each frame of the pool: its block and whether that is findable; and the shapes of
/// frames.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/eviction/eviction.h"
#include "engine/frames/block_listener.h"
#include "engine/frames/extent_map.h"
#include "engine/kept/kept_tables.h"
#include "engine/tables/block_row.h"
#include "engine/tables/flat_index.h"
#include "engine/tables/prefetch.h"
#include "engine/tables/zero_pages.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

/// Owns the rows, and for each shape its extents, the index from (generation, key) to row, and the
/// policy that orders its evictable blocks. It changes states on request; the callers decide why
/// and when.
///
/// Rows are numbered by the place of their frame: unit u of the pool owns the rows from u * R on,
/// with R = unit / 4 KiB, of which an extent uses as many as it has frames. So a row belongs to one
/// frame for ever, no memory moves, and rows that no frame uses cost nothing but addresses.
class BlockTable {
 public:
  struct Options {
    std::uint64_t pool_bytes = 0;
    std::uint32_t numa_nodes = 1;
    EvictionKind eviction = kDefaultEviction;
    /// Keeps the rows for a later process; null: they end with this one. Outlives the table.
    KeptTables* kept = nullptr;
  };
  /// Errors: kOutOfCapacity.
  static Result<BlockTable> create(const Options& options);

  // ---- the frames of a former process

  struct Adopted {
    /// Frames that a process may still access, each with one hold: that were held, written or
    /// fetched, or whose row is not whole. Those that nothing can find any longer are freed once
    /// the hold ends.
    std::vector<FrameIndex> held;
    std::uint64_t blocks = 0;  ///< That may be found.
    std::uint64_t bytes = 0;
    std::uint64_t discarded = 0;  ///< Frames in use whose blocks cannot be found.
  };
  /// Whether blocks of that generation may be found, in frames of that shape.
  using IsLive = std::function<bool(ShapeId, SpaceId)>;
  /// Adds a shape under the number that it had in the former process, with one user.
  /// Errors: those of add_shape(); kCorrupt for a number that is out of range or in use.
  Result<void> restore_shape(std::uint32_t number, const Shape& shape);
  /// Restores the extents and rows of `kept`, which the process before this one wrote, once its
  /// shapes are restored and before anything else is done. Blocks keep their order of use. The
  /// process may die at any instruction and another one call this again.
  /// Errors: kCorrupt when the extents contradict each other or the shapes; then the table must not
  /// be used.
  Result<Adopted> adopt(const IsLive& is_live);

  // ---- shapes and extents

  struct Added {
    ShapeId id{};
    bool is_new = false;  ///< Its index was made for this call.
  };
  /// Returns an equal shape or a new one, with one more user.
  /// Errors: those of FrameLayout::create() and ExtentMap::units_for(); kBusy when kMaxShapes have
  /// users, or as many again still have blocks without one; kOutOfCapacity.
  Result<Added> add_shape(const Shape& wanted);
  static constexpr std::size_t kMaxShapes = 256;
  /// Removes one user. Without users, generations and extents the shape is unused, and it stays so.
  void leave_shape(ShapeId shape);
  void add_space(ShapeId shape) { ++of(shape).spaces; }
  void drop_space(ShapeId shape);
  /// Returns each shape that has become unused once: the caller forgets its tables in slices, and
  /// then removes it. From then on no equal shape shares it.
  std::optional<ShapeId> take_unused();
  [[nodiscard]] bool has_unused() const noexcept { return !unused_.empty(); }
  /// Returns the memory of `count` pages of an unused shape's tables; false when they have less.
  bool forget(ShapeId shape, std::size_t page, std::size_t count);
  void remove_shape(ShapeId shape);
  /// Whether there is a shape with that number: blocks may have it.
  [[nodiscard]] bool has_shape(ShapeId shape) const noexcept {
    const auto& found = shapes_[static_cast<std::uint32_t>(shape)];
    return found != nullptr && !found->is_unused;
  }
  [[nodiscard]] bool has_extents(ShapeId shape) const noexcept { return of(shape).extents != 0; }
  /// The number of times that a shape lost its last extent.
  [[nodiscard]] std::uint64_t emptied_shapes() const noexcept { return emptied_; }
  [[nodiscard]] std::uint32_t spaces(ShapeId shape) const noexcept { return of(shape).spaces; }
  [[nodiscard]] const FrameLayout& layout(ShapeId shape) const noexcept { return of(shape).layout; }
  [[nodiscard]] const Shape& shape(ShapeId shape) const noexcept { return of(shape).shape; }
  /// The offset in the pool of the page that `shard` has in the frame of `row`.
  [[nodiscard]] std::uint64_t page_offset(FrameIndex row, std::uint32_t shard) const;
  /// Counts pages instead of bytes: no two pages in the pool have one number, and the pages of an
  /// extent are numbered without a gap. Less than the pool's 4 KiB pages.
  [[nodiscard]] std::uint32_t page_number(FrameIndex row, std::uint32_t shard) const;
  [[nodiscard]] ShapeId shape_of(FrameIndex row) const { return extent_of(row).shape(); }
  /// Allocates page `page` of 4 KiB of the memory of a shape's index and of its policy; returns
  /// false when they have less.
  bool touch(ShapeId shape, std::size_t page);

  /// Whether there is a free frame; grow() makes some from free units.
  [[nodiscard]] bool has_free(ShapeId shape) const noexcept {
    return !of(shape).with_free.is_empty();
  }
  bool grow(ShapeId shape) { return extents_.free_units() != 0 && make_extent(shape); }
  /// Chooses extents of other shapes that make room for one of this shape, if they were used longer
  /// ago on average than `victim`, its own next one; always, if that is kNoFrame. Their blocks are
  /// unfindable from now on, and the caller evicts them, row by row. Each shape has at most one
  /// such exchange in progress. Returns an empty list when none is possible.
  std::vector<ExtentId> start_exchange(ShapeId shape, FrameIndex victim);
  [[nodiscard]] bool is_exchanging(ShapeId shape) const noexcept {
    return of(shape).leaving_for_it != 0;
  }
  void end_exchange(ShapeId shape) {
    --of(shape).leaving_for_it;
    note_unused(shape);
  }
  [[nodiscard]] bool is_leaving(FrameIndex row) const { return extent_of(row).is_leaving; }
  [[nodiscard]] const Extent& extent(ExtentId id) const { return extents_[id]; }
  [[nodiscard]] FrameIndex first_row(ExtentId id) const noexcept { return id << unit_shift_; }

  // ---- finding

  /// The row of a block that is sealed, written or in flight, or kNoFrame.
  [[nodiscard]] FrameIndex find(ShapeId shape, SpaceId space, const BlockKey& key) const;
  /// Calls `use(i, find(shape, space, keys[i]))` for each key in order, until it returns false;
  /// returns the number of calls that returned true. While one group of keys is used, the rows of
  /// the next group and the index cells of the one after it are being prefetched, so that cache
  /// misses overlap.
  template <typename Use>
  std::size_t find_each(ShapeId shape, SpaceId space, std::span<const BlockKey> keys,
                        Use&& use) const;
  /// Returns the length of the longest readable prefix of `keys`. Compares only hashes, without
  /// reading any row, and then the key of the last block: a block that is missing *before* a
  /// present one counts as present if its 32-bit hash is that of some readable block of this shape.
  /// The rows of 8,192 keys lie on as many cache lines, which is half of the cost of a lookup.
  [[nodiscard]] std::size_t readable_prefix(ShapeId shape, SpaceId space,
                                            std::span<const BlockKey> keys) const;
  static constexpr std::size_t kGroup = 32;
  /// Whether the block is sealed, and its extent is not leaving.
  [[nodiscard]] bool is_readable(FrameIndex row) const {
    return row != kNoFrame && block_at(row).state == FrameState::kSealed &&
           (leaving_ == 0 || !is_leaving(row));
  }
  void prefetch_row(FrameIndex row) const { rows_->prefetch(row); }
  /// Prefetches what hold(), unhold() or free() of a block will touch; prefetch_neighbours(),
  /// called once that has arrived, what lies beside it in the order of eviction.
  void prefetch_block(FrameIndex row) const {
    rows_->prefetch(row);
    prefetch_to_write(&listed_[row / 64]);
    if (kept_ != nullptr) prefetch_to_write(&proofs_[row]);
    extents_.prefetch(extent_id_of(row));
  }
  void prefetch_neighbours(FrameIndex row) const { rows_->prefetch_neighbours(row); }
  /// Prefetches what the policy will touch for the block's name in seal(); call it once the row has
  /// arrived.
  void prefetch_name(FrameIndex row) const;
  /// The same for free() and evict(), including what the index will touch.
  void prefetch_free(FrameIndex row) const;

  // ---- changing

  /// Puts a block that is not in the index into a free frame: written, owned by `owner`.
  FrameIndex take_free(ShapeId shape, SpaceId space, const BlockKey& key, std::uint32_t owner,
                       Depth depth = kUnknownDepth);
  /// The same for a block that is fetched.
  FrameIndex take_for_fetch(ShapeId shape, SpaceId space, const BlockKey& key);
  /// Sets the state of the row's fetch.
  void set_fetch_state(FrameIndex row, FetchState state);
  [[nodiscard]] FetchState fetch_state(FrameIndex row) const noexcept {
    return static_cast<FetchState>(block_at(row).owner);
  }
  [[nodiscard]] bool is_in_flight(FrameIndex row) const noexcept {
    return block_at(row).state == FrameState::kFetched && fetch_state(row) == FetchState::kInFlight;
  }
  /// Makes a block that is written, in flight, or held, unfindable; its frame stays as it is.
  void unlist(FrameIndex row);
  /// Seals a block that was written or fetched and is whole. It is evictable unless it is held.
  /// `writer` is kReplica or kRestored for one that was fetched, and only then.
  void seal(FrameIndex row, std::uint32_t writer, std::uint32_t now_s);

  /// hold() adds a claim to a sealed block, or one in flight; hold_again() adds a pin to a claimed
  /// block, and unhold_again() removes it while the claim stays; unhold() removes a claim or a pin,
  /// and returns true when the block became evictable with it. A block in flight never does.
  void hold(FrameIndex row);
  void hold_again(FrameIndex row);
  void unhold_again(FrameIndex row);
  bool unhold(FrameIndex row, std::uint32_t now_s);
  /// Frees a frame that is written, fetched or evictable. An extent without a used frame returns
  /// its units.
  void free(FrameIndex row) { free(row, EvictionPolicy::Freed::kDropped); }
  /// Frees the victim.
  void evict(FrameIndex row) { free(row, EvictionPolicy::Freed::kEvicted); }

  /// The evictable block that is evicted next, replicas first; kNoFrame when no block of that shape
  /// is evictable.
  [[nodiscard]] FrameIndex victim(ShapeId shape) {
    OneShape& from = of(shape);
    const FrameIndex replica = from.replicas->victim();
    return replica != kNoFrame ? replica : from.policy->victim();
  }
  /// A claim or a save of blocks of that shape begins; see EvictionPolicy. Saves above a tier may
  /// not be refused: what the pool never held, the tier never gets.
  void begin_claim(ShapeId shape) {
    of(shape).policy->claim_begins();
    follow_uses();
  }
  void begin_save(ShapeId shape, bool may_refuse) {
    of(shape).policy->save_begins(may_refuse && listener_ == nullptr);
    follow_uses();
  }
  /// Whether the policy refuses a new block for which `victim` would have to leave.
  [[nodiscard]] bool refuses(ShapeId shape, SpaceId space, const BlockKey& key, FrameIndex victim) {
    return listener_ == nullptr && !is_replica(victim) &&
           of(shape).policy->refuses(hash(space, key));
  }
  /// Appends the next victims among the blocks that are no replicas; see EvictionPolicy.
  void next_victims(ShapeId shape, std::size_t most, std::vector<FrameIndex>& rows) const {
    of(shape).policy->next_victims(most, rows);
  }
  /// From now on `listener` hears of sealed blocks that come and go; null: none does.
  void set_listener(BlockListener* listener) noexcept { listener_ = listener; }
  [[nodiscard]] bool is_replica(FrameIndex row) const noexcept {
    return block_at(row).state == FrameState::kSealed && block_at(row).owner == kReplica;
  }
  /// The block after an evictable one in the list of its policy: most likely the victim after it.
  [[nodiscard]] FrameIndex behind(FrameIndex row) const {
    return block_at(row).place.next_plus_1 - 1;
  }
  struct Room {
    std::uint64_t free_frames = 0;  ///< In the extents of a shape.
    std::uint64_t frame_bytes = 0;
  };
  [[nodiscard]] Room room_of(ShapeId shape) const {
    return {of(shape).frames - of(shape).used, of(shape).layout.frame_bytes()};
  }
  /// The sealed blocks that are in the index and no replicas, the last used first. O(rows).
  [[nodiscard]] std::vector<FrameIndex> sealed_by_age() const;
  /// The `n`-th block counted from the one that became evictable last, or kNoFrame. O(rows).
  [[nodiscard]] FrameIndex recent_evictable(std::size_t n) const;

  // ---- queries

  [[nodiscard]] const Block& operator[](FrameIndex row) const noexcept { return block_at(row); }
  /// The first row from `row` on whose frame was used since its extent was made, or kNoFrame.
  [[nodiscard]] FrameIndex next_touched(FrameIndex row) const;

  /// Written frames, including those in flight and given up.
  [[nodiscard]] std::uint32_t written_count() const noexcept { return written_; }
  [[nodiscard]] std::uint32_t sealed_count() const noexcept { return sealed_; }
  [[nodiscard]] std::uint32_t held_count() const noexcept { return held_; }
  [[nodiscard]] std::uint64_t written_bytes() const noexcept { return written_bytes_; }
  [[nodiscard]] std::uint64_t sealed_bytes() const noexcept { return sealed_bytes_; }
  [[nodiscard]] std::uint64_t held_bytes() const noexcept { return held_bytes_; }
  /// Bytes of frames that are written or held, which no eviction can free.
  [[nodiscard]] std::uint64_t busy_bytes() const noexcept {
    return written_bytes_ + held_bytes_ - held_in_flight_bytes_;
  }
  struct Fetched {
    std::uint32_t frames = 0;
    std::uint64_t bytes = 0;
  };
  /// Frames that are kFetched and in that state.
  [[nodiscard]] const Fetched& fetched(FetchState state) const noexcept {
    return fetched_[static_cast<std::size_t>(state)];
  }
  [[nodiscard]] std::uint64_t fetched_bytes() const noexcept {
    return fetched_[0].bytes + fetched_[1].bytes + fetched_[2].bytes;
  }
  [[nodiscard]] std::uint32_t replica_count() const noexcept { return replicas_; }
  [[nodiscard]] std::uint64_t exchanged_extents() const noexcept { return exchanged_; }
  [[nodiscard]] const ExtentMap& extents() const noexcept { return extents_; }
  [[nodiscard]] std::uint64_t memory_bytes() const;

  /// One more than the highest number of a shape; lower numbers may be unused, see has_shape().
  [[nodiscard]] std::uint32_t shape_count() const noexcept {
    return static_cast<std::uint32_t>(shapes_.size());
  }
  struct ShapeInfo {
    std::uint32_t number = 0;
    const Shape* shape = nullptr;
    std::uint64_t frame_bytes = 0;
    std::uint32_t extents = 0;
    std::uint64_t frames = 0;  ///< Frames of its extents.
    std::uint32_t used = 0;    ///< Those that are not free.
  };
  [[nodiscard]] std::vector<ShapeInfo> shapes() const;

  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] Result<void> check() const;

 private:
  struct OneShape {
    Shape shape;
    FrameLayout layout;
    std::vector<std::uint32_t> units;  ///< Units of an extent, by part.
    FlatIndex index;
    std::unique_ptr<EvictionPolicy> policy{};
    std::unique_ptr<EvictionPolicy> replicas{};  ///< Orders the replicas, instead of `policy`.
    IndexList<&Extent::with_free> with_free{};
    std::uint32_t extents = 0;
    std::uint64_t frames = 0;
    std::uint32_t used = 0;
    std::uint32_t leaving_for_it = 0;  ///< Extents in exchange for this shape.
    std::uint32_t users = 0;           ///< Calls of add_shape() without leave_shape().
    std::uint32_t spaces =
        0;  ///< Generations, including retired ones whose claims and jobs still end.
    bool is_unused = false;       ///< Returned by take_unused().
    std::uint32_t next_look = 0;  ///< The part of a large pool that is searched next.
    // Values at the last search for an exchange that failed: it is repeated only after a change.
    std::uint64_t in_vain_use = ~std::uint64_t{0};
    std::uint64_t in_vain_quiet = ~std::uint64_t{0};
  };

  BlockTable(const Options& options, ExtentMap extents, std::unique_ptr<BlockRows> rows,
             ZeroPages<std::uint64_t> listed);
  struct Aged;
  void adopt_rows(ExtentId id, const IsLive& is_live, std::vector<Aged>& whole, Adopted& adopted);
  void adopt_block(FrameIndex row, bool is_held);
  void quarantine(FrameIndex row);
  void end_adoption(ExtentId id);
  void keep_extent(ExtentId id);
  /// Records for a later process that the row is whole, or that it may change from now on.
  void prove(FrameIndex row) noexcept;
  void disprove(FrameIndex row) noexcept;
  [[nodiscard]] OneShape& of(ShapeId shape) noexcept {
    return *shapes_[static_cast<std::uint32_t>(shape)];
  }
  [[nodiscard]] const OneShape& of(ShapeId shape) const noexcept {
    return *shapes_[static_cast<std::uint32_t>(shape)];
  }
  [[nodiscard]] ExtentId extent_id_of(FrameIndex row) const noexcept {
    return extents_.known_owner(row >> unit_shift_);
  }
  [[nodiscard]] Extent& extent_of(FrameIndex row) noexcept { return extents_[extent_id_of(row)]; }
  [[nodiscard]] const Extent& extent_of(FrameIndex row) const noexcept {
    return extents_[extent_id_of(row)];
  }
  [[nodiscard]] std::uint64_t frame_bytes(const Extent& extent) const noexcept {
    return of(extent.shape()).layout.frame_bytes();
  }
  [[nodiscard]] Block& block_at(FrameIndex row) noexcept { return (*rows_)[row]; }
  [[nodiscard]] const Block& block_at(FrameIndex row) const noexcept { return (*rows_)[row]; }
  [[nodiscard]] Shape placed(Shape shape) const;
  [[nodiscard]] Result<std::unique_ptr<OneShape>> make_shape(Shape shape, std::uint32_t number);
  FrameIndex take(ShapeId shape, SpaceId space, const BlockKey& key, FrameState state,
                  std::uint32_t owner);
  void free(FrameIndex row, EvictionPolicy::Freed why);
  /// unlist() for callers that have its shape and hash.
  void unlist(OneShape& shape, FrameIndex row, std::uint32_t hash);
  /// The policy that orders a sealed block.
  [[nodiscard]] static EvictionPolicy& policy_of(OneShape& shape, const Block& block) noexcept {
    return block.owner == kReplica ? *shape.replicas : *shape.policy;
  }
  void count_fetched(const Extent& extent, FetchState state, int frames) noexcept;
  [[nodiscard]] static bool is_over(const OneShape& shape) noexcept {
    return shape.users == 0 && shape.spaces == 0 && shape.extents == 0 &&
           shape.leaving_for_it == 0 && !shape.is_unused;
  }
  void note_unused(ShapeId shape) {
    if (is_over(of(shape))) unused_.push_back(shape);
  }
  bool make_extent(ShapeId shape);
  void give_up(ExtentId id);
  [[nodiscard]] std::size_t readable_prefix_by_hash(const OneShape& shape, SpaceId space,
                                                    std::span<const BlockKey> keys) const;
  /// Sealed and in the index: equal to is_readable() while no extent is leaving.
  [[nodiscard]] bool is_listed(FrameIndex row) const noexcept {
    return (listed_[row / 64] >> (row % 64) & 1) != 0;
  }
  void add_busy(Extent& extent) noexcept { ++extent.busy; }
  void drop_busy(Extent& extent) noexcept {
    if (--extent.busy == 0) ++quiet_;
  }
  [[nodiscard]] std::uint64_t used_at(FrameIndex row) const { return uses_ - rows_->age(row); }
  /// Follows the 32-bit count of `rows_`, and keeps the extent's sum equal to that of its rows.
  void note_use(Extent& extent, std::uint64_t before) noexcept;
  void follow_uses() noexcept { uses_ += rows_->uses() - static_cast<std::uint32_t>(uses_); }

  [[nodiscard]] std::uint32_t hash(FrameIndex row) const noexcept {
    return hash(block_at(row).space, block_at(row).key);
  }
  [[nodiscard]] bool is_evictable(FrameIndex row) const {
    return block_at(row).state == FrameState::kSealed && block_at(row).holds == 0;
  }
  [[nodiscard]] static std::uint32_t hash(SpaceId space, const BlockKey& key) noexcept {
    // The engine's hash is uniform; its second word is zero where the algorithm has 8 bytes only.
    std::uint64_t second = 0;
    std::memcpy(&second, key.bytes.data() + sizeof second, sizeof second);
    return mix_hash(key.hash(), second + static_cast<std::uint64_t>(space) * 0x9E3779B97F4A7C15ULL);
  }
  [[nodiscard]] FrameIndex find(const OneShape& shape, std::uint32_t hash, SpaceId space,
                                const BlockKey& key) const {
    return shape.index.find(hash, [&](std::uint32_t row) {
      return block_at(row).space == space && block_at(row).key == key;
    });
  }
  [[nodiscard]] Result<void> check_extent(ExtentId id) const;
  [[nodiscard]] Result<void> check_fetched() const;
  [[nodiscard]] Result<void> check_shape(const OneShape& shape) const;

  BlockListener* listener_ = nullptr;
  EvictionKind eviction_;
  ExtentMap extents_;
  unsigned unit_shift_;  ///< Rows of a unit, as a power of two.
  std::unique_ptr<BlockRows> rows_;
  ZeroPages<std::uint64_t> listed_;                ///< is_listed(), a bit a row.
  KeptTables* kept_;                               ///< Null: the rows end with this process.
  std::span<std::uint64_t> proofs_;                ///< A word a row; empty without `kept_`.
  std::span<KeptExtent> kept_extents_;             ///< By first unit; the same.
  std::vector<std::unique_ptr<OneShape>> shapes_;  ///< Policies refer to `rows_`. Null: removed.
  std::vector<ShapeId> unused_;                    ///< For take_unused(); they may be in use again.
  std::uint64_t uses_ = 0;                         ///< BlockRows::uses(), and never wraps.
  std::uint64_t quiet_ = 0;  ///< The number of times that an extent lost its last busy frame.
  std::uint64_t exchanged_ = 0;
  std::uint64_t emptied_ = 0;
  std::uint32_t leaving_ =
      0;  ///< Extents that are leaving; mostly 0, so that readers need not look.
  std::uint32_t written_ = 0;
  std::uint32_t sealed_ = 0;
  std::uint32_t held_ = 0;
  std::uint64_t written_bytes_ = 0;
  std::uint64_t sealed_bytes_ = 0;
  std::uint64_t held_bytes_ = 0;
  std::uint64_t held_in_flight_bytes_ = 0;  ///< Bytes of frames that are kFetched and held.
  std::array<Fetched, 3> fetched_{};        ///< By FetchState.
  std::uint32_t replicas_ = 0;              ///< Sealed replicas.
};

template <typename Use>
std::size_t BlockTable::find_each(ShapeId id, SpaceId space, std::span<const BlockKey> keys,
                                  Use&& use) const {
  const OneShape& shape = of(id);
  std::array<std::uint32_t, 4 * kGroup> hashes;
  const auto group = [&](std::size_t begin, auto&& each) {
    const std::size_t end = std::min(begin + kGroup, keys.size());
    for (std::size_t i = begin; i < end; ++i) each(i, hashes[i % hashes.size()]);
  };
  const auto fetch_cell = [&](std::size_t i, std::uint32_t& key_hash) {
    key_hash = hash(space, keys[i]);
    shape.index.prefetch_walk(key_hash);
  };
  const auto fetch_block = [&](std::size_t, std::uint32_t key_hash) {
    const std::uint32_t guess = shape.index.first_guess(key_hash);
    if (guess != FlatIndex::kNone) rows_->prefetch_to_read(guess);
  };
  group(0, fetch_cell);
  group(kGroup, fetch_cell);
  group(0, fetch_block);
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    group(begin + 2 * kGroup, fetch_cell);
    group(begin + kGroup, fetch_block);
    const std::size_t end = std::min(begin + kGroup, keys.size());
    for (std::size_t i = begin; i < end; ++i) {
      if (!use(i, find(shape, hashes[i % hashes.size()], space, keys[i]))) return i;
    }
  }
  return keys.size();
}

}  // namespace pegaflow::engine
