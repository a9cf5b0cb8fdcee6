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
  PEGA_ASSERT(next_id_ != std::numeric_limits<std::uint32_t>::max(), "namespace ids ran out");
  auto row = std::make_unique<Row>();
  row->space.id = NamespaceId{next_id_++};
  row->space.hash = namespace_hash(factors);
  row->space.factors = std::move(factors);
  row->space.users = 1;
  rows_.push_back(std::move(row));
  return &rows_.back()->space;
}

Result<void> NamespaceTable::fits(NamespaceId id, std::uint32_t shard, std::uint32_t shards,
                                  std::uint64_t page_bytes) const {
  const Row* const found = row(id);
  PEGA_ASSERT(found != nullptr, "namespace {} is not known", static_cast<std::uint32_t>(id));
  const std::vector<Shape::Shard>& known = found->space.shape.shards;
  if (known.empty()) return {};
  if (known.size() != shards) {
    return fail(Errc::kRefused, "{} shards a block in namespace {}, whose blocks have {}", shards,
                found->space.hash, known.size());
  }
  if (known[shard].page_bytes != page_bytes) {
    return fail(Errc::kRefused, "pages of {} bytes in namespace {}, whose pages have {}",
                page_bytes, found->space.hash, known[shard].page_bytes);
  }
  return {};
}

Result<void> NamespaceTable::fix_shape(NamespaceId id, const Shape& shape) {
  const auto shards = static_cast<std::uint32_t>(shape.shards.size());
  for (std::uint32_t shard = 0; shard < shards; ++shard) {
    PEGA_TRY(fits(id, shard, shards, shape.shards[shard].page_bytes));
  }
  Namespace& space = row(id)->space;
  if (!space.shape.shards.empty()) return {};
  PEGA_TRY_LET(space.shape_id, store_.add_shape(shape));
  space.shape = shape;
  space.space = store_.make_space(space.shape_id);
  return {};
}

void NamespaceTable::leave(NamespaceId id) {
  Row* const found = row(id);
  PEGA_ASSERT(found != nullptr && found->space.users != 0, "namespace {} has no user",
              static_cast<std::uint32_t>(id));
  if (--found->space.users != 0) return;
  found->left = next_left_++;
  forget_shape(found->space);
}

void NamespaceTable::forget_shapes() {
  emptied_seen_ = store_.emptied_shapes();
  for (const auto& row : rows_) forget_shape(row->space);
}

bool NamespaceTable::has_emptied_shape() const { return store_.emptied_shapes() != emptied_seen_; }

void NamespaceTable::forget_shape(Namespace& space) {
  if (space.users != 0 || space.shape.shards.empty()) return;
  if (!store_.has_blocks(space.shape_id)) drop_shape(space);
}

void NamespaceTable::drop_shape(Namespace& space) {
  store_.leave_shape(space.shape_id);
  store_.retire_space(space.space);
  space.shape = {};
  space.shape_id = {};
  space.space = {};
}

bool NamespaceTable::make_room() {
  auto oldest = rows_.end();
  for (auto each = rows_.begin(); each != rows_.end(); ++each) {
    if ((*each)->space.users != 0) continue;
    if (oldest == rows_.end() || (*each)->left < (*oldest)->left) oldest = each;
  }
  if (oldest == rows_.end()) return false;
  if (!(*oldest)->space.shape.shards.empty()) drop_shape((*oldest)->space);
  rows_.erase(oldest);
  return true;
}

void NamespaceTable::reset(NamespaceId id) {
  Row* const found = row(id);
  if (found == nullptr) return;
  if (!found->space.shape.shards.empty()) {
    const SpaceId former = found->space.space;
    store_.retire_space(former);
    found->space.space = store_.make_space(found->space.shape_id, former);
  }
  ++found->space.generation;
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
