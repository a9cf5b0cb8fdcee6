#pragma once
/// \file
/// What a policy remembers of blocks that it evicted.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/prefetch.h"
#include "engine/zero_pages.h"

namespace pegaflow {

/// The names of blocks evicted last, with a small number each: how often the block had been used.
///
/// Buckets of 16 entries of 4 bytes, one cache line; a new entry takes the place of the one evicted
/// longest ago in its bucket, so that about as many are remembered as there are entries. A name is
/// known by 16 bits in its bucket: one in 4,000 strangers is taken for somebody. Thread-bound.
class EvictedBlocks {
 public:
  static constexpr std::uint32_t kMaxUses = 15;

  /// At least `entries`, in whole buckets.
  /// Errors: kOutOfCapacity.
  static Result<EvictedBlocks> create(std::uint64_t entries);

  /// `uses` is 1 to kMaxUses.
  void add(std::uint32_t hash, std::uint32_t uses) noexcept;

  struct Found {
    std::uint32_t uses = 0;
    std::uint64_t evictions_since = 0;  ///< To 1/256 of the entries.
  };
  /// Forgets it too: the block is back.
  std::optional<Found> take(std::uint32_t hash) noexcept;

  /// Fetches what add() and take() of this name will touch.
  void prefetch(std::uint32_t hash) const noexcept { prefetch_to_write(&bucket(hash)); }

  /// Has one page of 4 KiB come now; false beyond the last.
  bool touch(std::size_t page) noexcept { return buckets_.touch(page, 1); }

  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return buckets_.size_bytes(); }

 private:
  struct Entry {
    std::uint16_t tag;
    std::uint16_t uses : 4;  ///< 0: nobody.
    std::uint16_t when : 12;
  };
  static_assert(sizeof(Entry) == 4);
  static constexpr std::size_t kWays = 16;
  struct alignas(64) Bucket {
    Entry entries[kWays];
  };

  EvictedBlocks(ZeroPages<Bucket> buckets, unsigned shift)
      : buckets_(std::move(buckets)), shift_(shift) {}
  [[nodiscard]] std::size_t place(std::uint32_t hash) const noexcept {
    const std::uint64_t spread = static_cast<std::uint32_t>(hash * 0x9E3779B1U);
    return (spread * buckets_.size()) >> 32U;
  }
  [[nodiscard]] Bucket& bucket(std::uint32_t hash) noexcept { return buckets_[place(hash)]; }
  [[nodiscard]] const Bucket& bucket(std::uint32_t hash) const noexcept {
    return buckets_[place(hash)];
  }
  [[nodiscard]] static std::uint16_t tag(std::uint32_t hash) noexcept {
    return static_cast<std::uint16_t>((hash * 0x85EBCA6BU) >> 16U);
  }
  /// In steps of 2^shift_ evictions, modulo 2^12: 16 times as many as an entry lives.
  [[nodiscard]] std::uint32_t now() const noexcept { return (added_ >> shift_) & 0xFFFU; }
  [[nodiscard]] std::uint32_t age(const Entry& entry) const noexcept {
    return (now() - entry.when) & 0xFFFU;
  }

  ZeroPages<Bucket> buckets_;
  unsigned shift_;
  std::uint64_t added_ = 0;
};

}  // namespace pegaflow
