#pragma once
/// \file
/// The regions of one Fabric, and until when each is lent.

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

/// Which memory a region is.
///
/// add() and lend() are called under the owner's lock, by any thread; remove() by the thread of the
/// fabric under it; the rest by that thread, without. An entry is written before its number is
/// known to anybody, and never used for another region, so a number is all that has to be handed
/// over.
class RegionTable {
 public:
  /// As many as one Fabric can have in its life: the memory of a node is one or a few.
  static constexpr std::size_t kMaximum = 1024;

  /// Errors: kInvalidArgument when `memory` is empty, kOutOfCapacity when all numbers are given.
  Result<RegionId> add(std::span<std::byte> memory);
  /// Errors: kInvalidArgument when there is no such region.
  Result<void> lend(RegionId region, TimePoint until);
  void remove(RegionId region) noexcept;
  [[nodiscard]] std::vector<RegionDescriptor> describe() const;

  /// That part of a region; no value when there is no such region or part.
  [[nodiscard]] std::optional<std::span<std::byte>> part(RegionId region, std::uint64_t offset,
                                                         std::uint64_t size_bytes) const noexcept;
  [[nodiscard]] bool lent(RegionId region, TimePoint now) const noexcept;

 private:
  struct Region {
    std::atomic<std::byte*> begin{nullptr};  ///< Null: none, or not any more.
    std::uint64_t size_bytes = 0;
    std::atomic<std::int64_t> lent_until_ns{INT64_MIN};
  };
  [[nodiscard]] const Region* find(RegionId region) const noexcept;

  std::array<Region, kMaximum> regions_;
  std::atomic<std::uint32_t> used_{0};
};

}  // namespace pegaflow::tcp
