#include "engine/rights/holder_table.h"

#include "engine/tables/block_row.h"
#include "engine/tables/flat_index.h"

namespace pegaflow::engine {

namespace {

/// Identifies the writers of blocks in the 4 bytes that a block has for it. Incarnations are
/// random, so two given processes share a tag once in 2^32; it only feeds a counter.
std::uint32_t writer_tag(const Id128& process) noexcept {
  const std::uint32_t tag = mix_hash(process.high, process.low);
  return tag <= kRestored ? kRestored + 1 : tag;
}

}  // namespace

HolderId HolderTable::add(std::uint32_t instance, const Id128& process) {
  const HolderId id{next_++};
  Holder& holder = holders_[id];
  holder.id = id;
  holder.instance = instance;
  holder.writer_tag = writer_tag(process);
  ++instances_[instance].holders;
  return id;
}

void HolderTable::set_shard(Holder& holder, std::uint32_t shard, std::uint32_t shards) {
  holder.shard = shard;
  holder.shards = shards;
  if (shards > 1) holder.writer_tag = writer_tag(Id128{~std::uint64_t{0}, holder.instance});
}

void HolderTable::remove(HolderId id) {
  const auto found = holders_.find(id);
  const std::uint32_t instance = found->second.instance;
  --instances_.at(instance).holders;
  holders_.erase(found);
  forget_if_unused(instance);
}

Holder* HolderTable::find(HolderId id) {
  const auto found = holders_.find(id);
  return found != holders_.end() ? &found->second : nullptr;
}

Holder* HolderTable::known(HolderId id) {
  Holder* const holder = find(id);
  return holder != nullptr && !holder->is_gone ? holder : nullptr;
}

Holder* HolderTable::active(HolderId id) {
  Holder* const holder = known(id);
  return holder != nullptr && !holder->is_lost ? holder : nullptr;
}

std::uint64_t HolderTable::room(const Holder& holder) const {
  const std::uint64_t held = instances_.at(holder.instance).held_bytes;
  return held < instance_limit_ ? instance_limit_ - held : 0;
}

void HolderTable::add_held(std::uint32_t instance, std::uint64_t bytes) {
  instances_.at(instance).held_bytes += bytes;
}

void HolderTable::drop_held(std::uint32_t instance, std::uint64_t bytes) {
  instances_.at(instance).held_bytes -= bytes;
  forget_if_unused(instance);
}

void HolderTable::forget_if_unused(std::uint32_t instance) {
  const auto found = instances_.find(instance);
  if (found->second.holders == 0 && found->second.held_bytes == 0) instances_.erase(found);
}

}  // namespace pegaflow::engine
