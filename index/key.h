#pragma once
/// \file
/// The name of a block in the index.

#include <cstdint>
#include <string_view>

namespace pegaflow::index {

/// The low 64 bits of the engine's own block hash, mixed with the salt of its domain: engines whose
/// equal hashes mean equal blocks. Uniform, so tables use its bits as they are.
using Key = std::uint64_t;

/// The salt of a domain: a namespace of PegaFlow, or else one model and block size. Distinct names
/// give distinct salts but for one chance in 2^64.
[[nodiscard]] std::uint64_t domain_salt(std::string_view domain);

/// The key of the block whose hash ends in `hash`: the one place where hash and salt are mixed.
/// Different hashes of one domain have different keys.
[[nodiscard]] constexpr Key key_of(std::uint64_t salt, std::uint64_t hash) noexcept {
  std::uint64_t mixed = hash ^ salt;
  mixed = (mixed ^ (mixed >> 32U)) * 0x9E3779B97F4A7C15U;
  return mixed ^ (mixed >> 29U);
}

/// The hash of which `key` was made with that salt.
[[nodiscard]] constexpr std::uint64_t hash_of(std::uint64_t salt, Key key) noexcept {
  std::uint64_t mixed = key ^ (key >> 29U) ^ (key >> 58U);
  mixed *= 0xF1DE83E19937733DU;  // The inverse of the factor above, modulo 2^64.
  return mixed ^ (mixed >> 32U) ^ salt;
}

}  // namespace pegaflow::index
