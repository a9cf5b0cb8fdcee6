#include "engine/frames/extent_map.h"

#include <algorithm>

#include "base/assert.h"
#include "base/units.h"

namespace pegaflow::engine {

namespace {

/// An extent leaves at most 6 % of its bytes unused.
constexpr std::uint64_t kWasteNumerator = 6;
constexpr std::uint64_t kWasteDenominator = 100;

}  // namespace

ExtentMap::ExtentMap(std::uint64_t pool_bytes, std::uint32_t numa_nodes)
    : pool_bytes_(pool_bytes / kSlotAlignment * kSlotAlignment),
      unit_bytes_(unit_bytes_for(pool_bytes)) {
  const std::uint64_t units = (pool_bytes_ + unit_bytes_ - 1) / unit_bytes_;
  for (const NumaRange& range : numa_ranges(pool_bytes_, numa_nodes)) {
    const auto begin = static_cast<std::uint32_t>(range.begin / unit_bytes_);
    const auto end = static_cast<std::uint32_t>((range.end + unit_bytes_ - 1) / unit_bytes_);
    ranges_.push_back({.begin = begin, .end = end, .free = FreeRuns(end - begin)});
  }
  owner_plus_1_.resize(units);
  extents_.resize(units);
  free_units_ = static_cast<std::uint32_t>(units);
}

std::uint64_t ExtentMap::bytes_of(UnitRun run) const noexcept {
  const std::uint64_t begin = run.first * unit_bytes_;
  return std::min(begin + run.count * unit_bytes_, pool_bytes_) - begin;
}

Result<std::vector<std::uint32_t>> ExtentMap::units_for(const FrameLayout& layout) const {
  const auto fullest = std::max_element(
      layout.parts().begin(), layout.parts().end(),
      [](const auto& left, const auto& right) { return left.bytes < right.bytes; });
  std::vector<std::uint32_t> units;
  std::uint64_t frames = 0;
  const auto size_by_fullest = [&] {
    const Range& range = range_of(fullest->numa_node);
    std::uint32_t best = 0;
    for (std::uint32_t count = 1; count <= range.end - range.begin; ++count) {
      const std::uint64_t bytes = bytes_of({range.begin, count});
      if (bytes < fullest->bytes) continue;
      frames = bytes / fullest->bytes;
      best = count;
      const std::uint64_t waste = bytes % fullest->bytes;
      if (waste * kWasteDenominator <= bytes * kWasteNumerator) return count;
    }
    // The pool has fewer units than that: take all of them, which hold the most frames.
    return best;
  };
  const std::uint32_t of_fullest = size_by_fullest();
  for (const FrameLayout::Part& part : layout.parts()) {
    const Range& range = range_of(part.numa_node);
    const std::uint64_t room = bytes_of({range.begin, range.end - range.begin});
    if (of_fullest == 0 || part.bytes > room) {
      return fail(Errc::kRefused, "a block's pages of {} do not fit {} of the pool",
                  format_bytes(part.bytes), format_bytes(room));
    }
    const std::uint64_t wanted = (frames * part.bytes + unit_bytes_ - 1) / unit_bytes_;
    units.push_back(&part == &*fullest ? of_fullest
                                       : static_cast<std::uint32_t>(std::min<std::uint64_t>(
                                             wanted, range.end - range.begin)));
  }
  return units;
}

std::uint64_t ExtentMap::visited() const noexcept {
  std::uint64_t sum = looked_;
  for (const Range& range : ranges_) sum += range.free.visited();
  return sum;
}

std::uint64_t ExtentMap::memory_bytes() const noexcept {
  std::uint64_t bytes = extents_.size() * (sizeof(Extent) + sizeof(std::uint32_t));
  for (const Range& range : ranges_) bytes += range.free.memory_bytes();
  return bytes;
}

ExtentMap::Range& ExtentMap::range_with(std::uint32_t unit) noexcept {
  return *std::find_if(ranges_.begin(), ranges_.end(),
                       [unit](const Range& range) { return unit < range.end; });
}

std::optional<UnitRun> ExtentMap::any_free_run(const Range& range, std::uint32_t count,
                                               std::uint64_t part_bytes) const {
  const std::uint32_t longest = range.free.longest();
  if (longest == 0) return std::nullopt;
  // Extents of one unit grow from the beginning, longer ones from the end, so that small ones leave
  // long runs whole. If no run is long enough, take the first of the longest.
  const std::uint32_t length = std::min(count, longest);
  const auto begin =
      length == count && count > 1 ? range.free.highest(count) : range.free.lowest(length);
  const UnitRun run{range.begin + *begin, length};
  if (bytes_of(run) < part_bytes) return std::nullopt;
  return run;
}

std::optional<UnitRun> ExtentMap::free_run(Range& range, std::uint32_t count,
                                           std::uint64_t part_bytes) const {
  if (const auto run = any_free_run(range, count, part_bytes)) return run;
  // The pool's last unit may be shorter: another run of as many units holds more.
  const std::uint32_t last = range.end - 1;
  const std::uint32_t place = last - range.begin;
  if (bytes_of({last, 1}) == unit_bytes_ || !range.free.is_free(place)) return std::nullopt;
  range.free.take(place, 1);
  const auto run = any_free_run(range, count, part_bytes);
  range.free.give(place, 1);
  return run;
}

std::optional<ExtentId> ExtentMap::make(ShapeId shape, const FrameLayout& layout,
                                        const std::vector<std::uint32_t>& units,
                                        std::uint64_t now) {
  if (free_units_ == 0) return std::nullopt;
  std::array<UnitRun, kMaxNumaNodes> runs{};
  std::uint64_t frames = ~std::uint64_t{0};
  for (std::size_t i = 0; i < units.size(); ++i) {
    const FrameLayout::Part& part = layout.parts()[i];
    const auto run = free_run(range_of(part.numa_node), units[i], part.bytes);
    if (!run) return std::nullopt;
    runs[i] = *run;
    frames = std::min(frames, bytes_of(*run) / part.bytes);
  }
  const ExtentId id = runs[0].first;
  Extent& extent = extents_[id];
  PEGA_ASSERT(extent.shape_plus_1 == 0, "extent {} exists already", id);
  extent = {};
  extent.shape_plus_1 = static_cast<std::uint32_t>(shape) + 1;
  extent.frames = static_cast<std::uint32_t>(frames);
  extent.serial = next_serial_++;
  extent.made = now;
  extent.use_sum = now * frames;
  extent.runs = runs;
  extent.run_count = static_cast<std::uint32_t>(units.size());
  take_units(id);
  return id;
}

void ExtentMap::take_units(ExtentId id) {
  const Extent& extent = extents_[id];
  for (std::uint32_t i = 0; i < extent.run_count; ++i) {
    const UnitRun run = extent.runs[i];
    for (std::uint32_t unit = 0; unit < run.count; ++unit) owner_plus_1_[run.first + unit] = id + 1;
    Range& range = range_with(run.first);
    range.free.take(run.first - range.begin, run.count);
    free_units_ -= run.count;
  }
}

bool ExtentMap::is_free_run(UnitRun run, std::uint32_t numa_node) const {
  const Range& range = range_of(numa_node);
  if (run.count == 0 || run.first < range.begin || run.first >= range.end ||
      run.count > range.end - run.first) {
    return false;
  }
  const auto first = owner_plus_1_.begin() + run.first;
  return std::all_of(first, first + run.count, [](std::uint32_t owner) { return owner == 0; });
}

Result<void> ExtentMap::restore(ExtentId id, const KeptExtent& kept, ShapeId shape,
                                const FrameLayout& layout) {
  const std::vector<FrameLayout::Part>& parts = layout.parts();
  if (!kept.is_whole() || kept.run_count != parts.size() || kept.runs[0].first != id) {
    return fail(Errc::kCorrupt, "extent {} of the kept pool is damaged", id);
  }
  std::uint64_t frames = ~std::uint64_t{0};
  for (std::uint32_t i = 0; i < kept.run_count; ++i) {
    if (!is_free_run(kept.runs[i], parts[i].numa_node)) {
      return fail(Errc::kCorrupt, "extent {} of the kept pool lies on units of another one", id);
    }
    frames = std::min(frames, bytes_of(kept.runs[i]) / parts[i].bytes);
  }
  if (frames != kept.frames || kept.touched > kept.frames) {
    return fail(Errc::kCorrupt, "extent {} of the kept pool has {} of {} frames, {} fit it", id,
                kept.touched, kept.frames, frames);
  }
  Extent& extent = extents_[id];
  extent = {};
  extent.shape_plus_1 = static_cast<std::uint32_t>(shape) + 1;
  extent.frames = kept.frames;
  extent.touched = kept.touched;
  extent.serial = kept.serial;
  extent.runs = kept.runs;
  extent.run_count = kept.run_count;
  next_serial_ = std::max(next_serial_, kept.serial + 1);
  take_units(id);
  return {};
}

void ExtentMap::release(ExtentId id) {
  Extent& extent = extents_[id];
  PEGA_ASSERT(extent.shape_plus_1 != 0 && extent.used == 0, "extent {} is in use", id);
  for (std::uint32_t i = 0; i < extent.run_count; ++i) {
    for (std::uint32_t unit = 0; unit < extent.runs[i].count; ++unit) {
      owner_plus_1_[extent.runs[i].first + unit] = 0;
    }
    Range& range = range_with(extent.runs[i].first);
    range.free.give(extent.runs[i].first - range.begin, extent.runs[i].count);
    free_units_ += extent.runs[i].count;
  }
  extent = {};
}

std::optional<ExtentMap::Choice> ExtentMap::oldest_window(ShapeId shape, const Range& range,
                                                          std::uint32_t count,
                                                          std::uint64_t part_bytes,
                                                          std::optional<std::uint32_t> part) const {
  if (range.end - range.begin < count) return std::nullopt;
  std::optional<Choice> best;
  std::optional<UnitRun> where;
  const auto look = [&](std::uint32_t begin) {
    std::uint64_t uses = 0;
    std::uint64_t frames = 0;
    std::uint32_t last = ~std::uint32_t{0};
    for (std::uint32_t unit = begin; unit < begin + count; ++unit) {
      const std::uint32_t id = owner_plus_1_[unit] - 1;
      if (owner_plus_1_[unit] == 0 || id == last) continue;
      last = id;
      ++looked_;
      const Extent& extent = extents_[id];
      if (extent.shape() == shape || extent.is_leaving || extent.busy != 0) return;
      uses += extent.use_sum;
      frames += extent.frames;
    }
    const std::uint64_t mean = frames == 0 ? 0 : uses / frames;
    if (where && mean >= best->mean_use) return;
    best = Choice{.mean_use = mean};
    where = UnitRun{begin, count};
  };
  const std::uint32_t places = range.end - range.begin - count + 1;
  const bool is_large = part && places > kLook;
  const std::uint64_t first = is_large ? std::uint64_t{*part} * kLook : 0;
  for (std::uint32_t i = 0; i < (is_large ? kLook : places); ++i) {
    const std::uint32_t begin = range.begin + static_cast<std::uint32_t>((first + i) % places);
    if (bytes_of({begin, count}) >= part_bytes) look(begin);
  }
  if (!where) return std::nullopt;
  for (std::uint32_t unit = where->first; unit < where->first + count; ++unit) {
    const auto id = owner(unit);
    if (id && (best->extents.empty() || best->extents.back() != *id)) best->extents.push_back(*id);
  }
  return best;
}

std::optional<ExtentMap::Choice> ExtentMap::oldest_of_others(
    ShapeId shape, const FrameLayout& layout, const std::vector<std::uint32_t>& units,
    std::optional<std::uint32_t> part) const {
  Choice all;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const FrameLayout::Part& wanted = layout.parts()[i];
    auto choice = oldest_window(shape, range_of(wanted.numa_node), units[i], wanted.bytes, part);
    if (!choice) return std::nullopt;
    for (const ExtentId id : choice->extents) {
      if (std::find(all.extents.begin(), all.extents.end(), id) == all.extents.end()) {
        all.extents.push_back(id);
      }
    }
    all.mean_use = std::max(all.mean_use, choice->mean_use);
  }
  return all;
}

}  // namespace pegaflow::engine
