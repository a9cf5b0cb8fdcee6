#include "index/holders.h"

#include <algorithm>

#include "base/assert.h"

namespace pegaflow::index {

// Twice as many bits as holders: each may have one that waits for the sweep.
Holders::Holders(std::uint32_t max_holders)
    : rows_(max_holders), holder_of_(std::size_t{max_holders} * 2, kNone), live_bits_(1) {}

Result<HolderId> Holders::add(bool is_node) {
  const auto free = std::find_if(rows_.begin(), rows_.end(),
                                 [](const HolderRow& row) { return row.kind == Kind::kFree; });
  if (free == rows_.end() || !has_free_bit()) {
    return fail(Errc::kOutOfCapacity,
                "add a holder to the index: {} of {} numbers are in use or wait for the sweep; "
                "raise the number of holders",
                rows_.size(), rows_.size());
  }
  const auto holder = static_cast<HolderId>(free - rows_.begin());
  *free = {.kind = is_node ? Kind::kNode : Kind::kEngine};
  widen(holder);
  free->bit = take_bit(holder);
  ++count_;
  return holder;
}

std::uint32_t Holders::renew_bit(HolderId holder) {
  const std::uint32_t dead = rows_[holder].bit;
  clear_bit(live_bits_, dead);
  rows_[holder].bit = take_bit(holder);
  rows_[holder].blocks = 0;
  ++epoch_;
  return dead;
}

std::uint32_t Holders::remove(HolderId holder) {
  HolderRow& row = rows_[holder];
  for (HolderRow& engine : rows_) {
    if (engine.node == holder) engine.node = kNone;
  }
  detach(holder);
  clear_bit(live_bits_, row.bit);
  row.kind = Kind::kRemoved;
  row.engines.clear();
  row.blocks = 0;
  --count_;
  ++epoch_;
  return row.bit;
}

void Holders::free_bit(std::uint32_t bit) {
  const HolderId holder = std::exchange(holder_of_[bit], kNone);
  PEGA_ASSERT(holder != kNone && !has_bit(live_bits_, bit), "bit {} is not dead", bit);
  --bits_in_use_;
  HolderRow& row = rows_[holder];
  // Earlier bits of the holder, which it lost when it was cleared, do not free its number.
  if (row.kind == Kind::kRemoved && row.bit == bit) row = {};
}

void Holders::attach(HolderId engine, HolderId node) {
  detach(engine);
  rows_[engine].node = node;
  std::vector<std::uint64_t>& engines = rows_[node].engines;
  if (engines.size() <= engine / 64) engines.resize(engine / 64 + 1);
  set_bit(engines, engine);
  ++epoch_;
}

void Holders::detach(HolderId engine) {
  const HolderId node = std::exchange(rows_[engine].node, kNone);
  if (node == kNone) return;
  clear_bit(rows_[node].engines, engine);
  ++epoch_;
}

std::uint32_t Holders::take_bit(HolderId holder) {
  const auto free = std::find(holder_of_.begin(), holder_of_.end(), kNone);
  PEGA_ASSERT(free != holder_of_.end(), "all {} bits are in use", holder_of_.size());
  const auto bit = static_cast<std::uint32_t>(free - holder_of_.begin());
  *free = holder;
  ++bits_in_use_;
  widen(bit);
  set_bit(live_bits_, bit);
  return bit;
}

void Holders::widen(std::uint32_t most) {
  if (live_bits_.size() <= most / 64) live_bits_.resize(std::bit_ceil(most / 64 + std::size_t{1}));
}

}  // namespace pegaflow::index
