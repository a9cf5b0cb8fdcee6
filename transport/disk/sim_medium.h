#pragma once
/// \file
/// The sectors of a simulated disk: persisted content, and a cache that a power cut may lose.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>

#include "transport/disk/disk.h"

namespace pegaflow::disk {

/// Reads as zeros where nothing was written; takes memory only for written sectors. Offsets and
/// sizes are multiples of Disk::kAlignment and lie within the caller's size. Thread-bound.
class SimMedium {
 public:
  using Random = std::mt19937_64;
  static constexpr std::uint64_t kSector = Disk::kAlignment;

  void read(std::uint64_t offset, std::span<std::byte> to) const;
  /// Writes to the cache, or through it if `durable`.
  void write(std::uint64_t offset, std::span<const std::byte> from, bool durable);
  /// A number that grows with each write. flush() persists every sector whose cached content was
  /// begun by then.
  [[nodiscard]] std::uint64_t now() const noexcept { return writes_; }
  void flush(std::uint64_t begun);
  /// Each sector that was not flushed keeps its cached or falls back to its persisted content.
  /// Returns the number of sectors that fell back.
  std::uint64_t lose_some(Random& random);
  /// Loses all that was not flushed, and returns the number of sectors.
  std::uint64_t lose_all();

  /// Writes both the persisted and the cached content.
  void poke(std::uint64_t offset, std::span<const std::byte> from);
  void flip_bit(std::uint64_t offset, unsigned bit);
  void set_bad(std::uint64_t offset, bool bad);
  [[nodiscard]] bool is_bad(std::uint64_t offset, std::uint64_t size_bytes) const;
  [[nodiscard]] bool is_empty() const noexcept { return sectors_.empty(); }

 private:
  using Content = std::array<std::byte, kSector>;
  struct Sector {
    std::unique_ptr<Content> persisted;  // None: zeros.
    std::unique_ptr<Content> cached;     // None: the persisted content is the present one.
    std::uint64_t cached_since = 0;      // The first write that is not persisted.
  };

  std::map<std::uint64_t, Sector> sectors_;  // Ordered, so that a seed yields one sequence.
  std::set<std::uint64_t> unflushed_;        // Sectors with cached content.
  std::set<std::uint64_t> bad_;
  std::uint64_t writes_ = 0;
};

}  // namespace pegaflow::disk
