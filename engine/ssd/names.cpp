#include "engine/ssd/names.h"

#include <algorithm>

namespace pegaflow::engine::ssd {

void NameTable::load(const Names& names) { names_ = names; }

Names NameTable::save() const { return names_; }

NameRecord* NameTable::record(const SpaceName& name) {
  const auto found = std::find_if(names_.records.begin(), names_.records.end(),
                                  [&](const NameRecord& each) { return each.origin.name == name; });
  return found == names_.records.end() ? nullptr : &*found;
}

std::optional<std::uint16_t> NameTable::find(const SpaceName& name, const Epoch& epoch) const {
  const NameRecord* const found = const_cast<NameTable*>(this)->record(name);
  if (found == nullptr || found->origin.epoch != epoch) return std::nullopt;
  return found->number;
}

std::optional<std::uint16_t> NameTable::take_number() {
  if (is_exhausted()) return std::nullopt;
  return names_.next_number++;
}

void NameTable::make_room() {
  if (names_.records.size() < kMostNames) return;
  names_.records.erase(std::min_element(
      names_.records.begin(), names_.records.end(),
      [](const NameRecord& a, const NameRecord& b) { return a.used_at < b.used_at; }));
}

std::optional<std::uint16_t> NameTable::number(const Origin& origin, std::uint32_t now_s) {
  if (NameRecord* const known = record(origin.name); known != nullptr) {
    if (known->origin.epoch > origin.epoch || known->origin.kind != origin.kind) {
      return std::nullopt;
    }
    known->used_at = std::max(known->used_at, now_s);
    if (known->origin.epoch == origin.epoch) return known->number;
    const auto taken = take_number();
    if (!taken) return std::nullopt;
    known->origin.epoch = origin.epoch;
    known->number = *taken;
    ++names_.sequence;
    return taken;
  }
  const auto taken = take_number();
  if (!taken) return std::nullopt;
  make_room();
  names_.records.push_back({.origin = origin, .number = *taken, .used_at = now_s});
  ++names_.sequence;
  return taken;
}

const Origin* NameTable::origin(std::uint16_t number) const {
  const auto found = std::find_if(names_.records.begin(), names_.records.end(),
                                  [&](const NameRecord& each) { return each.number == number; });
  return found == names_.records.end() ? nullptr : &found->origin;
}

bool NameTable::reset(const SpaceName& name, const Epoch& epoch) {
  NameRecord* const known = record(name);
  if (known == nullptr || known->origin.epoch >= epoch) return false;
  ++names_.sequence;
  known->origin.epoch = epoch;
  if (const auto taken = take_number()) {
    known->number = *taken;
  } else {
    // The blocks are dead without a record too: no other gets their number.
    names_.records.erase(names_.records.begin() + (known - names_.records.data()));
  }
  return true;
}

void NameTable::restart() {
  names_.next_number = 1;
  for (NameRecord& each : names_.records) each.number = names_.next_number++;
  ++names_.sequence;
}

}  // namespace pegaflow::engine::ssd
