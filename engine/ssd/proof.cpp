#include "engine/ssd/proof.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/types/hash.h"

namespace pegaflow::engine::ssd {
namespace {

static_assert(std::endian::native == std::endian::little);

/// The text that is hashed. Without padding.
struct Named {
  SpaceName name;
  BlockKey key;
  std::uint64_t kind;
  std::uint64_t counter;
  std::uint64_t id;
  std::uint64_t life;
  std::uint64_t pages;       ///< Their count.
  std::uint64_t of_content;  ///< The hash of their checksums.
};
static_assert(sizeof(Named) == 112);

}  // namespace

std::uint64_t proof_of(const Origin& origin, const BlockKey& key, std::uint64_t life,
                       std::span<const std::uint64_t> page_checksums) noexcept {
  const Named named{.name = origin.name,
                    .key = key,
                    .kind = origin.kind,
                    .counter = origin.epoch.counter,
                    .id = origin.epoch.id,
                    .life = life,
                    .pages = page_checksums.size(),
                    .of_content = hash64(std::as_bytes(page_checksums))};
  return std::max<std::uint64_t>(1, hash64(std::as_bytes(std::span(&named, 1))));
}

std::uint64_t fingerprint_of(std::uint16_t number, const BlockKey& key) noexcept {
  return hash64(key.bytes, number);
}

std::optional<Proven> Proven::prove(const Origin& origin, const BlockKey& key, std::uint64_t life,
                                    std::span<const std::uint64_t> page_checksums,
                                    std::uint64_t proof) noexcept {
  if (proof_of(origin, key, life, page_checksums) != proof) return std::nullopt;
  return Proven();
}

}  // namespace pegaflow::engine::ssd
