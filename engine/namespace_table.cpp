#include "engine/namespace_table.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/assert.h"

namespace pegaflow::engine {

struct NamespaceTable::Row {
  Namespace space;
  std::uint64_t left = 0;  ///< Rising with each last leave(): the lowest is removed first.
};

NamespaceTable::NamespaceTable(BlockStore& store, std::size_t max_namespaces)
    : store_(store), max_namespaces_(max_namespaces) {}
NamespaceTable::~NamespaceTable() = default;

Result<const NamespaceTable::Namespace*> NamespaceTable::enter(
    std::vector<NamespaceFactor> factors) {
  PEGA_TRY_LET(factors, canonical_factors(std::move(factors)));
  for (const auto& row : rows_) {
    Namespace& known = row->space;
    if (known.factors != factors) continue;
    ++known.users;
    return &known;
  }
  if (rows_.size() >= max_namespaces_ && !make_room()) {
    return fail(Errc::kBusy, "{} namespaces are in use", rows_.size());
  }
  Row& row = add(std::move(factors));
  row.space.users = 1;
  return &row.space;
}

NamespaceTable::Row& NamespaceTable::add(std::vector<NamespaceFactor> canonical) {
  PEGA_ASSERT(next_id_ != std::numeric_limits<std::uint32_t>::max(), "namespace ids ran out");
  auto row = std::make_unique<Row>();
  row->space.id = NamespaceId{next_id_++};
  row->space.hash = namespace_hash(canonical);
  row->space.factors = std::move(canonical);
  rows_.push_back(std::move(row));
  return *rows_.back();
}

Result<void> NamespaceTable::restore(std::vector<Former> namespaces) {
  if (namespaces.size() > max_namespaces_) {
    return fail(Errc::kCorrupt, "{} namespaces are recorded, at most {} are kept",
                namespaces.size(), max_namespaces_);
  }
  for (Former& former : namespaces) {
    PEGA_TRY_LET(auto factors, canonical_factors(std::move(former.factors)));
    for (const auto& row : rows_) {
      if (row->space.factors == factors) {
        return fail(Errc::kCorrupt, "namespace {} is recorded twice", row->space.hash);
      }
    }
    Row& row = add(std::move(factors));
    row.left = next_left_++;
    row.space.generation = former.generation;
    row.space.rules = std::move(former.rules);
    for (auto& [shape, space] : former.kinds) {
      PEGA_TRY_LET(const ShapeId id, store_.add_shape(shape));
      row.space.kinds.push_back({.shape = std::move(shape), .shape_id = id, .space = space});
    }
  }
  return {};
}

Result<void> NamespaceTable::fits(NamespaceId id, std::uint32_t shard, std::uint32_t shards,
                                  const BlockKinds& rules,
                                  std::span<const std::uint64_t> page_bytes,
                                  std::uint32_t cells) const {
  const Row* const found = row(id);
  PEGA_ASSERT(found != nullptr, "namespace {} is not known", static_cast<std::uint32_t>(id));
  const Namespace& space = found->space;
  if (!space.has_shapes()) return {};
  if (space.kinds.size() != page_bytes.size() || space.rules != rules) {
    return fail(Errc::kRefused, "kinds of blocks ({}) in namespace {}, which has ({})",
                to_string(rules), space.hash, to_string(space.rules));
  }
  for (std::size_t kind = 0; kind < page_bytes.size(); ++kind) {
    const std::vector<Shape::Shard>& known = space.kinds[kind].shape.shards;
    if (known.size() != shards) {
      return fail(Errc::kRefused, "{} shards a block in namespace {}, whose blocks have {}", shards,
                  space.hash, known.size());
    }
    for (std::uint32_t each = shard; each < shard + cells; ++each) {
      if (known[each].page_bytes * cells != page_bytes[kind]) {
        return fail(Errc::kRefused, "pages of {} bytes in namespace {}, whose pages have {}",
                    page_bytes[kind], space.hash, known[each].page_bytes * cells);
      }
      if (known[each].numa_node != known[shard].numa_node) {
        return fail(Errc::kRefused,
                    "{} cells from shard {} on in namespace {}, whose blocks have them on several "
                    "NUMA nodes: its first engine registered without cells",
                    cells, shard, space.hash);
      }
    }
  }
  return {};
}

Result<void> NamespaceTable::fix_shapes(NamespaceId id, const BlockKinds& rules,
                                        std::span<const Shape> shapes) {
  PEGA_ASSERT(!shapes.empty(), "a namespace without a kind of blocks");
  const auto shards = static_cast<std::uint32_t>(shapes.front().shards.size());
  for (std::uint32_t shard = 0; shard < shards; ++shard) {
    std::vector<std::uint64_t> page_bytes;
    for (const Shape& shape : shapes) page_bytes.push_back(shape.shards[shard].page_bytes);
    PEGA_TRY(fits(id, shard, shards, rules, page_bytes));
  }
  Namespace& space = row(id)->space;
  if (space.has_shapes()) return {};
  std::vector<Kind> kinds;
  for (const Shape& shape : shapes) {
    auto added = store_.add_shape(shape);
    if (!added) {
      for (const Kind& kind : kinds) store_.leave_shape(kind.shape_id);
      return tl::unexpected<Error>(std::move(added.error()));
    }
    kinds.push_back({.shape = shape, .shape_id = *added, .space = {}});
  }
  for (Kind& kind : kinds) kind.space = store_.make_space(kind.shape_id);
  space.kinds = std::move(kinds);
  space.rules = rules;
  note_change();
  return {};
}

void NamespaceTable::leave(NamespaceId id) {
  Row* const found = row(id);
  PEGA_ASSERT(found != nullptr && found->space.users != 0, "namespace {} has no user",
              static_cast<std::uint32_t>(id));
  if (--found->space.users != 0) return;
  found->left = next_left_++;
  forget_shapes_of(found->space);
}

void NamespaceTable::forget_shapes() {
  emptied_seen_ = store_.emptied_shapes();
  for (const auto& row : rows_) forget_shapes_of(row->space);
}

bool NamespaceTable::has_emptied_shape() const { return store_.emptied_shapes() != emptied_seen_; }

void NamespaceTable::forget_shapes_of(Namespace& space) {
  if (space.users != 0 || !space.has_shapes()) return;
  const bool has_blocks =
      std::any_of(space.kinds.begin(), space.kinds.end(),
                  [this](const Kind& kind) { return store_.has_blocks(kind.shape_id); });
  if (!has_blocks) drop_shapes(space);
}

void NamespaceTable::drop_shapes(Namespace& space) {
  for (const Kind& kind : space.kinds) {
    store_.leave_shape(kind.shape_id);
    store_.retire_space(kind.space);
  }
  space.kinds.clear();
  space.rules = {};
  note_change();
}

bool NamespaceTable::make_room() {
  auto oldest = rows_.end();
  for (auto each = rows_.begin(); each != rows_.end(); ++each) {
    if ((*each)->space.users != 0) continue;
    if (oldest == rows_.end() || (*each)->left < (*oldest)->left) oldest = each;
  }
  if (oldest == rows_.end()) return false;
  if ((*oldest)->space.has_shapes()) drop_shapes((*oldest)->space);
  rows_.erase(oldest);
  note_change();
  return true;
}

void NamespaceTable::reset(NamespaceId id) {
  Row* const found = row(id);
  if (found == nullptr) return;
  for (Kind& kind : found->space.kinds) {
    const SpaceId former = kind.space;
    store_.retire_space(former);
    kind.space = store_.make_space(kind.shape_id, former);
  }
  ++found->space.generation;
  note_change();
}

NamespaceTable::Row* NamespaceTable::row(NamespaceId id) const {
  for (const auto& each : rows_) {
    if (each->space.id == id) return each.get();
  }
  return nullptr;
}

const NamespaceTable::Namespace* NamespaceTable::find(NamespaceId id) const {
  const Row* const found = row(id);
  return found != nullptr ? &found->space : nullptr;
}

std::vector<const NamespaceTable::Namespace*> NamespaceTable::all() const {
  std::vector<const Namespace*> namespaces;
  for (const auto& each : rows_) namespaces.push_back(&each->space);
  return namespaces;
}

}  // namespace pegaflow::engine
