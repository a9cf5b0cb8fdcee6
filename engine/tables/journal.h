#pragma once
/// \file
/// Which blocks became findable and which ceased to be, in order, for subscribers.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/tables/zero_pages.h"
#include "engine/types/depth.h"
#include "engine/types/ids.h"

namespace pegaflow::engine {

/// The latest entries about blocks, each with its position: the block of a key is present, or it is
/// gone. Entries about one key are in the order of the changes; an entry that a block is present
/// may be repeated.
///
/// A ring of fixed size, 40 bytes per entry, whose memory is allocated as it is first filled. A
/// reader that falls behind by more than the ring holds detects that by its position. Thread-bound.
class Journal {
 public:
  struct Entry {
    BlockKey key;
    SpaceId space{};
    bool is_present = false;
    Depth depth = kUnknownDepth;
  };

  /// Keeps the last `entries` entries, rounded up to a power of two. The first one has the position
  /// `first`: with a random value, positions of another life of the server are out of range here.
  /// Errors: kOutOfCapacity.
  static Result<Journal> create(std::size_t entries, std::uint64_t first) {
    PEGA_TRY_LET(auto ring,
                 ZeroPages<Entry>::create(std::bit_ceil(std::max<std::size_t>(entries, 1))));
    return Journal(std::move(ring), first);
  }

  void add(SpaceId space, const BlockKey& key, bool is_present,
           Depth depth = kUnknownDepth) noexcept {
    ring_[end_++ & (ring_.size() - 1)] = {key, space, is_present, depth};
  }
  /// The position of the oldest entry that is still kept, and the position after the newest.
  [[nodiscard]] std::uint64_t begin() const noexcept {
    return end_ - std::min<std::uint64_t>(end_ - first_, ring_.size());
  }
  [[nodiscard]] std::uint64_t end() const noexcept { return end_; }
  [[nodiscard]] const Entry& operator[](std::uint64_t position) const noexcept {
    return ring_[position & (ring_.size() - 1)];
  }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return std::min<std::uint64_t>(end_ - first_, ring_.size()) * sizeof(Entry);
  }

 private:
  Journal(ZeroPages<Entry> ring, std::uint64_t first) noexcept
      : ring_(std::move(ring)), first_(first), end_(first) {}

  ZeroPages<Entry> ring_;
  std::uint64_t first_;
  std::uint64_t end_;
};

}  // namespace pegaflow::engine
