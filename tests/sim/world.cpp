#include "tests/sim/world.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::sim {

namespace {

/// Keys that collide on purpose: chains share their beginnings, and many keys share the bytes that
/// the store's hash reads.
std::vector<std::vector<BlockKey>> make_chains(std::mt19937_64& random) {
  std::vector<std::vector<BlockKey>> chains;
  for (std::uint64_t chain = 0; chain < 10; ++chain) {
    std::vector<BlockKey> keys(4 + random() % 24);
    for (std::uint64_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t branch = i < 3 ? chain % 2 : chain;
      const std::array<std::uint64_t, 4> words = {branch % 3, 0, i, branch};
      std::memcpy(keys[i].bytes.data(), words.data(), sizeof words);
    }
    chains.push_back(std::move(keys));
  }
  return chains;
}

}  // namespace

World::World(std::uint64_t seed, engine::EvictionKind eviction, Coverage& coverage)
    : random_(seed), coverage_(coverage) {
  options_.pool_bytes = (1 + pick(chance(0.3) ? 12 : 300)) * kCell;
  options_.eviction = eviction;
  options_.numa_nodes = static_cast<std::uint32_t>(1 + pick(2));
  options_.slice_blocks = static_cast<std::uint32_t>(1 + pick(chance(0.5) ? 8 : 64));
  options_.instance_share = std::array{0.2, 0.5, 1.0}[pick(3)];
  options_.server_share = std::array{0.4, 0.8, 1.0}[pick(3)];
  options_.reservation_timeout = std::chrono::seconds(30);
  options_.claim_grace = std::chrono::milliseconds(pick(2) * 1000);
  if (chance(0.3)) {
    options_.max_claims = static_cast<std::uint32_t>(1 + pick(6));
    options_.max_pins = static_cast<std::uint32_t>(1 + pick(4));
    options_.max_reservations = static_cast<std::uint32_t>(1 + pick(4));
  }
  options_.fetch_share = std::array{0.0, 0.25, 0.5, 1.0}[pick(4)];
  options_.save_reserve = std::array{0.0, 0.05, 0.3}[pick(3)];
  options_.lend_share = std::array{0.1, 0.25, 1.0}[pick(3)];
  options_.longest_lease = std::chrono::seconds(10);
  options_.lease_margin = std::chrono::milliseconds(pick(2) * 1000);
  if (chance(0.3)) options_.max_leases = static_cast<std::uint32_t>(1 + pick(3));
  options_.journal_entries = chance(0.3) ? 8 : 1U << 12;
  options_.journal_first = chance(0.5) ? 0 : ~std::uint64_t{0} / 2;
  auto store = engine::BlockStore::create(options_, clock_);
  if (!store) throw Mismatch{"the store cannot be made: " + to_string(store.error())};
  store_ = std::move(*store);
  if (!store_->keep_journal()) throw Mismatch{"no memory for the journal"};
  journal_read_ = store_->journal(engine::SpaceId{}, engine::BlockStore::kJournalEnd, 1).next;
  oracle_ = std::make_unique<OracleStore>(options_, clock_);
  memory_ = std::make_unique<PageMemory>(static_cast<std::uint32_t>(options_.pool_bytes / kCell));
  chains_ = make_chains(random_);
  make_shapes();
  // Each world has its own habits, so that rare combinations of events are found too.
  weights_ = {20,  20,  2,   10, 8, 14, 5,   20, 3,  10, 3, 6, 1.5,
              0.5, 1.5, 0.5, 6,  3, 14, 0.3, 3,  12, 24, 6, 6, 4};
  for (double& weight : weights_) weight *= std::array{0.3, 1.0, 1.0, 3.0}[pick(4)];
  note(
      "{} world of {} cells on {} NUMA nodes, slices of {}, shares {} and {}, {} claims, {} pins, "
      "{} "
      "jobs",
      to_string(eviction), options_.pool_bytes / kCell, options_.numa_nodes, options_.slice_blocks,
      options_.instance_share, options_.server_share, options_.max_claims, options_.max_pins,
      options_.max_reservations);
  for (int i = 0; i < 3; ++i) connect();
}

void World::make_shapes() {
  shards_ = static_cast<std::uint32_t>(2 + pick(2));
  const auto space_of = [&](std::uint32_t shards) {
    engine::Shape shape;
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      const std::uint64_t cells = chance(0.6) ? 1 : 1 + pick(chance(0.2) ? 40 : 5);
      shape.shards.push_back({.page_bytes = cells * kCell - pick(2) * 100,
                              .numa_node = static_cast<std::uint32_t>(pick(options_.numa_nodes))});
    }
    const auto added = store_->add_shape(shape);
    if (!added) return;  // It does not fit this pool.
    while (store_->work()) {
    }
    oracle_->add_shape(*added, shape);
    shapes_[*added] = shape;
    spaces_.push_back({store_->make_space(*added), *added, shards});
    shape_of_space_[spaces_.back().id] = *added;
    oracle_->add_space(spaces_.back().id, *added);
  };
  const std::size_t before = spaces_.size();
  space_of(shards_);
  if (spaces_.size() == before) shards_ = 1;
  space_of(1);
  space_of(1);
  while (spaces_.empty() || spaces_.back().shards != 1) space_of(1);
}

