#include "engine/frames/block_table.h"

#include <atomic>
#include <bit>
#include <utility>

#include "base/assert.h"
#include "base/page_layout.h"
#include "engine/tables/store_order.h"

namespace pegaflow::engine {

Result<BlockTable> BlockTable::create(const Options& options) {
  ExtentMap extents(options.pool_bytes, options.numa_nodes);
  const std::uint64_t rows = extents.unit_count() * (extents.unit_bytes() / kSlotAlignment);
  std::unique_ptr<BlockRows> blocks;
  if (options.kept != nullptr) {
    PEGA_ASSERT(options.kept->rows().size() == rows, "kept tables of {} rows for {}",
                options.kept->rows().size(), rows);
    blocks = BlockRows::shared(options.kept->rows(), options.kept->uses());
  } else {
    PEGA_TRY_LET(blocks, BlockRows::create(rows));
  }
  PEGA_TRY_LET(auto listed, ZeroPages<std::uint64_t>::create((rows + 63) / 64));
  return BlockTable(options, std::move(extents), std::move(blocks), std::move(listed));
}

BlockTable::BlockTable(const Options& options, ExtentMap extents, std::unique_ptr<BlockRows> rows,
                       ZeroPages<std::uint64_t> listed)
    : eviction_(options.eviction),
      extents_(std::move(extents)),
      unit_shift_(static_cast<unsigned>(std::countr_zero(extents_.unit_bytes() / kSlotAlignment))),
      rows_(std::move(rows)),
      listed_(std::move(listed)),
      kept_(options.kept),
      proofs_(kept_ == nullptr ? std::span<std::uint64_t>() : kept_->proofs()),
      kept_extents_(kept_ == nullptr ? std::span<KeptExtent>() : kept_->extents()) {}

// ---- shapes and extents

Result<BlockTable::Added> BlockTable::add_shape(const Shape& wanted) {
  const Shape shape = placed(wanted);
  std::size_t with_users = 0;
  std::size_t known = 0;
  std::size_t place = shapes_.size();  // The first without a shape.
  for (std::size_t i = 0; i < shapes_.size(); ++i) {
    OneShape* const each = shapes_[i].get();
    if (each == nullptr) {
      place = std::min(place, i);
      continue;
    }
    ++known;
    with_users += each->users != 0 ? 1 : 0;
    if (each->is_unused || each->shape != shape) continue;
    ++each->users;
    return Added{.id = ShapeId{static_cast<std::uint32_t>(i)}, .is_new = false};
  }
  // Before the limits: a shape that can never be has an error of its own.
  PEGA_TRY(FrameLayout::create(shape).and_then(
      [this](const FrameLayout& layout) { return extents_.units_for(layout); }));
  if (with_users == kMaxShapes) {
    return fail(Errc::kBusy, "{} page sizes are in use", with_users);
  }
  if (known == 2 * kMaxShapes) {
    return fail(Errc::kBusy, "blocks of {} former page sizes are still being returned",
                known - with_users);
  }
  static_assert(2 * kMaxShapes <= KeptTables::kPolicies);
  const auto number = static_cast<std::uint32_t>(place);
  // Of another shape of that number, if a former process died between its end and this moment.
  if (kept_ != nullptr) kept_->forget_policy(number);
  PEGA_TRY_LET(auto made, make_shape(shape, number));
  if (place == shapes_.size()) shapes_.emplace_back();
  shapes_[place] = std::move(made);
  return Added{.id = ShapeId{number}, .is_new = true};
}

void BlockTable::remove_shape(ShapeId shape) {
  const auto number = static_cast<std::uint32_t>(shape);
  shapes_[number].reset();
  if (kept_ != nullptr) kept_->forget_policy(number);
}

/// A pool too small to be divided among its NUMA nodes lies on one: two parts there would be one.
Shape BlockTable::placed(Shape shape) const {
  for (Shape::Shard& shard : shape.shards) {
    if (shard.numa_node >= extents_.numa_node_count()) shard.numa_node = 0;
  }
  return shape;
}

Result<std::unique_ptr<BlockTable::OneShape>> BlockTable::make_shape(Shape shape,
                                                                     std::uint32_t number) {
  PEGA_TRY_LET(FrameLayout layout, FrameLayout::create(shape));
  PEGA_TRY_LET(std::vector<std::uint32_t> units, extents_.units_for(layout));
  // As many frames as the pool can ever have of this shape, so that the index never grows.
  const std::uint64_t pool = extents_.unit_count() * extents_.unit_bytes();
  const auto frames =
      static_cast<std::uint32_t>(std::max<std::uint64_t>(pool / layout.frame_bytes(), 1));
  PEGA_TRY_LET(FlatIndex index, FlatIndex::create(frames, PageUse::kDense));
  const PolicyMemory memory =
      kept_ == nullptr ? PolicyMemory() : PolicyMemory(kept_->policy(number));
  PEGA_TRY_LET(auto policy, EvictionPolicy::create(eviction_, *rows_, frames, memory));
  PEGA_TRY_LET(auto replicas, EvictionPolicy::create(EvictionKind::kLru, *rows_, frames));
  return std::make_unique<OneShape>(OneShape{.shape = std::move(shape),
                                             .layout = std::move(layout),
                                             .units = std::move(units),
                                             .index = std::move(index),
                                             .policy = std::move(policy),
                                             .replicas = std::move(replicas),
                                             .users = 1});
}

void BlockTable::leave_shape(ShapeId shape) {
  PEGA_ASSERT(of(shape).users != 0, "shape {} has no user", static_cast<std::uint32_t>(shape));
  --of(shape).users;
  note_unused(shape);
}

void BlockTable::drop_space(ShapeId shape) {
  PEGA_ASSERT(of(shape).spaces != 0, "shape {} has no space", static_cast<std::uint32_t>(shape));
  --of(shape).spaces;
  note_unused(shape);
}

std::optional<ShapeId> BlockTable::take_unused() {
  while (!unused_.empty()) {
    const ShapeId id = unused_.back();
    unused_.pop_back();
    OneShape* const shape = shapes_[static_cast<std::uint32_t>(id)].get();
    if (shape == nullptr || !is_over(*shape)) continue;
    shape->is_unused = true;
    return id;
  }
  return std::nullopt;
}

bool BlockTable::forget(ShapeId shape, std::size_t page, std::size_t count) {
  const std::size_t of_index =
      (of(shape).index.memory_bytes() + kSlotAlignment - 1) / kSlotAlignment;
  return page < of_index ? of(shape).index.forget(page, count)
                         : of(shape).policy->forget(page - of_index, count);
}

std::uint64_t BlockTable::page_offset(FrameIndex row, std::uint32_t shard) const {
  const ExtentId id = extent_id_of(row);
  const Extent& extent = extents_[id];
  const FrameLayout& layout = of(extent.shape()).layout;
  PEGA_ASSERT(shard < layout.shard_count(), "shard {} of {} in row {}", shard, layout.shard_count(),
              row);
  const FrameLayout::Place& place = layout.place(shard);
  return extent.runs[place.part].first * extents_.unit_bytes() +
         (row - first_row(id)) * layout.parts()[place.part].bytes + place.offset;
}

std::uint32_t BlockTable::page_number(FrameIndex row, std::uint32_t shard) const {
  const ExtentId id = extent_id_of(row);
  const Extent& extent = extents_[id];
  const FrameLayout& layout = of(extent.shape()).layout;
  PEGA_ASSERT(shard < layout.shard_count(), "shard {} of {} in row {}", shard, layout.shard_count(),
              row);
  const FrameLayout::Place& place = layout.place(shard);
  // A page has at least 4 KiB, so the pages of a run have fewer numbers than it has 4 KiB pages.
  const std::uint64_t before =
      extent.runs[place.part].first * extents_.unit_bytes() / kSlotAlignment;
  return static_cast<std::uint32_t>(
      before + (row - first_row(id)) * layout.parts()[place.part].pages + place.number);
}

bool BlockTable::touch(ShapeId shape, std::size_t page) {
  if (!has_shape(shape)) return false;
  const std::size_t of_index =
      (of(shape).index.memory_bytes() + kSlotAlignment - 1) / kSlotAlignment;
  return page < of_index ? of(shape).index.touch(page) : of(shape).policy->touch(page - of_index);
}

bool BlockTable::make_extent(ShapeId id) {
  OneShape& shape = of(id);
  const auto made = extents_.make(id, shape.layout, shape.units, uses_);
  if (!made) return false;
  ++shape.extents;
  shape.frames += extents_[*made].frames;
  shape.with_free.push_back(extents_, *made);
  keep_extent(*made);
  return true;
}

void BlockTable::keep_extent(ExtentId id) {
  if (kept_ == nullptr) return;
  const Extent& extent = extents_[id];
  kept_->set_extent(id, {.serial = extent.serial,
                         .shape = static_cast<std::uint32_t>(extent.shape()),
                         .frames = extent.frames,
                         .touched = extent.touched,
                         .run_count = extent.run_count,
                         .runs = extent.runs});
}

std::vector<ExtentId> BlockTable::start_exchange(ShapeId id, FrameIndex victim) {
  OneShape& shape = of(id);
  if (shape.leaving_for_it != 0 || shapes_.size() == 1) return {};
  const bool has_own = victim != kNoFrame;
  // With a block of its own to evict, it searches once per use of a block, in a large pool only the
  // next part; without, all of the pool, once an extent has become quiet.
  if (has_own ? shape.in_vain_use == uses_ : shape.in_vain_quiet == quiet_) return {};
  const auto part = has_own ? std::optional(shape.next_look++) : std::nullopt;
  auto choice = extents_.oldest_of_others(id, shape.layout, shape.units, part);
  if (!choice || choice->extents.empty() || (has_own && choice->mean_use >= used_at(victim))) {
    shape.in_vain_use = uses_;
    if (!has_own) shape.in_vain_quiet = quiet_;
    return {};
  }
  for (const ExtentId each : choice->extents) {
    Extent& extent = extents_[each];
    if (extent.has_free()) of(extent.shape()).with_free.erase(extents_, each);
    extent.is_leaving = true;
    ++leaving_;
    ++shape.leaving_for_it;
    ++exchanged_;
  }
  return std::move(choice->extents);
}

void BlockTable::give_up(ExtentId id) {
  Extent& extent = extents_[id];
  OneShape& shape = of(extent.shape());
  if (extent.has_free()) shape.with_free.erase(extents_, id);
  if (extent.is_leaving) --leaving_;
  if (--shape.extents == 0) ++emptied_;
  shape.frames -= extent.frames;
  if (kept_ != nullptr) kept_->clear_extent(id);
  rows_->forget(first_row(id), extent.touched);
  const ShapeId of_it = extent.shape();
  extents_.release(id);
  note_unused(of_it);
}

// ---- finding

FrameIndex BlockTable::find(ShapeId shape, SpaceId space, const BlockKey& key) const {
  return find(of(shape), hash(space, key), space, key);
}

std::size_t BlockTable::readable_prefix(ShapeId id, SpaceId space,
                                        std::span<const BlockKey> keys) const {
  if (leaving_ == 0) {
    const std::size_t found = readable_prefix_by_hash(of(id), space, keys);
    if (found == 0 || is_readable(find(id, space, keys[found - 1]))) return found;
  }
  return find_each(id, space, keys,
                   [this](std::size_t, FrameIndex row) { return is_readable(row); });
}

std::size_t BlockTable::readable_prefix_by_hash(const OneShape& shape, SpaceId space,
                                                std::span<const BlockKey> keys) const {
  // While one group is processed, the cells of the next are being prefetched.
  std::array<std::array<std::uint32_t, kGroup>, 2> hashes;
  const auto fetch = [&](std::size_t begin) {
    const std::size_t end = std::min(begin + kGroup, keys.size());
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t key_hash = hash(space, keys[i]);
      hashes[i / kGroup % 2][i % kGroup] = key_hash;
      shape.index.prefetch(key_hash);
    }
  };
  fetch(0);
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    fetch(begin + kGroup);
    const std::size_t end = std::min(begin + kGroup, keys.size());
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t row = shape.index.find(
          hashes[i / kGroup % 2][i % kGroup], [this](FrameIndex each) { return is_listed(each); });
      if (row == FlatIndex::kNone) return i;
    }
  }
  return keys.size();
}

