#pragma once
/// \file
/// Memory that peers may read and that bytes of peers are read into.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/id128.h"

namespace pegaflow {

/// Memory that a Fabric knows, by the number it gave it. Numbers are not used again: one that a
/// peer still has in its hands never comes to mean other memory.
enum class RegionId : std::uint32_t {};

/// What a peer needs to read a region. A plain value: it travels in whatever the two ends talk by.
struct RegionDescriptor {
  RegionId region{};
  std::uint64_t size_bytes = 0;
  /// In the words of the backend, which the other side hands back unread. Empty where the number is
  /// enough.
  std::vector<std::byte> key{};
};

/// What a peer needs to reach a Fabric and to read what it has: the part of a greeting between two
/// nodes that concerns bytes.
struct FabricDescriptor {
  std::string backend;             ///< Which of them it is: "tcp".
  Id128 incarnation;               ///< Of the Fabric: another one knows none of these regions.
  std::vector<std::byte> address;  ///< In the words of the backend.
  std::vector<RegionDescriptor> regions;
};

}  // namespace pegaflow
