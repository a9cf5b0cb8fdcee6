// The block hashes of vLLM, llm-d and Dynamo, beside vectors that were computed by other programs:
// vLLM's own functions, and the tests of llm-d.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "index/token_keys/router_hashers.h"
#include "index/token_keys/vllm_hasher.h"

namespace pegaflow::index {
namespace {

using nlohmann::json;

const json& vectors() {
  static const json all = json::parse(std::ifstream(PEGA_HASH_VECTORS));
  return all;
}

std::uint64_t number(const json& text) { return std::stoull(text.get<std::string>(), nullptr, 0); }

std::vector<std::uint64_t> numbers(const json& texts) {
  std::vector<std::uint64_t> all;
  std::ranges::transform(texts, std::back_inserter(all), number);
  return all;
}

std::vector<std::uint32_t> first_tokens(std::size_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 1U);
  return tokens;
}

std::string hex(const BlockKey& key, std::size_t bytes) {
  return to_string(key).substr(0, bytes * 2);
}

/// Extras of one block in the old form: an adapter, a salt, or an image.
struct OldExtras {
  TokenPrompt prompt;
  VllmExtras form = VllmExtras::kUntagged;
  std::vector<MultimodalItem> items;
};

OldExtras old_extras(const std::string& name) {
  OldExtras extras;
  if (name.starts_with("lora")) extras.prompt.lora_name = "my-lora";
  if (name.ends_with("salt")) extras.prompt.cache_salt = "tenant-a";
  if (name.starts_with("mm")) extras.items = {{.identifier = "mmhash0", .offset = 3, .length = 1}};
  if (name == "mm_string") extras.form = VllmExtras::kBareIdentifiers;
  return extras;
}

TEST_SUITE("VllmHasher") {
  TEST_CASE("all algorithms and untagged extras give vLLM's hashes") {
    for (const json& vector : vectors()["vllm"]) {
      CAPTURE(vector.dump());
      OldExtras extras = old_extras(vector["extras_name"]);
      const auto tokens = vector["tokens"].get<std::vector<std::uint32_t>>();
      extras.prompt.tokens = tokens;
      extras.prompt.items = extras.items;
      const auto hasher =
          VllmHasher::create({.algorithm = *vllm_algorithm(vector["algo"].get<std::string>()),
                              .extras = extras.form,
                              .seed = vector["seed"],
                              .block_size = vector["block_size"]});
      REQUIRE(hasher);
      std::vector<BlockKey> hashes;

      REQUIRE(hasher->hash(extras.prompt, hashes));

      REQUIRE(hashes.size() == vector["blocks"].size());
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        CHECK(hex(hashes[i], hasher->hash_bytes()) ==
              vector["blocks"][i]["hash_hex"].get<std::string>());
        CHECK(hasher->low64(hashes[i]) == number(vector["blocks"][i]["low64"]));
      }
    }
  }

  TEST_CASE("tagged extras give the hashes of vLLM 0.31 and newer") {
    const auto tokens = first_tokens(32);
    for (const json& vector : vectors()["vllm_tagged"]) {
      CAPTURE(vector.dump());
      const std::string lora = vector["lora"];
      const std::string salt = vector["salt"];
      std::vector<MultimodalItem> items;
      for (const json& item : vector["items"]) {
        items.push_back({.identifier = "mmhash0", .offset = item[1], .length = item[2]});
      }
      const auto hasher =
          VllmHasher::create({.algorithm = *vllm_algorithm(vector["algo"].get<std::string>())});
      REQUIRE(hasher);
      std::vector<BlockKey> hashes;

      REQUIRE(hasher->hash({.tokens = tokens,
                            .cache_salt = salt,
                            .lora_name = lora,
                            .lora_path = lora.empty() ? "" : "/adapters/my-lora",
                            .items = items},
                           hashes));

      CHECK(hex(hashes[0], 32) == vector["hash_hex"].get<std::string>());
      CHECK(hasher->low64(hashes[0]) == number(vector["low64"][0]));
      CHECK(hasher->low64(hashes[1]) == number(vector["low64"][1]));
    }
  }

  TEST_CASE("an incomplete block has no hash, and a prompt without tokens none") {
    const auto hasher = VllmHasher::create({.block_size = 16});
    const auto tokens = first_tokens(47);
    std::vector<BlockKey> hashes(5);
    REQUIRE(hasher->hash({.tokens = tokens}, hashes));
    CHECK(hashes.size() == 2);
    REQUIRE(hasher->hash({}, hashes));
    CHECK(hashes.empty());
  }