void BlockTable::prefetch_name(FrameIndex row) const {
  of(shape_of(row)).policy->prefetch(hash(row));
}

void BlockTable::prefetch_free(FrameIndex row) const {
  const OneShape& shape = of(shape_of(row));
  const std::uint32_t name = hash(row);
  shape.index.prefetch_walk(name);
  shape.policy->prefetch(name);
}

// ---- changing

void BlockTable::note_use(Extent& extent, std::uint64_t before) noexcept {
  follow_uses();
  extent.use_sum += uses_ - before;
}

FrameIndex BlockTable::take_free(ShapeId id, SpaceId space, const BlockKey& key,
                                 std::uint32_t owner, Depth depth) {
  const FrameIndex row = take(id, space, key, FrameState::kWritten, owner);
  block_at(row).depth = depth & kMostDepth;
  return row;
}

FrameIndex BlockTable::take_for_fetch(ShapeId id, SpaceId space, const BlockKey& key) {
  const FrameIndex row =
      take(id, space, key, FrameState::kFetched, static_cast<std::uint32_t>(FetchState::kInFlight));
  count_fetched(extent_of(row), FetchState::kInFlight, 1);
  return row;
}

void BlockTable::count_fetched(const Extent& extent, FetchState state, int frames) noexcept {
  Fetched& count = fetched_[static_cast<std::size_t>(state)];
  count.frames += static_cast<std::uint32_t>(frames);
  count.bytes += static_cast<std::uint64_t>(frames) * frame_bytes(extent);
}

