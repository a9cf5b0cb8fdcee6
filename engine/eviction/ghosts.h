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

class PolicyMemory;

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
  /// The same, with a log of its changes if `memory` outlives this process: a table there would lie
  /// on small pages, and cost a page walk for each name. Begins with what the log of a former
  /// process says: O(entries).
  static Result<EvictedBlocks> create(std::uint64_t entries, PolicyMemory& memory);

  /// `uses` is 1 to kMaxUses.
  void add(std::uint32_t hash, std::uint32_t uses) noexcept;

  struct Found {
    std::uint32_t uses = 0;
    std::uint64_t evictions_since = 0;  ///< Accurate to 1/256 of the entries.
  };
  /// Returns the entry and forgets it: the block is back.
  std::optional<Found> take(std::uint32_t hash) noexcept;
  /// The entry, which stays.
  [[nodiscard]] std::optional<Found> look(std::uint32_t hash) const noexcept;

  /// Prefetches what add() and take() of this name will touch.
  void prefetch(std::uint32_t hash) const noexcept { prefetch_to_write(&bucket(hash)); }

  /// Allocates one page of 4 KiB now, that of the log at last; returns false beyond the last.
  bool touch(std::size_t page) noexcept;
  /// Returns the memory of `count` pages from `page` on, that of the log at last, once it is no
  /// longer used; returns false beyond the last.
  bool forget(std::size_t page, std::size_t count) noexcept;

  /// With the log.
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return buckets_.size_bytes() + log_.size_bytes();
  }

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

  /// The log of changes, which outlives the process: a ring of them. One that takes a name has no
  /// uses.
  struct Change {
    std::uint32_t hash;
    std::uint32_t uses;
  };
  struct Counts {
    std::uint64_t changes;
    std::uint64_t added;
  };

  EvictedBlocks(ZeroPages<Bucket> buckets, unsigned shift)
      : buckets_(std::move(buckets)), shift_(shift) {}
  /// Pages of 4 KiB before those of the log.
  [[nodiscard]] std::size_t bucket_pages() const noexcept {
    return (buckets_.size_bytes() + 4095) / 4096;
  }
  void replay() noexcept;
  void put(std::uint32_t hash, std::uint32_t uses) noexcept;
  std::optional<Found> remove(std::uint32_t hash) noexcept;
  void note(Change change) noexcept;
  static constexpr std::int32_t kNowhere = -1;
  /// The place of the name in its bucket, or kNowhere.
  [[nodiscard]] static std::int32_t find(const Bucket& in, std::int32_t wanted) noexcept;
  [[nodiscard]] Found found(Entry entry) const noexcept {
    return {static_cast<std::uint32_t>(uses_of(entry)),
            static_cast<std::uint64_t>(age(entry, now())) << shift_};
  }
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
  /// Empty when nothing outlives the process.
  ZeroPages<Change> log_ = ZeroPages<Change>::shared({});
  ZeroPages<Counts> counts_ = ZeroPages<Counts>::shared({});  ///< One, with the log.
  std::size_t next_ = 0;                                      ///< In the log.
};

}  // namespace pegaflow::engine
