#include "base/block_key.h"

#include "base/hex.h"

namespace pegaflow {

Result<BlockKey> BlockKey::from_bytes(std::span<const std::byte> raw) {
  if (raw.empty() || raw.size() > kMaxBytes) {
    return fail(Errc::kInvalidArgument, "a block key has 1 to {} bytes, not {}", kMaxBytes,
                raw.size());
  }
  BlockKey key;
  std::memcpy(key.bytes.data(), raw.data(), raw.size());
  return key;
}

std::string to_string(const BlockKey& key) { return to_hex(key.bytes); }

}  // namespace pegaflow
