#include "directory/anchor.h"

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include <sodium.h>

#include <fmt/format.h>

#include "base/assert.h"

namespace pegaflow::directory {
namespace {

constexpr std::size_t kDigestBytes = 16;

/// Spreads keys that were counted, as those of tests. The finalizer of MurmurHash3.
std::uint64_t mixed(std::uint64_t word) noexcept {
  word ^= word >> 33;
  word *= 0xff51afd7ed558ccdULL;
  word ^= word >> 33;
  word *= 0xc4ceb9fe1a85ec53ULL;
  return word ^ (word >> 33);
}

void put(std::string& text, std::uint64_t number, std::size_t bytes) {
  for (std::size_t i = bytes; i-- > 0;) text.push_back(static_cast<char>(number >> (8 * i)));
}

std::uint64_t get(std::string_view text) noexcept {
  std::uint64_t number = 0;
  for (const char byte : text) number = number << 8 | static_cast<unsigned char>(byte);
  return number;
}

/// The number that a node's is combined with in members of an anchor.
NodeNumber mask_of(Anchor anchor) noexcept { return static_cast<NodeNumber>(mixed(anchor)); }

template <std::size_t size>
std::array<unsigned char, size> digest(const Bytes32& key, std::string_view bytes) {
  std::array<unsigned char, size> result;
  // BLAKE2b; it cannot fail with these sizes.
  PEGA_ASSERT(::sodium_init() >= 0, "libsodium does not start");
  ::crypto_generichash(result.data(), result.size(),
                       reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                       reinterpret_cast<const unsigned char*>(key.data()), key.size());
  return result;
}

std::string with_purpose(std::string_view purpose, std::string_view bytes) {
  std::string text;
  put(text, purpose.size(), 8);
  text += purpose;
  text += bytes;
  return text;
}

std::string_view text_of(const auto& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

bool is_anchor(const BlockKey& key, bool is_head) noexcept {
  return mixed(key.hash()) % (is_head ? kHeadStep : kStep) == 0;
}

Anchor anchor_of(const Bytes32& key, const Bytes32& space, const Epoch& epoch,
                 const BlockKey& block) {
  std::string input;
  input.reserve(96);
  input += "anchor 1";
  input += text_of(space);
  put(input, epoch.counter, 8);
  put(input, epoch.id, 8);
  input += text_of(block.bytes);
  const auto result = digest<kDigestBytes>(key, input);
  return get(text_of(result).substr(0, sizeof(Anchor)));
}

std::string to_text(const Member& member) {
  std::string text;
  text.reserve(kMemberBytes);
  put(text, member.anchor, 8);
  put(text, static_cast<NodeNumber>(member.node ^ mask_of(member.anchor)), 2);
  put(text, member.life, 2);
  return text;
}

std::optional<Member> member_of(std::string_view text) {
  if (text.size() != kMemberBytes) return {};
  Member member{.anchor = get(text.substr(0, 8))};
  member.node = static_cast<NodeNumber>(get(text.substr(8, 2)) ^ mask_of(member.anchor));
  member.life = static_cast<std::uint16_t>(get(text.substr(10, 2)));
  return member;
}

Range range_of(Anchor anchor) {
  Range range{.first = "[", .end = "("};
  put(range.first, anchor, 8);
  if (anchor + 1 == 0) return {.first = std::move(range.first), .end = "+"};
  put(range.end, anchor + 1, 8);
  return range;
}

std::string bucket_of(Anchor anchor, unsigned bucket_bits) {
  std::string key = "a:";
  put(key, anchor >> (64 - bucket_bits), 4);
  return key;
}

std::uint16_t life_of(const Id128& node) noexcept { return static_cast<std::uint16_t>(node.low); }

std::string seal(const Bytes32& key, std::string_view purpose, std::string_view bytes) {
  const auto check = digest<kDigestBytes>(key, with_purpose(purpose, bytes));
  return std::string(bytes) + std::string(text_of(check));
}

std::optional<std::string> unseal(std::span<const Bytes32> keys, std::string_view purpose,
                                  std::string_view sealed) {
  if (sealed.size() < kDigestBytes) return {};
  const std::string_view bytes = sealed.substr(0, sealed.size() - kDigestBytes);
  const std::string_view check = sealed.substr(bytes.size());
  const std::string input = with_purpose(purpose, bytes);
  for (const Bytes32& key : keys) {
    const auto right = digest<kDigestBytes>(key, input);
    if (::sodium_memcmp(right.data(), check.data(), right.size()) == 0) return std::string(bytes);
  }
  return {};
}

}  // namespace pegaflow::directory
