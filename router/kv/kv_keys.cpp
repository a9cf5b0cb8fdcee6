#include "router/kv/kv_keys.h"

#include <algorithm>
#include <bit>

namespace pegaflow::router {

namespace {

index::Key index_key(const BlockKey& key) { return index::key_of(0, low_bits(key)); }

constexpr std::size_t kLeastSlots = 256;

std::uint32_t tag_of(index::Key key) { return static_cast<std::uint32_t>(key >> 32U); }

}  // namespace

std::uint64_t low_bits(const BlockKey& key) {
  const auto is_padding = [&](std::size_t from, std::size_t to) {
    return std::all_of(key.bytes.begin() + static_cast<std::ptrdiff_t>(from),
                       key.bytes.begin() + static_cast<std::ptrdiff_t>(to),
                       [](std::byte each) { return each == std::byte{0}; });
  };
  const std::size_t length = !is_padding(16, 32) ? 32 : !is_padding(8, 16) ? 16 : 8;
  std::uint64_t low = 0;
  for (std::size_t i = length - 8; i < length; ++i) {
    low = low << 8 | static_cast<std::uint64_t>(key.bytes.at(i));
  }
  return low;
}

Result<KvKeys> KvKeys::create(std::size_t bytes) {
  if (bytes < kLeastBytes) {
    return fail(Errc::kInvalidArgument, "--prefetch-key-bytes is {}, not 0 or {} and more", bytes,
                kLeastBytes);
  }
  // The size of the table, a power of two, with which most keys fit. Tags have 32 bits.
  std::size_t slot_count = 0;
  std::size_t capacity = 0;
  for (std::size_t slots = std::size_t{1} << 31U; slots >= kLeastSlots; slots /= 2) {
    if (slots * sizeof(Slot) >= bytes) continue;
    const std::size_t room = (bytes - slots * sizeof(Slot)) / sizeof(BlockKey);
    if (std::min(room, slots / 3 * 2) <= capacity) continue;
    capacity = std::min(room, slots / 3 * 2);
    slot_count = slots;
  }
  PEGA_TRY_LET(auto keys, index::ZeroArray<BlockKey>::create(capacity, index::Pages::kSmall));
  PEGA_TRY_LET(auto slots, index::ZeroArray<Slot>::create(slot_count, index::Pages::kSmall));
  return KvKeys(std::move(keys), capacity, std::move(slots), slot_count);
}

std::size_t KvKeys::slot_of(index::Key key) const {
  const std::uint32_t tag = tag_of(key);
  std::size_t at = tag & mask_;
  while (slots_[at].place != 0) {
    if (slots_[at].tag == tag && index_key(keys_[slots_[at].place - 1]) == key) break;
    at = (at + 1) & mask_;
  }
  return at;
}

/// Moves the keys behind it that would no longer be found.
void KvKeys::erase(std::size_t slot) {
  std::size_t hole = slot;
  for (std::size_t at = (slot + 1) & mask_; slots_[at].place != 0; at = (at + 1) & mask_) {
    const std::size_t home = slots_[at].tag & mask_;
    if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole] = {};
}

void KvKeys::add(const BlockKey& key) {
  const index::Key own = index_key(key);
  const std::size_t found = slot_of(own);
  if (slots_[found].place != 0) {
    keys_[slots_[found].place - 1] = key;
    return;
  }
  if (size_ == capacity_) {
    erase(slot_of(index_key(keys_[next_])));
    ++forgotten_;
  } else {
    ++size_;
  }
  keys_[next_] = key;
  // After erase(), which may have moved what was found.
  slots_[slot_of(own)] = {.tag = tag_of(own), .place = static_cast<std::uint32_t>(next_ + 1)};
  next_ = (next_ + 1) % capacity_;
}

std::optional<BlockKey> KvKeys::find(index::Key key) const {
  const Slot& slot = slots_[slot_of(key)];
  if (slot.place == 0) return std::nullopt;
  return keys_[slot.place - 1];
}

}  // namespace pegaflow::router
