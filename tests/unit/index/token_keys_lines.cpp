// Hashes prompts for tests/python/test_token_keys.py: one JSON object a line in, one line of
// hashes in hexadecimal digits out.

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "index/token_keys/vllm_hasher.h"

namespace pegaflow::index {
namespace {

using nlohmann::json;

VllmExtras form_of(const std::string& name) {
  if (name == "tagged") return VllmExtras::kTagged;
  return name == "untagged" ? VllmExtras::kUntagged : VllmExtras::kBareIdentifiers;
}

std::string hash_line(const json& line) {
  const auto algorithm = vllm_algorithm(line["algorithm"].get<std::string>());
  if (!algorithm) return to_string(algorithm.error());
  const auto hasher = VllmHasher::create({.algorithm = *algorithm,
                                          .extras = form_of(line["extras"]),
                                          .seed = line["seed"],
                                          .block_size = line["block_size"]});
  if (!hasher) return to_string(hasher.error());
  const auto tokens = line["tokens"].get<std::vector<std::uint32_t>>();
  const std::string salt = line["cache_salt"];
  const std::string name = line["lora_name"];
  const std::string path = line["lora_path"];
  std::vector<MultimodalItem> items;
  for (const json& item : line["items"]) {
    items.push_back({item[0].get_ref<const std::string&>(), item[1], item[2]});
  }
  std::vector<BlockKey> hashes;
  const auto hashed = hasher->hash(
      {.tokens = tokens, .cache_salt = salt, .lora_name = name, .lora_path = path, .items = items},
      hashes);
  if (!hashed) return to_string(hashed.error());
  std::string text;
  for (const BlockKey& hash : hashes) {
    text += (text.empty() ? "" : " ") + to_string(hash).substr(0, hasher->hash_bytes() * 2);
  }
  return text;
}

}  // namespace
}  // namespace pegaflow::index

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    fmt::print("{}\n", pegaflow::index::hash_line(nlohmann::json::parse(line)));
  }
}
