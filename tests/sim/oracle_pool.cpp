// The model's pool: units, extents, and which of them another shape gets.

#include <algorithm>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

std::uint64_t OracleStore::bytes_of(Run run) const {
  const std::uint64_t begin = run.first * unit_bytes_;
  return std::min(begin + run.count * unit_bytes_, options_.pool_bytes / 4096 * 4096) - begin;
}

OracleStore::Run OracleStore::range(std::uint32_t node) const {
  // Whole units for each NUMA node; the last one gets the rest.
  const auto each = static_cast<std::uint32_t>(options_.pool_bytes / 4096 * 4096 /
                                               options_.numa_nodes / unit_bytes_);
  if (options_.numa_nodes == 1 || each == 0) return {0, units_};
  if (node + 1 == options_.numa_nodes) return {node * each, units_ - node * each};
  return {node * each, each};
}

void OracleStore::add_shape(engine::ShapeId id, const engine::Shape& description) {
  if (shapes_.contains(id)) return;
  OneShape shape;
  const bool is_dealt = options_.numa_nodes > 1 && range(0).count < units_;
  for (engine::Shape::Shard shard : description.shards) {
    if (!is_dealt) shard.numa_node = 0;
    auto part = std::find_if(shape.parts.begin(), shape.parts.end(),
                             [&](const auto& known) { return known.first == shard.numa_node; });
    if (part == shape.parts.end()) part = shape.parts.insert(part, {shard.numa_node, 0});
    part->second += (shard.page_bytes + 4095) / 4096 * 4096;
    shape.frame_bytes += (shard.page_bytes + 4095) / 4096 * 4096;
  }
  const auto fullest = *std::max_element(
      shape.parts.begin(), shape.parts.end(),
      [](const auto& left, const auto& right) { return left.second < right.second; });
  // The fewest units with at most 6 % waste, else all of the NUMA node.
  const Run node = range(fullest.first);
  std::uint32_t count = 1;
  while (count < node.count) {
    const std::uint64_t bytes = bytes_of(Run{node.first, count});
    if (bytes >= fullest.second && bytes % fullest.second * 100 <= bytes * 6) break;
    ++count;
  }
  const std::uint64_t frames = bytes_of(Run{node.first, count}) / fullest.second;
  for (const auto& [name, bytes] : shape.parts) {
    const auto wanted =
        static_cast<std::uint32_t>((frames * bytes + unit_bytes_ - 1) / unit_bytes_);
    shape.units.push_back(name == fullest.first ? count : std::min(wanted, range(name).count));
  }
  shape.order = make_order(shape.frame_bytes);
  shape.replicas = make_replica_order(shape.frame_bytes);
  shapes_.emplace(id, std::move(shape));
}

std::unique_ptr<OracleStore::Order> OracleStore::make_order(std::uint64_t frame_bytes) {
  // As many as the pool can ever have.
  const auto frames =
      static_cast<std::uint32_t>(std::max<std::uint64_t>(units_ * unit_bytes_ / frame_bytes, 1));
  switch (options_.eviction) {
    case engine::EvictionKind::kLru:
      return std::make_unique<testing::LruModel>();
    case engine::EvictionKind::kSlru:
      return std::make_unique<testing::SlruModel>();
    case engine::EvictionKind::kS3Fifo:
      return std::make_unique<testing::S3FifoModel>(std::make_unique<testing::SomeGhosts>(frames));
    case engine::EvictionKind::kWeightedLru:
    case engine::EvictionKind::kAdaptive:
      return std::make_unique<testing::PolicyModel>(options_.eviction, *rows_, frames);
  }
  throw Mismatch{"an eviction policy without a model"};
}

std::unique_ptr<OracleStore::Order> OracleStore::make_replica_order(std::uint64_t frame_bytes) {
  if (options_.eviction != engine::EvictionKind::kWeightedLru &&
      options_.eviction != engine::EvictionKind::kAdaptive)
    return std::make_unique<testing::LruModel>();
  // Its age of a block counts the uses of all blocks, these included.
  return std::make_unique<testing::PolicyModel>(
      engine::EvictionKind::kLru, *rows_,
      static_cast<std::uint32_t>(std::max<std::uint64_t>(units_ * unit_bytes_ / frame_bytes, 1)));
}

OracleStore::Extent* OracleStore::extent_at(std::uint32_t unit) {
  for (Extent& extent : extents_) {
    for (const Run& run : extent.runs) {
      if (unit >= run.first && unit < run.first + run.count) return &extent;
    }
  }
  return nullptr;
}

const OracleStore::Extent* OracleStore::extent_at(std::uint32_t unit) const {
  return const_cast<OracleStore*>(this)->extent_at(unit);
}

OracleStore::Extent* OracleStore::extent_of(engine::FrameIndex frame) {
  return extent_at(frame / rows_a_unit_);
}

const OracleStore::Extent* OracleStore::extent_of(engine::FrameIndex frame) const {
  return extent_at(frame / rows_a_unit_);
}

OracleStore::Extent* OracleStore::extent_with(std::uint64_t serial) {
  for (Extent& extent : extents_) {
    if (extent.serial == serial) return &extent;
  }
  return nullptr;
}

engine::FrameIndex OracleStore::first_frame(const Extent& extent) const {
  return extent.runs.front().first * rows_a_unit_;
}

std::size_t OracleStore::busy(const Extent& extent) const {
  std::size_t count = 0;
  for (engine::FrameIndex frame = first_frame(extent); frame < first_frame(extent) + extent.frames;
       ++frame) {
    count += frames_[frame].is_written() || frames_[frame].holds != 0 ? 1 : 0;
  }
  return count;
}

