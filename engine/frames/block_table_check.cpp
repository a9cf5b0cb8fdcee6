#include "base/page_layout.h"
#include "engine/frames/block_table.h"

namespace pegaflow::engine {

Result<void> BlockTable::check() const {
  std::uint32_t units = 0;
  std::uint32_t extents = 0;
  for (std::uint32_t unit = 0; unit < extents_.unit_count(); ++unit) {
    const auto id = extents_.owner(unit);
    if (!id) continue;
    ++units;
    if (extents_[*id].shape_plus_1 == 0) {
      return fail(Errc::kInternal, "unit {} belongs to an unused extent", unit);
    }
    if (*id != unit) continue;
    ++extents;
    PEGA_TRY(check_extent(*id));
  }
  if (units + extents_.free_units() != extents_.unit_count()) {
    return fail(Errc::kInternal, "{} units of {} are used, {} free", units, extents_.unit_count(),
                extents_.free_units());
  }
  std::uint32_t used = 0;
  std::uint64_t used_bytes = 0;
  for (const auto& shape : shapes_) {
    if (shape == nullptr) continue;
    if (shape->is_unused && (shape->users != 0 || shape->spaces != 0 || shape->extents != 0)) {
      return fail(Errc::kInternal, "an unused shape has {} users, {} generations and {} extents",
                  shape->users, shape->spaces, shape->extents);
    }
    PEGA_TRY(check_shape(*shape));
    extents -= shape->extents;
    used += shape->used;
    used_bytes += shape->used * shape->layout.frame_bytes();
  }
  PEGA_TRY(check_fetched());
  if (extents != 0 || used != written_ + sealed_ || used_bytes != written_bytes_ + sealed_bytes_) {
    return fail(Errc::kInternal, "{} frames of {} bytes are used, {} + {} and {} + {} are counted",
                used, used_bytes, written_, sealed_, written_bytes_, sealed_bytes_);
  }
  return {};
}

Result<void> BlockTable::check_fetched() const {
  std::array<Fetched, 3> fetched{};
  std::uint32_t replicas = 0;
  std::uint64_t held_in_flight = 0;
  for (FrameIndex row = next_touched(0); row != kNoFrame; row = next_touched(row + 1)) {
    replicas += is_replica(row) ? 1 : 0;
    if (block_at(row).state != FrameState::kFetched) continue;
    const std::uint64_t bytes = frame_bytes(extent_of(row));
    Fetched& count = fetched.at(static_cast<std::size_t>(fetch_state(row)));
    ++count.frames;
    count.bytes += bytes;
    if (block_at(row).holds != 0) held_in_flight += bytes;
  }
  for (std::size_t i = 0; i < fetched.size(); ++i) {
    if (fetched[i].frames != fetched_[i].frames || fetched[i].bytes != fetched_[i].bytes) {
      return fail(Errc::kInternal, "{} frames of {} bytes are in fetch state {}, {} of {} counted",
                  fetched[i].frames, fetched[i].bytes, i, fetched_[i].frames, fetched_[i].bytes);
    }
  }
  if (replicas != replicas_ || held_in_flight != held_in_flight_bytes_) {
    return fail(Errc::kInternal, "{} replicas and {} bytes of claimed fetches, {} and {} counted",
                replicas, held_in_flight, replicas_, held_in_flight_bytes_);
  }
  return {};
}

Result<void> BlockTable::check_extent(ExtentId id) const {
  const Extent& extent = extents_[id];
  const OneShape& shape = of(extent.shape());
  std::uint64_t use_sum = extent.made * extent.frames;
  std::uint32_t used = 0;
  std::uint32_t busy = 0;
  for (std::uint32_t i = 0; i < extent.touched; ++i) {
    const FrameIndex row = first_row(id) + i;
    const Block& block = block_at(row);
    used += block.state != FrameState::kFree ? 1 : 0;
    const bool is_fetched = block.state == FrameState::kFetched;
    busy += block.state == FrameState::kWritten || is_fetched || block.holds != 0 ? 1 : 0;
    if (block.state == FrameState::kSealed) use_sum += used_at(row) - extent.made;
    if (block.holds != 0 && block.state != FrameState::kSealed && !is_fetched) {
      return fail(Errc::kInternal, "row {} is held, and neither sealed nor fetched", row);
    }
    if (is_fetched && (block.owner > static_cast<std::uint32_t>(FetchState::kQuiesced) ||
                       block.indexed != is_in_flight(row) ||
                       (fetch_state(row) == FetchState::kQuiesced && block.holds == 0))) {
      return fail(Errc::kInternal, "the fetch state of row {} is wrong", row);
    }
    if (block.state == FrameState::kSealed && !block.indexed && block.holds == 0) {
      return fail(Errc::kInternal, "row {} is evictable and not in the index", row);
    }
    if (is_listed(row) != (block.indexed && block.state == FrameState::kSealed)) {
      return fail(Errc::kInternal, "row {} counts as {}readable", row, is_listed(row) ? "" : "un");
    }
    if (block.indexed && (block.state == FrameState::kFree ||
                          find(shape, hash(row), block.space, block.key) != row)) {
      return fail(Errc::kInternal, "the index does not lead to row {}", row);
    }
  }
  std::uint32_t freed = 0;
  for (FrameIndex row = extent.freed.front(); row != kNoFrame;
       row = extent.freed.next(*rows_, row)) {
    if (block_at(row).state != FrameState::kFree || ++freed > extent.freed.size()) {
      return fail(Errc::kInternal, "row {} is listed as free and is not", row);
    }
  }
  if (used != extent.used || busy != extent.busy || freed != extent.touched - used ||
      extent.touched > extent.frames || used == 0 || use_sum != extent.use_sum ||
      (extent.is_leaving && busy != 0)) {
    return fail(Errc::kInternal,
                "extent {} has {} used, {} busy, {} freed of {} touched frames, sum {}; kept {}, "
                "{}, of {}, {}",
                id, used, busy, freed, extent.touched, use_sum, extent.used, extent.busy,
                extent.frames, extent.use_sum);
  }
  return {};
}

Result<void> BlockTable::check_shape(const OneShape& shape) const {
  std::uint32_t extents = 0;
  std::uint64_t frames = 0;
  std::uint32_t used = 0;
  std::uint32_t with_free = 0;
  std::uint64_t indexed = 0;
  std::uint32_t evictable = 0;
  std::uint32_t replicas = 0;
  for (ExtentId id = 0; id < extents_.unit_count(); ++id) {
    const Extent& extent = extents_[id];
    if (extent.shape_plus_1 == 0 || &of(extent.shape()) != &shape) continue;
    ++extents;
    frames += extent.frames;
    used += extent.used;
    with_free += extent.has_free() ? 1 : 0;
    for (std::uint32_t i = 0; i < extent.touched; ++i) {
      const FrameIndex row = first_row(id) + i;
      indexed += block_at(row).indexed ? 1 : 0;
      if (is_evictable(row)) ++(is_replica(row) ? replicas : evictable);
    }
  }
  std::uint32_t listed = 0;
  for (ExtentId id = shape.with_free.front(); id != ~ExtentId{0};
       id = shape.with_free.next(extents_, id)) {
    if (!extents_[id].has_free() || ++listed > with_free) {
      return fail(Errc::kInternal, "extent {} is listed and has no free frame", id);
    }
  }
  if (extents != shape.extents || frames != shape.frames || used != shape.used ||
      listed != with_free || indexed != shape.index.size()) {
    return fail(Errc::kInternal,
                "a shape has {} extents, {} frames, {} used, {} extents with free ones, {} indexed",
                extents, frames, used, with_free, indexed);
  }
  PEGA_TRY(shape.policy->check(
      [this](FrameIndex row) { return is_evictable(row) && !is_replica(row); }));
  PEGA_TRY(shape.replicas->check(
      [this](FrameIndex row) { return is_evictable(row) && is_replica(row); }));
  if (shape.policy->size() != evictable || shape.replicas->size() != replicas) {
    return fail(Errc::kInternal, "{} blocks and {} replicas are listed as evictable, {} and {} are",
                shape.policy->size(), shape.replicas->size(), evictable, replicas);
  }
  return {};
}

}  // namespace pegaflow::engine
