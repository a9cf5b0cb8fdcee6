#pragma once
/// \file
/// A policy's memory of blocks that it evicted.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/tables/prefetch.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// The names of the blocks evicted last, each with a small number: how often the block had been
/// used.
///
/// Buckets of 16 entries of 4 bytes, one cache line each; a new entry replaces the one evicted
/// longest ago in its bucket, so that about as many blocks are remembered as there are entries. A
/// name is recognized by 16 bits in its bucket: one in 4,000 unknown names is mistaken for a
/// remembered one. Thread-bound.
class EvictedBlocks {
 public:
  static constexpr std::uint32_t kMaxUses = 15;

  /// Room for at least `entries`, in whole buckets.
  /// Errors: kOutOfCapacity.
  static Result<EvictedBlocks> create(std::uint64_t entries);

  /// `uses` is 1 to kMaxUses.
  void add(std::uint32_t hash, std::uint32_t uses) noexcept;

  struct Found {
    std::uint32_t uses = 0;
    std::uint64_t evictions_since = 0;  ///< Accurate to 1/256 of the entries.
  };
  /// Returns the entry and forgets it: the block is back.
  std::optional<Found> take(std::uint32_t hash) noexcept;

  /// Prefetches what add() and take() of this name will touch.
  void prefetch(std::uint32_t hash) const noexcept { prefetch_to_write(&bucket(hash)); }

  /// Allocates one page of 4 KiB now; returns false beyond the last.
  bool touch(std::size_t page) noexcept { return buckets_.touch(page, 1); }
  /// Returns the memory of `count` pages from `page` on, once it is no longer used; returns false
  /// beyond the last.
  bool forget(std::size_t page, std::size_t count) noexcept {
    return buckets_.forget_pages(page, count);
  }

  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return buckets_.size_bytes(); }

 private:
  /// 16 bits of tag, 4 of uses (0: an empty entry), 12 of time. One plain number, and all
  /// arithmetic on it is signed, because compilers can vectorize that.
  using Entry = std::uint32_t;
  static constexpr std::int32_t kTimes = 1 << 12;
  static constexpr std::int32_t kWays = 16;
  struct alignas(64) Bucket {
    Entry entries[kWays];
  };
  static_assert(sizeof(Bucket) == 64);
  [[nodiscard]] static Entry make_entry(std::int32_t tag, std::uint32_t uses,
                                        std::int32_t when) noexcept {
    return static_cast<Entry>(tag) | (uses & 0xFU) << 16U | static_cast<Entry>(when) << 20U;
  }
  [[nodiscard]] static std::int32_t tag_of(Entry entry) noexcept {
    return static_cast<std::int32_t>(entry & 0xFFFFU);
  }
  [[nodiscard]] static std::int32_t uses_of(Entry entry) noexcept {
    return static_cast<std::int32_t>(entry >> 16U & 0xFU);
  }

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
  [[nodiscard]] static std::int32_t tag(std::uint32_t hash) noexcept {
    return static_cast<std::int32_t>((hash * 0x85EBCA6BU) >> 16U);
  }
  /// The time in steps of 2^shift_ evictions, modulo kTimes: 16 times the life of an entry.
  [[nodiscard]] std::int32_t now() const noexcept {
    return static_cast<std::int32_t>(added_ >> shift_) & (kTimes - 1);
  }
  [[nodiscard]] static std::int32_t age(Entry entry, std::int32_t now) noexcept {
    return (now - static_cast<std::int32_t>(entry >> 20U)) & (kTimes - 1);
  }

  ZeroPages<Bucket> buckets_;
  unsigned shift_;
  std::uint64_t added_ = 0;
};

}  // namespace pegaflow::engine