  TEST_CASE("options and prompts out of range are refused") {
    CHECK(VllmHasher::create({.block_size = 0}).error().code == Errc::kInvalidArgument);
    CHECK(VllmHasher::create({.block_size = 8193}).error().code == Errc::kInvalidArgument);
    CHECK(VllmHasher::create({.seed = std::string(256, 's')}).error().code ==
          Errc::kInvalidArgument);
    CHECK(vllm_algorithm("md5").error().code == Errc::kInvalidArgument);

    const auto hasher = VllmHasher::create({});
    const auto tokens = first_tokens(128);
    std::vector<BlockKey> hashes;
    const std::vector<MultimodalItem> overlapping = {{"a", 0, 10}, {"b", 9, 10}};
    CHECK(hasher->hash({.tokens = tokens, .items = overlapping}, hashes).error().code ==
          Errc::kInvalidArgument);
    const std::string long_text(1025, 'x');
    CHECK(hasher->hash({.tokens = tokens, .cache_salt = long_text}, hashes).error().code ==
          Errc::kInvalidArgument);
    CHECK(hasher->hash({.tokens = tokens, .lora_name = long_text}, hashes).error().code ==
          Errc::kInvalidArgument);
    std::vector<MultimodalItem> many;
    for (std::uint64_t i = 0; i < 100; ++i) many.push_back({"i", i, 1});
    const auto wide = VllmHasher::create({.block_size = 128});
    CHECK(wide->hash({.tokens = tokens, .items = many}, hashes).error().code ==
          Errc::kInvalidArgument);
  }
}

void check_llmd(LlmdAlgorithm algorithm, const json& all) {
  for (const json& vector : all) {
    CAPTURE(vector.dump());
    const auto tokens = vector["tokens"].get<std::vector<std::uint32_t>>();
    std::vector<std::string> names;
    if (!vector["mm_extras"].is_null()) names = vector["mm_extras"][0];
    std::vector<MultimodalItem> items;
    for (const std::string& name : names) items.push_back({name, items.size(), 1});
    std::vector<std::uint64_t> keys;

    REQUIRE(llmd_keys(algorithm, vector["seed"].get<std::string>(),
                      vector["model"].get<std::string>(), vector["block_size"],
                      {.tokens = tokens, .items = items}, keys));

    CHECK(keys == numbers(vector["keys"]));
  }
}

TEST_SUITE("llmd_keys") {
  TEST_CASE("both algorithms give llm-d's keys") {
    check_llmd(LlmdAlgorithm::kCborFnv, vectors()["llmd_fnv"]);
    check_llmd(LlmdAlgorithm::kXxh64, vectors()["llmd_xxh64"]);
  }

  TEST_CASE("llm-d's own test values are met: a text, and a prompt with an image") {
    const json& text = vectors()["llmd_golden_text"];
    const auto tokens = text["tokens"].get<std::vector<std::uint32_t>>();
    std::vector<std::uint64_t> keys;
    REQUIRE(llmd_keys(LlmdAlgorithm::kCborFnv, text["seed"].get<std::string>(),
                      text["model"].get<std::string>(), text["block_size"], {.tokens = tokens},
                      keys));
    CHECK(keys == numbers(text["keys"]));

    const json& image = vectors()["llmd_golden_mm"];
    auto all = image["head"].get<std::vector<std::uint32_t>>();
    all.resize(all.size() + image["length"].get<std::size_t>(), image["placeholder"]);
    for (const json& token : image["tail"]) all.push_back(token);
    const std::string name = image["image_hash"];
    const std::vector<MultimodalItem> items = {
        {.identifier = name, .offset = image["offset"], .length = image["length"]}};
    REQUIRE(llmd_keys(LlmdAlgorithm::kCborFnv, image["seed"].get<std::string>(),
                      image["model"].get<std::string>(), image["block_size"],
                      {.tokens = all, .items = items}, keys));
    CHECK(keys == numbers(image["keys_hex"]));
  }

  TEST_CASE("a block size of 0, and items out of order, are refused") {
    std::vector<std::uint64_t> keys;
    CHECK(llmd_keys(LlmdAlgorithm::kXxh64, "", "m", 0, {}, keys).error().code ==
          Errc::kInvalidArgument);
    const std::vector<MultimodalItem> items = {{"a", 5, 1}, {"b", 0, 1}};
    CHECK(llmd_keys(LlmdAlgorithm::kXxh64, "", "m", 16, {.items = items}, keys).error().code ==
          Errc::kInvalidArgument);
  }
}

TEST_SUITE("dynamo_keys") {
  TEST_CASE("prompts with and without an adapter give Dynamo's keys") {
    std::vector<std::uint64_t> keys;
    for (const json& vector : vectors()["dynamo_xxh3"]) {
      const auto tokens = vector["tokens"].get<std::vector<std::uint32_t>>();
      REQUIRE(dynamo_keys(vector["block_size"], {.tokens = tokens}, keys));
      CHECK(keys == numbers(vector["sequence"]));
    }
    const auto tokens = first_tokens(32);
    REQUIRE(dynamo_keys(16, {.tokens = tokens, .lora_name = "my-lora"}, keys));
    CHECK(keys[1] == number(vectors()["dynamo_lora"]["second"]));
  }

  TEST_CASE("prompts with images are refused") {
    const std::vector<MultimodalItem> items = {{"a", 0, 1}};
    std::vector<std::uint64_t> keys;
    CHECK(dynamo_keys(16, {.items = items}, keys).error().code == Errc::kInvalidArgument);
    CHECK(dynamo_keys(0, {}, keys).error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::index
