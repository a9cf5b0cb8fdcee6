#pragma once
/// \file
/// Memory that peers may read, and that bytes of peers are read into.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/id128.h"

namespace pegaflow {

/// Identifies memory registered with a Fabric. Numbers are not reused: a number that a peer still
/// holds never names other memory.
enum class RegionId : std::uint32_t {};

/// Everything that a peer needs to read a region. A plain value, sent over any connection between
/// the two nodes.
struct RegionDescriptor {
  RegionId region{};
  std::uint64_t size_bytes = 0;
  /// Backend-specific; the peer returns it unread. Empty where the number is enough.
  std::vector<std::byte> key{};
  bool operator==(const RegionDescriptor&) const = default;
};

/// Everything that a peer needs to reach a Fabric and to read its regions: the data-plane part of a
/// greeting between two nodes.
struct FabricDescriptor {
  std::string backend;             ///< The backend's name: "tcp".
  Id128 incarnation;               ///< The Fabric's; another incarnation has none of these regions.
  std::vector<std::byte> address;  ///< Backend-specific.
  std::vector<RegionDescriptor> regions;
  bool operator==(const FabricDescriptor&) const = default;
};

}  // namespace pegaflow