void BlockTable::set_fetch_state(FrameIndex row, FetchState state) {
  PEGA_ASSERT(block_at(row).state == FrameState::kFetched, "row {} is not fetched", row);
  count_fetched(extent_of(row), this->fetch_state(row), -1);
  count_fetched(extent_of(row), state, 1);
  block_at(row).owner = static_cast<std::uint32_t>(state);
}

FrameIndex BlockTable::take(ShapeId id, SpaceId space, const BlockKey& key, FrameState state,
                            std::uint32_t owner) {
  OneShape& shape = of(id);
  const ExtentId from = shape.with_free.front();
  PEGA_ASSERT(from != ~ExtentId{0}, "no frame of shape {} is free", static_cast<std::uint32_t>(id));
  Extent& extent = extents_[from];
  FrameIndex row = extent.freed.back();
  if (row != kNoFrame) {
    extent.freed.erase(*rows_, row);
  } else {
    row = first_row(from) + extent.touched++;
    if (kept_ != nullptr) kept_extents_[from].touched = extent.touched;
  }
  ++extent.used;
  if (!extent.has_free()) shape.with_free.erase(extents_, from);
  add_busy(extent);
  Block& block = block_at(row);
  block = Block{};
  block.key = key;
  block.space = space;
  block.owner = owner;
  block.state = state;
  block.indexed = true;
  shape.index.insert(hash(space, key), row);
  ++shape.used;
  ++written_;
  written_bytes_ += shape.layout.frame_bytes();
  return row;
}

