#pragma once
/// \file
/// 64 well-mixed bits of a block's name, for estimates and tables that keep no keys.

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/block_key.h"
#include "engine/types/ids.h"

namespace pegaflow::engine {

/// Well mixed also for keys that are small numbers: the finalizer of MurmurHash3.
[[nodiscard]] inline std::uint64_t key_hash(SpaceId space, const BlockKey& key) noexcept {
  // Where the engine's hash has 8 bytes only, the second word is zero.
  std::uint64_t second = 0;
  std::memcpy(&second, key.bytes.data() + sizeof second, sizeof second);
  std::uint64_t mixed = key.hash() ^ (std::rotl(second, 32) * 0x9E3779B97F4A7C15ULL);
  mixed += static_cast<std::uint64_t>(space) * 0xD6E8FEB86659FD93ULL;
  mixed = (mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCDULL;
  mixed = (mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53ULL;
  return mixed ^ (mixed >> 33);
}

}  // namespace pegaflow::engine