bool OracleStore::is_readable(engine::FrameIndex frame) const {
  return frame != engine::kNoFrame && frames_[frame].state == State::kSealed &&
         !extent_of(frame)->leaving;
}

std::uint64_t OracleStore::bytes_of(engine::FrameIndex frame) const {
  return shapes_.at(extent_of(frame)->shape).frame_bytes;
}

bool OracleStore::has_free(engine::ShapeId shape) const {
  for (const Extent& extent : extents_) {
    if (extent.shape != shape || extent.leaving) continue;
    const engine::FrameIndex begin = first_frame(extent);
    if (std::any_of(frames_.begin() + begin, frames_.begin() + begin + extent.frames,
                    [](const Frame& frame) { return frame.state == State::kFree; })) {
      return true;
    }
  }
  return false;
}

engine::FrameIndex OracleStore::next_touched(engine::FrameIndex from) const {
  for (engine::FrameIndex frame = from; frame < frames_.size(); ++frame) {
    const Extent* const extent = extent_of(frame);
    if (extent != nullptr && frame >= first_frame(*extent) &&
        frame < first_frame(*extent) + extent->touched) {
      return frame;
    }
  }
  return engine::kNoFrame;
}

std::optional<OracleStore::Run> OracleStore::free_run(std::uint32_t node, std::uint32_t count,
                                                      std::uint64_t part_bytes) const {
  const Run all = range(node);
  const auto is_free = [&](Run run) {
    for (std::uint32_t unit = run.first; unit < run.first + run.count; ++unit) {
      if (extent_at(unit) != nullptr) return false;
    }
    return bytes_of(run) >= part_bytes;
  };
  // Single units from the beginning, longer runs from the end; if none is long enough, the longest.
  std::optional<Run> found;
  for (std::uint32_t length = count; length != 0 && !found; --length) {
    for (std::uint32_t first = all.first; first + length <= all.first + all.count; ++first) {
      if (!is_free({first, length})) continue;
      found = Run{first, length};
      if (count == 1 || length != count) break;
    }
  }
  return found;
}

bool OracleStore::grow(engine::ShapeId id) {
  const OneShape& shape = shapes_.at(id);
  Extent extent{.serial = next_serial_++, .shape = id, .made = uses_};
  extent.frames = ~std::uint32_t{0};
  for (std::size_t i = 0; i < shape.parts.size(); ++i) {
    const auto run = free_run(shape.parts[i].first, shape.units[i], shape.parts[i].second);
    if (!run) return false;
    extent.runs.push_back(*run);
    extent.frames = std::min<std::uint32_t>(
        extent.frames, static_cast<std::uint32_t>(bytes_of(*run) / shape.parts[i].second));
  }
  extents_.push_back(std::move(extent));
  return true;
}

std::optional<OracleStore::Window> OracleStore::oldest_window(engine::ShapeId id,
                                                              std::size_t part) {
  const OneShape& shape = shapes_.at(id);
  const Run all = range(shape.parts[part].first);
  std::optional<Window> best;
  for (std::uint32_t first = all.first; first + shape.units[part] <= all.first + all.count;
       ++first) {
    if (bytes_of(Run{first, shape.units[part]}) < shape.parts[part].second) continue;
    std::vector<Extent*> extents;
    for (std::uint32_t unit = first; unit < first + shape.units[part]; ++unit) {
      Extent* const extent = extent_at(unit);
      if (extent != nullptr && (extents.empty() || extents.back() != extent)) {
        extents.push_back(extent);
      }
    }
    if (std::any_of(extents.begin(), extents.end(), [&](const Extent* extent) {
          return extent->shape == id || extent->leaving || busy(*extent) != 0;
        })) {
      continue;
    }
    std::uint64_t sum = 0;
    std::uint64_t frames = 0;
    for (const Extent* const extent : extents) {
      frames += extent->frames;
      for (engine::FrameIndex k = 0; k < extent->frames; ++k) {
        const Frame& frame = frames_[first_frame(*extent) + k];
        sum += frame.state == State::kSealed ? frame.last_use : extent->made;
      }
    }
    const std::uint64_t mean = frames == 0 ? 0 : sum / frames;
    if (best && mean >= best->mean_use) continue;
    best = Window{.mean_use = mean, .extents = std::move(extents)};
  }
  return best;
}

void OracleStore::start_exchange(engine::ShapeId id, engine::FrameIndex victim) {
  OneShape& shape = shapes_.at(id);
  if (shape.leaving_for_it != 0) return;
  const bool has_own = victim != engine::kNoFrame;
  if (has_own ? shape.in_vain_use == uses_ : shape.in_vain_quiet == quiet_) return;
  std::vector<Extent*> leaving;
  std::uint64_t newest_mean = 0;
  bool possible = true;
  for (std::size_t i = 0; i < shape.parts.size() && possible; ++i) {
    const std::optional<Window> best = oldest_window(id, i);
    possible = best.has_value();
    if (!possible) break;
    newest_mean = std::max(newest_mean, best->mean_use);
    for (Extent* const extent : best->extents) {
      if (std::find(leaving.begin(), leaving.end(), extent) == leaving.end()) {
        leaving.push_back(extent);
      }
    }
  }
  if (!possible || leaving.empty() || (has_own && newest_mean >= frames_[victim].last_use)) {
    shape.in_vain_use = uses_;
    if (!has_own) shape.in_vain_quiet = quiet_;
    return;
  }
  for (Extent* const extent : leaving) {
    extent->leaving = true;
    ++shape.leaving_for_it;
    ++counted_.extents_taken;
    queue_.push_back({.kind = Kind::kLeaving, .extent = extent->serial, .for_shape = id});
  }
}

}  // namespace pegaflow::sim