void BlockTable::unlist(FrameIndex row) { unlist(of(shape_of(row)), row, hash(row)); }

void BlockTable::unlist(OneShape& shape, FrameIndex row, std::uint32_t hash) {
  Block& block = block_at(row);
  if (!block.indexed) return;
  disprove(row);
  const bool was_there = shape.index.erase(hash, row);
  PEGA_ASSERT(was_there, "row {} is not in the index", row);
  block.indexed = false;
  listed_[row / 64] &= ~(std::uint64_t{1} << (row % 64));
}

void BlockTable::prove(FrameIndex row) noexcept {
  if (kept_ == nullptr) return;
  const std::uint64_t proof = row_proof(block_at(row), row, extent_of(row).serial);
  std::atomic_ref(proofs_[row]).store(proof, std::memory_order_release);
}

void BlockTable::disprove(FrameIndex row) noexcept {
  if (kept_ == nullptr) return;
  std::atomic_ref(proofs_[row]).store(0, std::memory_order_relaxed);
  order_stores();  // Before what changes next.
}

void BlockTable::seal(FrameIndex row, std::uint32_t writer, std::uint32_t now_s) {
  Block& block = block_at(row);
  const bool is_fetched = block.state == FrameState::kFetched;
  PEGA_ASSERT((is_fetched || block.state == FrameState::kWritten) && block.indexed &&
                  is_fetched == (writer <= kRestored),
              "row {} cannot be sealed", row);
  Extent& extent = extent_of(row);
  if (is_fetched) {
    count_fetched(extent, fetch_state(row), -1);
    if (writer == kReplica) ++replicas_;
  }
  block.state = FrameState::kSealed;
  listed_[row / 64] |= std::uint64_t{1} << (row % 64);
  block.owner = writer;
  block.sealed_s = now_s;
  block.idle_since_s = now_s;
  prove(row);
  --written_;
  ++sealed_;
  written_bytes_ -= frame_bytes(extent);
  sealed_bytes_ += frame_bytes(extent);
  EvictionPolicy& policy = policy_of(of(extent.shape()), block);
  policy.sealed(row, hash(row));
  note_use(extent, extent.made);
  if (listener_ != nullptr) {
    using From = BlockListener::From;
    listener_->sealed(row, writer == kReplica    ? From::kNode
                           : writer == kRestored ? From::kDisk
                                                 : From::kEngine);
  }
  if (block.holds != 0) {
    held_in_flight_bytes_ -= frame_bytes(extent);
    policy.taken(row);
    return;
  }
  drop_busy(extent);
}

