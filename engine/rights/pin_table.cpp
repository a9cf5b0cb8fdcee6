#include "engine/rights/pin_table.h"

#include <utility>

namespace pegaflow::engine {

namespace {

std::uint32_t hash(HolderId holder, PinId name) noexcept {
  return mix_hash(static_cast<std::uint64_t>(holder), static_cast<std::uint64_t>(name));
}

}  // namespace

Result<PinTable> PinTable::create(std::uint32_t max_pins) {
  PEGA_TRY_LET(auto by_name, FlatIndex::create(max_pins));
  return PinTable(max_pins, std::move(by_name));
}

PinTable::PinTable(std::uint32_t max_pins, FlatIndex by_name)
    : max_pins_(max_pins), by_name_(std::move(by_name)) {}

std::uint32_t PinTable::find(HolderId holder, PinId name) const {
  return by_name_.find(hash(holder, name), [&](std::uint32_t row) {
    return rows_[row].name == name && rows_[row].holder->id == holder;
  });
}

std::uint32_t PinTable::add(Pin pin) {
  const std::uint32_t row = rows_.add();
  by_name_.insert(hash(pin.holder->id, pin.name), row);
  Pin& added = rows_[row];
  added = std::move(pin);
  by_age_.push_back(rows_, row);
  added.holder->pins.push_back(rows_, row);
  added.holder->pinned_blocks += added.blocks.size();
  return row;
}

void PinTable::extend(std::uint32_t row, std::span<const FrameIndex> more) {
  rows_[row].blocks = FrameList(rows_[row].blocks, more);
  rows_[row].holder->pinned_blocks += more.size();
}

Pin PinTable::remove(std::uint32_t row) {
  Pin pin = std::move(rows_[row]);
  Holder& holder = *pin.holder;
  by_name_.erase(hash(holder.id, pin.name), row);
  by_age_.erase(rows_, row);
  holder.pins.erase(rows_, row);
  holder.pinned_blocks -= pin.blocks.size();
  if (holder.is_lost) blocks_of_lost_ -= pin.blocks.size();
  rows_.remove(row);
  return pin;
}

}  // namespace pegaflow::engine
