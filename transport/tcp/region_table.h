#pragma once
/// \file
/// The regions of one Fabric, and the time until which each is lent.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/region.h"

namespace pegaflow::tcp {

/// Maps the number of a region to its memory.
///
/// add() and lend() are called under the owner's lock, by any thread; remove() by the fabric's
/// thread under that lock; the rest by that thread without it. An entry is written before its
/// number is published, and never reused for another region, so passing the number is enough.
class RegionTable {
 public:
  /// The limit over the life of a Fabric: the memory of a node is one region or a few.
  static constexpr std::size_t kMaximum = 1024;

  /// Errors: kInvalidArgument when `memory` is empty, kOutOfCapacity when all numbers are used.
  Result<RegionId> add(std::span<std::byte> memory);
  /// Errors: kInvalidArgument when there is no such region.
  Result<void> lend(RegionId region, TimePoint until);
  void remove(RegionId region) noexcept;
  [[nodiscard]] std::vector<RegionDescriptor> describe() const;

  /// Returns 0 when there is no such region.
  [[nodiscard]] std::uint64_t size_bytes(RegionId region) const noexcept;
  /// Returns a part of a region; no value when there is no such region or part.
  [[nodiscard]] std::optional<std::span<std::byte>> part(RegionId region, std::uint64_t offset,
                                                         std::uint64_t size_bytes) const noexcept;
  [[nodiscard]] bool lent(RegionId region, TimePoint now) const noexcept;

 private:
  struct Region {
    std::atomic<std::byte*> begin{nullptr};  ///< Null: not yet registered, or removed.
    std::uint64_t size_bytes = 0;
    std::atomic<std::int64_t> lent_until_ns{INT64_MIN};
  };
  [[nodiscard]] const Region* find(RegionId region) const noexcept;

  std::array<Region, kMaximum> regions_;
  std::atomic<std::uint32_t> used_{0};
};

}  // namespace pegaflow::tcp
