#include "index/holder_sets.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kFirstSlots = 1024;

/// The hash of a set is the sum of its bits' numbers, so one more bit is one more addition.
std::uint64_t hash_of_bit(std::uint32_t bit) {
  std::uint64_t mixed = (std::uint64_t{bit} + 1) * 0x9E3779B97F4A7C15U;
  mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9U;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBU;
  return mixed ^ (mixed >> 31U);
}

}  // namespace

HolderSets::HolderSets(const Holders& holders, std::size_t max_bytes)
    : holders_(holders), max_bytes_(max_bytes), rows_(1), slots_(kFirstSlots) {
  widen();
}

SetId HolderSets::with(SetId set, std::uint32_t bit) {
  std::uint64_t hash = draft(set);
  if (!has_bit(draft_, bit)) {
    set_bit(draft_, bit);
    hash += hash_of_bit(bit);
  }
  return intern(hash);
}

SetId HolderSets::without(SetId set, std::uint32_t bit) {
  std::uint64_t hash = draft(set);
  if (has_bit(draft_, bit)) {
    clear_bit(draft_, bit);
    hash -= hash_of_bit(bit);
  }
  return intern(hash);
}

SetId HolderSets::living(SetId set) { return has_dead(set) ? intern(draft(set)) : set; }

bool HolderSets::has_dead(SetId set) const {
  const ConstRow live = holders_.live_bits();
  const ConstRow row = bits(set);
  std::uint64_t dead = 0;
  for (std::size_t i = 0; i < words_; ++i) dead |= row[i] & ~live[i];
  return dead != 0;
}

bool HolderSets::has_live(SetId set) const {
  const ConstRow live = holders_.live_bits();
  const ConstRow row = bits(set);
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < words_; ++i) found |= row[i] & live[i];
  return found != 0;
}

std::uint64_t HolderSets::draft(SetId set) {
  const ConstRow live = holders_.live_bits();
  const ConstRow row = bits(set);
  std::uint64_t hash = rows_[set].hash;
  for (std::size_t i = 0; i < words_; ++i) {
    each_bit(row[i] & ~live[i], static_cast<std::uint32_t>(i * 64),
             [&hash](std::uint32_t bit) { hash -= hash_of_bit(bit); });
    draft_[i] = row[i] & live[i];
  }
  return hash;
}

SetId HolderSets::intern(std::uint64_t hash) {
  for (std::size_t slot = slot_of(hash); slots_[slot] != 0;
       slot = (slot + 1) & (slots_.size() - 1)) {
    const SetId set = slots_[slot];
    if (rows_[set].hash == hash && std::ranges::equal(bits(set), draft_)) return set;
  }
  if (std::ranges::all_of(draft_, [](std::uint64_t word) { return word == 0; })) return kEmpty;
  return make_set(hash);
}

SetId HolderSets::make_set(std::uint64_t hash) {
  if ((count_ + 1) * 2 > slots_.size()) enlarge_slots();
  SetId set = static_cast<SetId>(rows_.size());
  if (!free_.empty()) {
    set = free_.back();
    free_.pop_back();
  } else {
    if (set >= kRefused || bytes_of(set + std::size_t{1}) > max_bytes_) return kRefused;
    rows_.emplace_back();
    bits_.resize(rows_.size() * words_);
    local_.resize(rows_.size() * words_);
  }
  std::uint32_t size = 0;
  for (std::size_t i = 0; i < words_; ++i) {
    bits_[set * words_ + i] = draft_[i];
    size += static_cast<std::uint32_t>(std::popcount(draft_[i]));
  }
  rows_[set] = {.hash = hash, .size = size};
  std::size_t slot = slot_of(hash);
  while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
  slots_[slot] = set;
  ++count_;
  return set;
}

void HolderSets::free_set(SetId set) {
  const std::size_t mask = slots_.size() - 1;
  std::size_t hole = slot_of(rows_[set].hash);
  while (slots_[hole] != set) hole = (hole + 1) & mask;
  // Sets that were pushed past the hole move back, so that a search may end at an empty slot.
  for (std::size_t slot = (hole + 1) & mask; slots_[slot] != 0; slot = (slot + 1) & mask) {
    const std::size_t wanted = slot_of(rows_[slots_[slot]].hash);
    if (((slot - wanted) & mask) < ((slot - hole) & mask)) continue;
    slots_[hole] = slots_[slot];
    hole = slot;
  }
  slots_[hole] = 0;
  free_.push_back(set);
  --count_;
}

void HolderSets::refresh_local(SetId set) const {
  const Row local(&local_[set * words_], words_);
  std::ranges::fill(local, 0);
  const ConstRow live = holders_.live_bits();
  const ConstRow row = bits(set);
  for (std::size_t i = 0; i < words_; ++i) {
    each_bit(row[i] & live[i], static_cast<std::uint32_t>(i * 64), [&](std::uint32_t bit) {
      const HolderId holder = holders_.holder_of(bit);
      if (!holders_.is_node(holder)) return set_bit(local, holder);
      const ConstRow engines = holders_.engines_of(holder);
      for (std::size_t word = 0; word < engines.size(); ++word) local[word] |= engines[word];
    });
  }
  rows_[set].epoch = holders_.epoch();
}

void HolderSets::widen() {
  const std::size_t wider = holders_.row_words();
  if (wider <= words_ && !bits_.empty()) return;
  std::vector<std::uint64_t> bits(rows_.size() * wider);
  for (std::size_t i = 0; i < bits_.size(); ++i) bits[i / words_ * wider + i % words_] = bits_[i];
  bits_ = std::move(bits);
  words_ = wider;
  local_.assign(rows_.size() * words_, 0);
  for (SetRow& row : rows_) row.epoch = 0;
  draft_.resize(words_);
}

void HolderSets::enlarge_slots() {
  std::vector<SetId> former(slots_.size() * 2);
  former.swap(slots_);
  for (const SetId set : former) {
    if (set == 0) continue;
    std::size_t slot = slot_of(rows_[set].hash);
    while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = set;
  }
}

std::size_t HolderSets::bytes_of(std::size_t sets) const {
  return sets * (sizeof(SetRow) + 2 * words_ * sizeof(std::uint64_t)) +
         slots_.size() * sizeof(SetId);
}

std::size_t HolderSets::bytes() const {
  return rows_.capacity() * sizeof(SetRow) +
         (bits_.capacity() + local_.capacity()) * sizeof(std::uint64_t) +
         (slots_.capacity() + free_.capacity()) * sizeof(SetId);
}

}  // namespace pegaflow::index