std::uint32_t World::shards_of(std::uint32_t instance) const {
  return instance == kShared ? shards_ : 1;
}

engine::ShapeId World::shape_of(engine::SpaceId space) const { return shape_of_space_.at(space); }

Place World::place_of(engine::FrameIndex frame, std::uint32_t shard, engine::ShapeId shape) const {
  const std::uint64_t offset = store_->page_offset(frame, shard);
  const engine::Shape::Shard& page = shapes_.at(shape).shards[shard];
  const auto ranges = engine::numa_ranges(options_.pool_bytes, options_.numa_nodes);
  const engine::NumaRange& range = ranges[page.numa_node < ranges.size() ? page.numa_node : 0];
  if (offset % kCell != 0 || offset < range.begin || offset + page.page_bytes > range.end) {
    throw Mismatch{fmt::format("a page of NUMA node {} lies at {}", page.numa_node, offset)};
  }
  return {static_cast<std::uint32_t>(offset / kCell),
          static_cast<std::uint32_t>((page.page_bytes + kCell - 1) / kCell)};
}

void World::step() {
  using Event = void (World::*)();
  static constexpr std::array<Event, kEventKinds> kEvents = {&World::reserve,
                                                             &World::publish,
                                                             &World::abandon,
                                                             &World::copy_some,
                                                             &World::lookup,
                                                             &World::claim,
                                                             &World::unclaim,
                                                             &World::open,
                                                             &World::open_again,
                                                             &World::release,
                                                             &World::invalidate,
                                                             &World::connect,
                                                             &World::lose_connection,
                                                             &World::end_process,
                                                             &World::quiesce,
                                                             &World::reset_space,
                                                             &World::pass_time,
                                                             &World::expire,
                                                             &World::work,
                                                             &World::start_cleanup,
                                                             &World::call_wrongly,
                                                             &World::fetch,
                                                             &World::bring,
                                                             &World::look_for_arrivals,
                                                             &World::lend,
                                                             &World::end_lease};
  ++steps_;
  // Until one applies: a step without effect would only look like work.
  std::discrete_distribution<std::size_t> which(weights_.begin(), weights_.end());
  const std::uint64_t noted = notes_;
  while (notes_ == noted) (this->*kEvents[which(random_)])();
  compare();
}

// ---- random choices

std::size_t World::pick(std::size_t count) {
  return count == 0 ? 0 : static_cast<std::size_t>(random_() % count);
}

bool World::chance(double probability) {
  return static_cast<double>(random_() >> 11) * 0x1.0p-53 < probability;
}

std::optional<std::size_t> World::pick_talking() {
  for (int attempt = 0; attempt < 8 && !connections_.empty(); ++attempt) {
    const std::size_t which = pick(connections_.size());
    if (!connections_[which].lost && !processes_[connections_[which].process].killed) return which;
  }
  return std::nullopt;
}

bool World::may_speak(engine::HolderId holder) const {
  return std::any_of(connections_.begin(), connections_.end(), [&](const Connection& each) {
    return each.holder == holder && !processes_[each.process].killed;
  });
}

bool World::touches_memory(engine::HolderId holder) const {
  const auto copies = [&](const auto& each) { return each.holder == holder && !each.copies_ended; };
  return std::any_of(saves_.begin(), saves_.end(), copies) ||
         std::any_of(loads_.begin(), loads_.end(), copies);
}

std::vector<BlockKey> World::pick_keys() {
  if (chance(0.01)) return {};
  const std::vector<BlockKey>& chain = chains_[pick(chains_.size())];
  const std::size_t begin = chance(0.7) ? 0 : pick(chain.size());
  const std::size_t count = 1 + pick(chain.size() - begin);
  const auto first = chain.begin() + static_cast<std::ptrdiff_t>(begin);
  std::vector<BlockKey> keys(first, first + static_cast<std::ptrdiff_t>(count));
  if (chance(0.02)) keys.push_back(keys.front());  // No engine does this; it must do no harm.
  return keys;
}

engine::SpaceId World::pick_space(std::uint32_t instance) {
  std::vector<engine::SpaceId> possible;
  for (const OneSpace& space : spaces_) {
    if (space.shards == shards_of(instance)) possible.push_back(space.id);
  }
  return possible[pick(possible.size())];
}

}  // namespace pegaflow::sim
