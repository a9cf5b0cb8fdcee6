// What the server before this one left, and what this one leaves.
#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/kept/kept_tables.h"
#include "server/cache/cache_service_impl.h"
#include "server/pool/kept_names.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"cache"};

using engine::KeptTables;

}  // namespace

bool CacheService::serves(const Instance& instance) const {
  return instance.is_complete() && !is_closed_ && !is_held_back(instance.space_name);
}

bool CacheService::is_held_back(engine::NamespaceId space) const {
  return !held_back_.empty() && held_back_.contains(space);
}

CacheService::FormerReport CacheService::former() const {
  FormerReport report = former_;
  report.clients = former_clients_.size();
  report.waits_for_nodes = !held_back_.empty();
  return report;
}

Result<void> CacheService::continue_from(const Former& former) {
  PEGA_ASSERT(kept_ != nullptr, "a former server without kept tables");
  former_clients_ = {former.clients.begin(), former.clients.end()};
  if (former.adopt) {
    const auto record = kept_->read(KeptTables::Record::kNames);
    KeptNames names;  // A server that never had a namespace leaves no record.
    if (record) {
      PEGA_TRY_LET(names, read_names(*record));
    }
    PEGA_TRY(adopt(names));
    if (former.waits_for_nodes) {
      for (const engine::NamespaceTable::Namespace* const space : namespaces_->all()) {
        if (space->has_shapes()) held_back_.insert(space->id);
      }
    }
  } else {
    is_closed_ = !former_clients_.empty();
  }
  record_names();
  end_former_if_quiesced();
  return {};
}

Result<void> CacheService::adopt(const KeptNames& names) {
  std::vector<engine::BlockStore::FormerSpace> spaces;
  for (const KeptNames::Namespace& space : names.namespaces) {
    if (!space.rules.kinds.empty() && !space.kinds.empty() &&
        space.kinds.size() != space.rules.kinds.size()) {
      return fail(Errc::kCorrupt, "a namespace of the kept pool has {} kinds and rules for {}",
                  space.kinds.size(), space.rules.kinds.size());
    }
    for (const KeptNames::Kind& kind : space.kinds) spaces.push_back({kind.space, kind.shape});
  }
  PEGA_TRY_LET(const auto adopted, store_->adopt(names.shapes, spaces));
  former_holder_ = adopted.former;
  former_.adopted_blocks = adopted.blocks;
  former_.adopted_bytes = adopted.bytes;
  former_.discarded_frames = adopted.discarded;
  PEGA_TRY(restore_namespaces(names));
  for (const auto& shape : names.shapes) store_->leave_shape(engine::ShapeId{shape.number});
  kLog.info(
      "continues with the blocks of the former server blocks={} bytes={} held={} discarded={} "
      "clients={}",
      adopted.blocks, format_bytes(adopted.bytes), adopted.held, adopted.discarded,
      former_clients_.size());
  return {};
}

Result<void> CacheService::restore_namespaces(const KeptNames& names) {
  std::vector<engine::NamespaceTable::Former> restored;
  for (const KeptNames::Namespace& space : names.namespaces) {
    engine::NamespaceTable::Former& former = restored.emplace_back();
    former.factors = space.factors;
    former.rules = space.rules;
    former.generation = space.generation;
    for (const KeptNames::Kind& kind : space.kinds) {
      const auto shape = std::find_if(names.shapes.begin(), names.shapes.end(),
                                      [&](const auto& each) { return each.number == kind.shape; });
      // The store has refused a generation of an unknown shape before.
      PEGA_ASSERT(shape != names.shapes.end(), "shape {} is not recorded", kind.shape);
      former.kinds.emplace_back(shape->shape, kind.space);
    }
  }
  PEGA_TRY(namespaces_->restore(std::move(restored)));
  // In the same order, each under its names among nodes, with the epoch of its blocks.
  const auto all = namespaces_->all();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const engine::NamespaceTable::Namespace& space = *all[i];
    Bytes32 first{};
    for (std::size_t kind = 0; kind < space.kinds.size(); ++kind) {
      const Bytes32 name = name_of(space, kind);
      if (kind == 0) {
        first = name;
      } else {
        epochs_.alias(name, first);
      }
      epochs_.learn(name, names.namespaces[i].epoch);
      Named named{.id = space.id, .kind = kind, .page_bytes = {}, .epoch = epochs_.of(name)};
      for (const auto& shard : space.kinds[kind].shape.shards) {
        named.page_bytes.push_back(shard.page_bytes);
      }
      spaces_.insert_or_assign(name, std::move(named));
    }
  }
  return {};
}

void CacheService::former_client_gone(const Id128& process) {
  if (former_clients_.erase(process) == 0) return;
  on_client_end_(process);
  end_former_if_quiesced();
}

void CacheService::end_former_if_quiesced() {
  if (!former_clients_.empty()) return;
  if (former_holder_) store_->holder_gone(*std::exchange(former_holder_, std::nullopt));
  if (std::exchange(is_closed_, false)) {
    kLog.info("no client of the former server can access the pool any longer");
  }
}

void CacheService::confirm_epochs() {
  if (std::exchange(held_back_, {}).empty()) return;
  kLog.info("all nodes have sent their epochs: the blocks of the former server are served");
}

void CacheService::drop_unconfirmed() {
  const auto dropped = std::exchange(held_back_, {});
  if (dropped.empty()) return;
  kLog.warn(
      "a node that may have reset these blocks is not connected: dropping the blocks of the former "
      "server namespaces={}",
      dropped.size());
  for (const engine::NamespaceId space : dropped) namespaces_->reset(space);
  if (on_reset_) on_reset_();
}

void CacheService::record_names() {
  if (kept_ == nullptr) return;
  KeptNames names;
  for (const auto& shape : store_->shapes()) names.shapes.push_back({shape.number, shape.shape});
  for (const engine::NamespaceTable::Namespace* const space : namespaces_->all()) {
    KeptNames::Namespace& kept = names.namespaces.emplace_back();
    kept.factors = space->factors;
    kept.rules = space->rules;
    kept.generation = space->generation;
    for (const auto& kind : space->kinds) {
      kept.kinds.push_back({static_cast<std::uint32_t>(kind.shape_id), kind.space});
    }
    if (space->has_shapes()) kept.epoch = epochs_.of(name_of(*space, 0));
  }
  if (const auto written = kept_->write(KeptTables::Record::kNames, write_names(names)); !written) {
    // The former record stays: it must not name generations that have ended.
    const auto emptied = kept_->write(KeptTables::Record::kNames, write_names({}));
    PEGA_ASSERT(emptied.has_value(), "an empty record of names is too large");
    kLog.error("the next server will not find these blocks error=\"{}\"",
               to_string(written.error()));
  }
}

}  // namespace pegaflow::server
