#pragma once
/// \file
/// The proof of a block on an SSD: it ties the bytes to the block's name and to its segment's life.

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/block_key.h"

namespace pegaflow::engine::ssd {

/// The name of the blocks of one kind of a namespace, which all nodes use for them.
using SpaceName = std::array<std::byte, 32>;

/// The last reset of a namespace; a greater one is newer.
struct Epoch {
  std::uint64_t counter = 0;
  std::uint64_t id = 0;
  auto operator<=>(const Epoch&) const = default;
};

/// Whose blocks they are: one kind of one namespace in one epoch.
struct Origin {
  SpaceName name{};
  std::uint16_t kind = 0;
  Epoch epoch{};
  bool operator==(const Origin&) const = default;
};

/// XXH3-64 over the origin, the key, the life of the segment and the checksum of each page, in the
/// order of the pages. Never 0.
[[nodiscard]] std::uint64_t proof_of(const Origin& origin, const BlockKey& key, std::uint64_t life,
                                     std::span<const std::uint64_t> page_checksums) noexcept;

/// XXH3-64 of a key in the namespace with that number on its disk.
[[nodiscard]] std::uint64_t fingerprint_of(std::uint16_t number, const BlockKey& key) noexcept;

/// The permission to seal a block that was read from an SSD. Only prove() makes one, so no block is
/// served without its proof.
class Proven {
 public:
  /// No value unless the checksums of the pages that were read yield `proof`: other bytes were
  /// saved under this name in this life of the segment.
  [[nodiscard]] static std::optional<Proven> prove(const Origin& origin, const BlockKey& key,
                                                   std::uint64_t life,
                                                   std::span<const std::uint64_t> page_checksums,
                                                   std::uint64_t proof) noexcept;

 private:
  Proven() = default;
};

}  // namespace pegaflow::engine::ssd
