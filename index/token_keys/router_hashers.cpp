#include "index/token_keys/router_hashers.h"

#include <bit>

#include <xxhash.h>

#include "index/token_keys/byte_writer.h"

namespace pegaflow::index {
namespace {

constexpr std::uint64_t kFnvOffset = 0xCBF29CE484222325U;
constexpr std::uint64_t kFnvPrime = 0x100000001B3U;
constexpr std::uint64_t kDynamoSeed = 1337;

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they lie in memory");

std::uint64_t fnv(std::span<const std::uint8_t> bytes) {
  std::uint64_t hash = kFnvOffset;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * kFnvPrime;
  return hash;
}

std::uint64_t xxh64(std::string_view text) { return XXH64(text.data(), text.size(), 0); }

/// FNV-64a over CBOR of [parent, tokens, extras].
class CborFnv {
 public:
  std::uint64_t root(std::string_view seed, std::string_view model) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(seed.data());
    begin(fnv({bytes, seed.size()}));
    out_.null();
    out_.text(model);
    return fnv(out_.written());
  }

  std::uint64_t block(std::uint64_t parent, std::span<const std::uint32_t> tokens,
                      std::span<const MultimodalItem> items) {
    begin(parent);
    out_.begin_tuple(tokens.size());
    for (const std::uint32_t token : tokens) out_.unsigned_number(token);
    if (items.empty()) {
      out_.null();
    } else {
      out_.begin_tuple(items.size());
    }
    for (const MultimodalItem& item : items) {
      out_.begin_map(1);
      out_.text("Hash");
      out_.text(item.identifier);
    }
    return fnv(out_.written());
  }

 private:
  void begin(std::uint64_t parent) {
    out_.begin();
    out_.begin_tuple(3);
    out_.unsigned_number(parent);
  }
  CborWriter out_;
};

/// XXH64 over the parent, the tokens and the extras with their lengths.
class Xxh64 {
 public:
  std::uint64_t root(std::string_view seed, std::string_view model) {
    begin(xxh64(seed));
    put_text(model);
    return hash();
  }

  std::uint64_t block(std::uint64_t parent, std::span<const std::uint32_t> tokens,
                      std::span<const MultimodalItem> items) {
    begin(parent);
    out_.put(std::as_bytes(tokens));
    for (const MultimodalItem& item : items) put_text(item.identifier);
    return hash();
  }

 private:
  void begin(std::uint64_t parent) {
    out_.clear();
    out_.put_little(parent, 8);
  }
  void put_text(std::string_view text) {
    out_.put_little(text.size(), 8);
    out_.put(text);
  }
  [[nodiscard]] std::uint64_t hash() const {
    return XXH64(out_.bytes().data(), out_.bytes().size(), 0);
  }
  ByteWriter out_;
};

template <typename Hash>
void hash_blocks(Hash hash, std::uint64_t parent, std::uint32_t block_size,
                 const TokenPrompt& prompt, std::vector<std::uint64_t>& out) {
  ItemsOfBlocks items(prompt.items);
  for (std::size_t begin = 0; begin + block_size <= prompt.tokens.size(); begin += block_size) {
    parent = hash.block(parent, prompt.tokens.subspan(begin, block_size),
                        items.in(begin, begin + block_size));
    out.push_back(parent);
  }
}

}  // namespace

Result<void> llmd_keys(LlmdAlgorithm algorithm, std::string_view seed, std::string_view model,
                       std::uint32_t block_size, const TokenPrompt& prompt,
                       std::vector<std::uint64_t>& out) {
  PEGA_TRY(check_block_size(block_size));
  PEGA_TRY(check_prompt(prompt));
  out.clear();
  if (algorithm == LlmdAlgorithm::kCborFnv) {
    CborFnv hash;
    const std::uint64_t root = hash.root(seed, model);
    hash_blocks(hash, root, block_size, prompt, out);
  } else {
    Xxh64 hash;
    const std::uint64_t root = hash.root(seed, model);
    hash_blocks(hash, root, block_size, prompt, out);
  }
  return {};
}

Result<void> dynamo_keys(std::uint32_t block_size, const TokenPrompt& prompt,
                         std::vector<std::uint64_t>& out) {
  PEGA_TRY(check_block_size(block_size));
  if (!prompt.items.empty()) {
    return fail(
        Errc::kInvalidArgument,
        "hash a prompt as Dynamo: it has {} multimodal items, whose hashes are Dynamo's own",
        prompt.items.size());
  }
  out.clear();
  const std::string_view lora = prompt.lora_name;
  const std::uint64_t seed =
      kDynamoSeed + (lora.empty() ? 0 : XXH3_64bits(lora.data(), lora.size()));
  for (std::size_t begin = 0; begin + block_size <= prompt.tokens.size(); begin += block_size) {
    const auto tokens = std::as_bytes(prompt.tokens.subspan(begin, block_size));
    const std::uint64_t local = XXH3_64bits_withSeed(tokens.data(), tokens.size(), seed);
    if (out.empty()) {
      out.push_back(local);
      continue;
    }
    const std::uint64_t pair[] = {out.back(), local};
    out.push_back(XXH3_64bits_withSeed(pair, sizeof pair, kDynamoSeed));
  }
  return {};
}

}  // namespace pegaflow::index