void BlockTable::hold(FrameIndex row) {
  Block& block = block_at(row);
  Extent& extent = extent_of(row);
  if (block.state != FrameState::kSealed) {
    PEGA_ASSERT(is_in_flight(row), "row {} is held, and neither sealed nor in flight", row);
    if (block.holds++ != 0) return;
    ++held_;
    held_bytes_ += frame_bytes(extent);
    held_in_flight_bytes_ += frame_bytes(extent);
    return;
  }
  EvictionPolicy& policy = policy_of(of(extent.shape()), block);
  block.used = 1;
  if (block.holds++ != 0) {
    policy.used_again(row);
    return;
  }
  policy.taken(row);
  ++held_;
  held_bytes_ += frame_bytes(extent);
  add_busy(extent);
}

void BlockTable::hold_again(FrameIndex row) {
  PEGA_ASSERT(block_at(row).holds != 0, "row {} is pinned and not claimed", row);
  ++block_at(row).holds;
}

void BlockTable::unhold_again(FrameIndex row) {
  PEGA_ASSERT(block_at(row).holds > 1, "row {} is not pinned beside its claim", row);
  --block_at(row).holds;
}

bool BlockTable::unhold(FrameIndex row, std::uint32_t now_s) {
  Block& block = block_at(row);
  PEGA_ASSERT(block.holds != 0, "row {} has no holder", row);
  block.holds = (block.holds - 1) & kMaxHolds;
  if (block.holds != 0) return false;
  Extent& extent = extent_of(row);
  --held_;
  held_bytes_ -= frame_bytes(extent);
  if (block.state != FrameState::kSealed) {
    held_in_flight_bytes_ -= frame_bytes(extent);
    return false;
  }
  block.idle_since_s = now_s;
  const std::uint64_t before = used_at(row);
  policy_of(of(extent.shape()), block).released(row);
  note_use(extent, before);
  drop_busy(extent);
  return true;
}

void BlockTable::free(FrameIndex row, EvictionPolicy::Freed why) {
  Block& block = block_at(row);
  PEGA_ASSERT(block.state != FrameState::kFree && block.holds == 0, "row {} is free or held", row);
  const ExtentId id = extent_id_of(row);
  Extent& extent = extents_[id];
  OneShape& shape = of(extent.shape());
  const std::uint64_t bytes = shape.layout.frame_bytes();
  const std::uint32_t name = hash(row);
  if (block.state == FrameState::kSealed) {
    if (listener_ != nullptr) listener_->dropped(row, why == EvictionPolicy::Freed::kEvicted);
    extent.use_sum -= used_at(row) - extent.made;
    policy_of(shape, block).freed(row, name, why);
    if (block.owner == kReplica) --replicas_;
    --sealed_;
    sealed_bytes_ -= bytes;
  } else {
    if (block.state == FrameState::kFetched) count_fetched(extent, fetch_state(row), -1);
    --written_;
    written_bytes_ -= bytes;
    drop_busy(extent);
  }
  unlist(shape, row, name);
  block.state = FrameState::kFree;
  const bool had_free = extent.has_free();
  --extent.used;
  --shape.used;
  extent.freed.push_back(*rows_, row);
  if (!had_free && extent.has_free()) shape.with_free.push_back(extents_, id);
  if (extent.used == 0) give_up(id);
}

