#pragma once
/// \file
/// A hash table from keys to the places of their cells.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "index/key.h"
#include "index/memory/zero_array.h"

namespace pegaflow::index {

/// The number of a cell, from 1 on; 0 is none.
using Place = std::uint32_t;

/// Buckets of one cache line: 15 places, each with a tag from its key, and a count of the keys that
/// went past the bucket because it was full. So a search reads one line, compares a key only where
/// a tag agrees, and ends at the first bucket that nothing went past; an erased key leaves no mark.
///
/// The keys themselves are in the cells: callers pass the array. Thread-bound.
class Places {
 public:
  /// For at most `max_keys` keys and places up to `max_place`. Errors: kOutOfCapacity.
  static Result<Places> create(std::size_t max_keys, Place max_place);

  /// The place of `key`, or 0.
  [[nodiscard]] Place find(Key key, const Key* keys) const noexcept {
    std::size_t bucket = home(key);
    for (std::size_t visited = 0; visited < buckets_; ++visited) {
      const Bucket& line = lines_[bucket];
      for (unsigned matches = same_tag(line, key); matches != 0; matches &= matches - 1) {
        const Place place = line.slots[std::countr_zero(matches)] & place_mask_;
        if (place != 0 && keys[place] == key) return place;
      }
      if (line.passed == 0) return 0;
      bucket = next(bucket);
    }
    return 0;
  }

  /// Requests the cache line in which a search for `key` begins.
  ///
  /// Inlined: g++ takes a function that only prefetches for one without effect, and drops the call.
  [[gnu::always_inline]] void prefetch(Key key) const noexcept {
    __builtin_prefetch(&lines_[home(key)]);
  }

  /// Where `key` probably is, or 0, from its first bucket alone: to request its cell early.
  [[nodiscard]] Place guess(Key key) const noexcept {
    const Bucket& line = lines_[home(key)];
    const unsigned matches = same_tag(line, key);
    return matches == 0 ? 0 : line.slots[std::countr_zero(matches)] & place_mask_;
  }

  /// `key` is not in the table, which has fewer than `max_keys`.
  void insert(Key key, Place place) noexcept;
  /// `key` is in the table at `place`.
  void erase(Key key, Place place) noexcept;
  /// `key` is in the table at `from`; its cell is at `to` now.
  void move(Key key, Place from, Place to) noexcept;

  [[nodiscard]] std::size_t bytes() const noexcept { return lines_.bytes(); }

 private:
  static constexpr unsigned kSlots = 15;
  struct alignas(64) Bucket {
    std::array<std::uint32_t, kSlots> slots;
    std::uint32_t passed;
  };

  Places(ZeroArray<Bucket> lines, std::size_t buckets, Place max_place)
      : lines_(std::move(lines)),
        buckets_(buckets),
        place_mask_(static_cast<std::uint32_t>(std::bit_ceil(std::uint64_t{max_place} + 1) - 1)) {}

  /// By the upper bits of the key; the tag has the lower ones.
  [[nodiscard]] std::size_t home(Key key) const noexcept { return (key >> 32U) * buckets_ >> 32U; }
  [[nodiscard]] std::size_t next(std::size_t bucket) const noexcept {
    return bucket + 1 == buckets_ ? 0 : bucket + 1;
  }
  [[nodiscard]] std::uint32_t slot_of(Key key, Place place) const noexcept {
    return (static_cast<std::uint32_t>(key) & ~place_mask_) | place;
  }

  /// One bit for each slot that has the tag of `key`; empty slots have tag 0.
  [[nodiscard]] unsigned same_tag(const Bucket& line, Key key) const noexcept {
    return equal_slots(line, ~place_mask_, static_cast<std::uint32_t>(key) & ~place_mask_);
  }

  /// One bit for each slot that is `wanted` under `mask`.
  static unsigned equal_slots(const Bucket& line, std::uint32_t mask,
                              std::uint32_t wanted) noexcept {
    unsigned matches = 0;
#if defined(__SSE2__)
    const __m128i all_wanted = _mm_set1_epi32(static_cast<int>(wanted));
    const __m128i all_mask = _mm_set1_epi32(static_cast<int>(mask));
    const auto* const quarters = reinterpret_cast<const __m128i*>(&line);
    for (unsigned i = 0; i < 4; ++i) {
      const __m128i slots = _mm_and_si128(_mm_load_si128(quarters + i), all_mask);
      const __m128 equal = _mm_castsi128_ps(_mm_cmpeq_epi32(slots, all_wanted));
      matches |= static_cast<unsigned>(_mm_movemask_ps(equal)) << (4 * i);
    }
#else
    for (unsigned i = 0; i < kSlots; ++i) {
      matches |= static_cast<unsigned>((line.slots[i] & mask) == wanted) << i;
    }
#endif
    return matches & ((1U << kSlots) - 1);
  }

  static constexpr std::uint32_t kWhole = ~std::uint32_t{0};

  /// The slot of `key` at `place`, and in `bucket` the bucket that has it.
  std::uint32_t& slot_at(Key key, Place place, std::size_t& bucket) noexcept;

  ZeroArray<Bucket> lines_;
  std::size_t buckets_;
  std::uint32_t place_mask_;
};

}  // namespace pegaflow::index
