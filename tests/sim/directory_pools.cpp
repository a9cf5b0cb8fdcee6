#include "tests/sim/directory_pools.h"

#include <algorithm>
#include <iterator>

namespace pegaflow::directory {

void Pools::use(std::size_t node, std::span<const std::uint64_t> units) {
  for (std::size_t i = units.size(); i-- > 0;) {
    touch(node, units[i], static_cast<std::uint8_t>(std::min<std::size_t>(i, 2)));
  }
}

void Pools::touch(std::size_t number, std::uint64_t unit, std::uint8_t place) {
  Node& node = nodes_[number];
  if (const auto found = node.places.find(unit); found != node.places.end()) {
    unlink(node, found->second);
    link_first(node, found->second);
    return;
  }
  std::uint32_t slot = 0;
  if (node.places.size() >= units_each_) {
    slot = node.last;
    const Slot victim = node.slots[slot];
    unlink(node, slot);
    node.places.erase(victim.unit);
    forget_holder(number, victim.unit);
    changed_(number, victim.unit, victim.place, false);
  } else {
    slot = static_cast<std::uint32_t>(node.slots.size());
    node.slots.emplace_back();
  }
  node.slots[slot].unit = unit;
  node.slots[slot].place = place;
  link_first(node, slot);
  node.places.emplace(unit, slot);
  auto& holders = holders_[unit];
  const auto holder = static_cast<std::uint16_t>(number);
  holders.insert(std::lower_bound(holders.begin(), holders.end(), holder), holder);
  ++inserted_;
  changed_(number, unit, place, true);
}

void Pools::unlink(Node& node, std::uint32_t slot) {
  const Slot& one = node.slots[slot];
  (one.before == kNone ? node.first : node.slots[one.before].after) = one.after;
  (one.after == kNone ? node.last : node.slots[one.after].before) = one.before;
}

void Pools::link_first(Node& node, std::uint32_t slot) {
  node.slots[slot].before = kNone;
  node.slots[slot].after = node.first;
  (node.first == kNone ? node.last : node.slots[node.first].before) = slot;
  node.first = slot;
}

void Pools::forget_holder(std::size_t node, std::uint64_t unit) {
  const auto found = holders_.find(unit);
  auto& holders = found->second;
  holders.erase(std::lower_bound(holders.begin(), holders.end(), static_cast<std::uint16_t>(node)));
  if (holders.empty()) holders_.erase(found);
}

void Pools::clear(std::size_t node) {
  for (const auto& [unit, slot] : nodes_[node].places) forget_holder(node, unit);
  nodes_[node] = Node();
}

std::size_t Pools::prefix(std::size_t node, std::span<const std::uint64_t> units) const {
  std::size_t count = 0;
  while (count < units.size() && has(node, units[count])) ++count;
  return count;
}

std::size_t Pools::longest_elsewhere(std::size_t node, std::span<const std::uint64_t> units) const {
  std::vector<std::uint16_t> left;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto found = holders_.find(units[i]);
    if (found == holders_.end()) return i;
    std::vector<std::uint16_t> now;
    if (i == 0) {
      std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(now),
                   [node](std::uint16_t other) { return other != node; });
    } else {
      std::set_intersection(left.begin(), left.end(), found->second.begin(), found->second.end(),
                            std::back_inserter(now));
    }
    if (now.empty()) return i;
    left = std::move(now);
  }
  return units.size();
}

}  // namespace pegaflow::directory
