#pragma once
/// \file
/// Values that nodes exchange: challenges and names of 32 bytes, and epochs of resets.

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pegaflow {

/// A challenge, a proof or a name: 32 bytes that look random to every node that did not make them.
using Bytes32 = std::array<std::byte, 32>;

/// One reset of a namespace. The greater of two is the newer one, which nodes that connect adopt.
struct Epoch {
  std::uint64_t counter = 0;  ///< Below kEnd.
  std::uint64_t id = 0;       ///< Random, so that two nodes that reset at once differ.

  static constexpr std::uint64_t kEnd = std::uint64_t{1} << 63;
  [[nodiscard]] bool is_zero() const noexcept { return *this == Epoch{}; }
  auto operator<=>(const Epoch&) const = default;
};

/// Blocks that are on disks of an owner and not in its pool, and its report of when they will be.
struct OnDisks {
  std::size_t blocks = 0;
  std::uint64_t bytes_per_second = 0;  ///< The recent rate of its disks; 0: unknown.
  std::uint64_t queued_bytes = 0;      ///< Bytes that its disks read before those blocks.
};

/// The epochs that a node knows.
struct KnownEpochs {
  /// Limit of listed namespaces.
  static constexpr std::size_t kMaxSpaces = 1024;

  std::vector<std::pair<Bytes32, Epoch>> spaces;  ///< By the name among nodes.
  Epoch floor;                                    ///< The epoch of all namespaces not listed.
};

}  // namespace pegaflow
