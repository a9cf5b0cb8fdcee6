#include "base/block_key.h"

#include <algorithm>

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

std::uint64_t BlockKey::low_bits() const noexcept {
  const auto is_padding = [this](std::size_t from, std::size_t to) {
    return std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(from),
                       bytes.begin() + static_cast<std::ptrdiff_t>(to),
                       [](std::byte each) { return each == std::byte{0}; });
  };
  const std::size_t length = !is_padding(16, 32) ? 32 : !is_padding(8, 16) ? 16 : 8;
  std::uint64_t low = 0;
  for (std::size_t i = length - 8; i < length; ++i) {
    low = low << 8 | static_cast<std::uint64_t>(bytes.at(i));
  }
  return low;
}

std::uint64_t BlockKey::first_bits() const noexcept {
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < sizeof first; ++i) {
    first = first << 8 | static_cast<std::uint64_t>(bytes.at(i));
  }
  return first;
}

std::string to_string(const BlockKey& key) { return to_hex(key.bytes); }

}  // namespace pegaflow
