#pragma once
/// \file
/// The full keys of blocks, of which the index has the low 64 bits only.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/block_key.h"
#include "base/error.h"
#include "index/key.h"
#include "index/memory/zero_array.h"

namespace pegaflow::router {

/// The low 64 bits of the engine's hash, which is as long as the key without its padding: 8, 16 or
/// 32 bytes, the most significant first. Engines' events have these bits.
[[nodiscard]] std::uint64_t low_bits(const BlockKey& key);

/// Owns the full keys of the blocks that pools have announced, for prefetches: servers want all 32
/// bytes. A key stays when its block leaves a pool, since a disk may still have it. When it is full
/// the oldest key goes. Of two keys with equal low bits the newer one stays; a prefetch by a wrong
/// key finds nothing.
///
/// 44 to 60 bytes for each key: 32 for itself, in the order of arrival, and the rest for the table,
/// whose pages are touched by a small part of the keys. Thread-bound; allocates in create() only.
class KvKeys {
 public:
  static constexpr std::size_t kLeastBytes = std::size_t{64} << 10U;

  /// As many keys as fit into `bytes`. Errors: kInvalidArgument below kLeastBytes; kOutOfCapacity
  /// without memory.
  static Result<KvKeys> create(std::size_t bytes);

  void add(const BlockKey& key);
  /// The full key of a block in the index; nullopt: unknown.
  [[nodiscard]] std::optional<BlockKey> find(index::Key key) const;

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::uint64_t forgotten() const noexcept { return forgotten_; }
  /// Memory in use: keys that were added, and the whole table.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return size_ * sizeof(BlockKey) + slots_.bytes();
  }

 private:
  /// A key by the upper half of its index::Key, which also is its home. `place` is one more than
  /// its number in keys_; 0: empty.
  struct Slot {
    std::uint32_t tag;
    std::uint32_t place;
  };
  KvKeys(index::ZeroArray<BlockKey> keys, std::size_t capacity, index::ZeroArray<Slot> slots,
         std::size_t slot_count)
      : keys_(std::move(keys)),
        capacity_(capacity),
        slots_(std::move(slots)),
        mask_(slot_count - 1) {}

  /// The slot of the key, or the empty one where it belongs.
  [[nodiscard]] std::size_t slot_of(index::Key key) const;
  void erase(std::size_t slot);

  index::ZeroArray<BlockKey> keys_;  ///< A ring: the next key replaces the oldest one.
  std::size_t capacity_;
  index::ZeroArray<Slot> slots_;  ///< Linear probing, at most two thirds full.
  std::size_t mask_;
  std::size_t next_ = 0;
  std::size_t size_ = 0;
  std::uint64_t forgotten_ = 0;
};

}  // namespace pegaflow::router
