#include "base/block_key.h"

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

std::string to_string(const BlockKey& key) {
  std::string text;
  for (const std::byte byte : key.bytes)
    text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

}  // namespace pegaflow
