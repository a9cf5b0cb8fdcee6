#include "index/token_keys/vllm_hasher.h"

#include <cstring>

#include <xxhash.h>

#include "index/token_keys/byte_writer.h"
#include "index/token_keys/sha256.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kMostItemsOfBlock = 64;  // A pickle has to fit into one frame.
constexpr std::size_t kMostSeed = 255;

bool is_sha(VllmAlgorithm algorithm) {
  return algorithm == VllmAlgorithm::kSha256 || algorithm == VllmAlgorithm::kSha256Cbor;
}

BlockKey digest(VllmAlgorithm algorithm, std::span<const std::uint8_t> bytes) {
  BlockKey key;
  if (is_sha(algorithm)) {
    key.bytes = sha256(bytes);
  } else {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
    std::memcpy(key.bytes.data(), canonical.digest, sizeof canonical.digest);
  }
  return key;
}

/// The part of a prompt that one block's hash depends on, beside the parent.
struct Block {
  std::span<const std::uint32_t> tokens;
  std::uint64_t begin = 0;  ///< Position of its first token.
  std::string_view lora_name;
  std::string_view lora_path;
  std::string_view cache_salt;  ///< In the first block only.
  std::span<const MultimodalItem> items;

  [[nodiscard]] std::size_t extras() const {
    return items.size() + (lora_name.empty() ? 0 : 1) + (cache_salt.empty() ? 0 : 1);
  }
};

template <typename Writer>
void write_tagged(Writer& out, std::string_view tag, std::string_view text) {
  out.begin_tuple(2);
  out.constant(tag);
  out.text(text);
  out.end_tuple(2);
}

template <typename Writer>
void write_lora(Writer& out, VllmExtras form, const Block& block) {
  if (form != VllmExtras::kTagged) return out.text(block.lora_name);
  out.begin_tuple(3);
  out.constant("lora");
  out.text(block.lora_name);
  out.text(block.lora_path);
  out.end_tuple(3);
}

template <typename Writer>
void write_item(Writer& out, VllmExtras form, const Block& block, const MultimodalItem& item) {
  if (form == VllmExtras::kBareIdentifiers) return out.text(item.identifier);
  const std::size_t count = form == VllmExtras::kTagged ? 3 : 2;
  out.begin_tuple(count);
  if (form == VllmExtras::kTagged) out.constant("mm");
  out.text(item.identifier);
  // Negative when the item began in an earlier block.
  out.number(static_cast<std::int64_t>(item.offset - block.begin));
  out.end_tuple(count);
}

/// In vLLM's order: adapter, items, salt.
template <typename Writer>
void write_extras(Writer& out, VllmExtras form, const Block& block) {
  const std::size_t count = block.extras();
  if (count == 0) return out.null();
  out.begin_tuple(count);
  if (!block.lora_name.empty()) write_lora(out, form, block);
  for (const MultimodalItem& item : block.items) write_item(out, form, block, item);
  if (!block.cache_salt.empty()) {
    if (form == VllmExtras::kTagged) {
      write_tagged(out, "cache_salt", block.cache_salt);
    } else {
      out.text(block.cache_salt);
    }
  }
  out.end_tuple(count);
}

template <typename Writer>
BlockKey hash_root(Writer& out, const VllmHasher::Options& options) {
  out.begin();
  out.text(options.seed);
  out.end();
  return digest(options.algorithm, out.written());
}

template <typename Writer>
BlockKey hash_block(Writer& out, const VllmHasher::Options& options,
                    std::span<const std::byte> parent, const Block& block) {
  out.begin();
  out.begin_tuple(3);
  out.bytes(parent);
  out.begin_tuple(block.tokens.size());
  out.numbers(block.tokens);
  out.end_tuple(block.tokens.size());
  write_extras(out, options.extras, block);
  out.end_tuple(3);
  out.end();
  return digest(options.algorithm, out.written());
}

template <typename Writer>
Result<void> hash_blocks(const VllmHasher::Options& options, std::size_t hash_bytes,
                         const BlockKey& root, const TokenPrompt& prompt,
                         std::vector<BlockKey>& out) {
  Writer writer;
  ItemsOfBlocks items(prompt.items);
  const std::size_t size = options.block_size;
  const BlockKey* parent = &root;
  for (std::size_t begin = 0; begin + size <= prompt.tokens.size(); begin += size) {
    const Block block = {.tokens = prompt.tokens.subspan(begin, size),
                         .begin = begin,
                         .lora_name = prompt.lora_name,
                         .lora_path = prompt.lora_path,
                         .cache_salt = begin == 0 ? prompt.cache_salt : std::string_view(),
                         .items = items.in(begin, begin + size)};
    if (block.items.size() > kMostItemsOfBlock) {
      return fail(Errc::kInvalidArgument,
                  "hash a prompt: the block at token {} has {} items, more than {}", begin,
                  block.items.size(), kMostItemsOfBlock);
    }
    out.push_back(hash_block(writer, options, std::span(parent->bytes).first(hash_bytes), block));
    parent = &out.back();
  }
  return {};
}

}  // namespace

Result<VllmAlgorithm> vllm_algorithm(std::string_view name) {
  if (name == "sha256") return VllmAlgorithm::kSha256;
  if (name == "sha256_cbor") return VllmAlgorithm::kSha256Cbor;
  if (name == "xxhash") return VllmAlgorithm::kXxhash;
  if (name == "xxhash_cbor") return VllmAlgorithm::kXxhashCbor;
  return fail(Errc::kInvalidArgument,
              "the hash algorithm '{}' is not sha256, sha256_cbor, xxhash or xxhash_cbor", name);
}

Result<VllmHasher> VllmHasher::create(const Options& options) {
  PEGA_TRY(check_block_size(options.block_size));
  if (options.seed.size() > kMostSeed) {
    return fail(Errc::kInvalidArgument, "the seed of block hashes has {} bytes, more than {}",
                options.seed.size(), kMostSeed);
  }
  VllmHasher hasher(options);
  if (hasher.is_cbor()) {
    CborWriter writer;
    hasher.root_ = hash_root(writer, options);
  } else {
    PickleWriter writer;
    hasher.root_ = hash_root(writer, options);
  }
  return hasher;
}

Result<void> VllmHasher::hash(const TokenPrompt& prompt, std::vector<BlockKey>& out) const {
  PEGA_TRY(check_prompt(prompt));
  out.clear();
  out.reserve(prompt.tokens.size() / options_.block_size);
  return is_cbor() ? hash_blocks<CborWriter>(options_, hash_bytes(), root_, prompt, out)
                   : hash_blocks<PickleWriter>(options_, hash_bytes(), root_, prompt, out);
}

bool VllmHasher::is_cbor() const {
  return options_.algorithm == VllmAlgorithm::kSha256Cbor ||
         options_.algorithm == VllmAlgorithm::kXxhashCbor;
}

std::size_t VllmHasher::hash_bytes() const { return is_sha(options_.algorithm) ? 32 : 16; }

std::uint64_t VllmHasher::low64(const BlockKey& hash) const {
  std::uint64_t value = 0;
  for (std::size_t i = hash_bytes() - 8; i < hash_bytes(); ++i) {
    value = value << 8U | std::to_integer<std::uint64_t>(hash.bytes[i]);
  }
  return value;
}

}  // namespace pegaflow::index