// ---- queries

FrameIndex BlockTable::next_touched(FrameIndex row) const {
  for (std::uint32_t unit = row >> unit_shift_; unit < extents_.unit_count();) {
    // The rows of an extent are those of its first run.
    const auto id = extents_.owner(unit);
    if (!id || unit < *id || unit >= *id + extents_[*id].runs[0].count) {
      ++unit;
      continue;
    }
    const FrameIndex from = std::max(row, first_row(*id));
    if (from < first_row(*id) + extents_[*id].touched) return from;
    unit = *id + extents_[*id].runs[0].count;
  }
  return kNoFrame;
}

FrameIndex BlockTable::recent_evictable(std::size_t n) const {
  std::vector<FrameIndex> evictable;
  for (FrameIndex row = next_touched(0); row != kNoFrame; row = next_touched(row + 1)) {
    if (is_evictable(row)) evictable.push_back(row);
  }
  if (n >= evictable.size()) return kNoFrame;
  const auto nth = evictable.begin() + static_cast<std::ptrdiff_t>(n);
  std::nth_element(
      evictable.begin(), nth, evictable.end(),
      [this](FrameIndex left, FrameIndex right) { return rows_->age(left) < rows_->age(right); });
  return *nth;
}

std::vector<FrameIndex> BlockTable::sealed_by_age() const {
  std::vector<FrameIndex> sealed;
  for (FrameIndex row = next_touched(0); row != kNoFrame; row = next_touched(row + 1)) {
    const Block& block = block_at(row);
    if (block.state == FrameState::kSealed && block.indexed && block.owner != kReplica) {
      sealed.push_back(row);
    }
  }
  std::sort(sealed.begin(), sealed.end(), [this](FrameIndex left, FrameIndex right) {
    return rows_->age(left) < rows_->age(right);
  });
  return sealed;
}

std::uint64_t BlockTable::memory_bytes() const {
  // The memory of rows is allocated in whole pages.
  constexpr std::uint64_t kRowsOfPage = kSlotAlignment / sizeof(Block);
  constexpr std::uint64_t kBitsOfPage = kSlotAlignment * 8;
  std::uint64_t rows = 0;
  std::uint64_t bit_pages = 0;
  std::uint64_t counted_pages = 0;  // Up to this one: several extents may share it.
  std::uint64_t bytes = extents_.memory_bytes();
  for (ExtentId id = 0; id < extents_.unit_count(); ++id) {
    if (extents_[id].shape_plus_1 == 0) continue;
    rows += (extents_[id].touched + kRowsOfPage - 1) / kRowsOfPage * kRowsOfPage;
    const std::uint64_t end =
        (std::uint64_t{first_row(id)} + extents_[id].touched + kBitsOfPage - 1) / kBitsOfPage;
    const std::uint64_t begin = std::max(counted_pages, first_row(id) / kBitsOfPage);
    if (end > begin) bit_pages += end - begin;
    counted_pages = std::max(counted_pages, end);
  }
  for (const auto& shape : shapes_) {
    if (shape == nullptr) continue;
    bytes += shape->index.memory_bytes() + shape->policy->memory_bytes();
  }
  return bytes + rows * sizeof(Block) + bit_pages * kSlotAlignment;
}

std::vector<BlockTable::ShapeInfo> BlockTable::shapes() const {
  std::vector<ShapeInfo> list;
  for (std::size_t i = 0; i < shapes_.size(); ++i) {
    const OneShape* const shape = shapes_[i].get();
    if (shape == nullptr || shape->is_unused) continue;
    list.push_back({.number = static_cast<std::uint32_t>(i),
                    .shape = &shape->shape,
                    .frame_bytes = shape->layout.frame_bytes(),
                    .extents = shape->extents,
                    .frames = shape->frames,
                    .used = shape->used});
  }
  return list;
}

}  // namespace pegaflow::engine
