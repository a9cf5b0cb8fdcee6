#include "router/kv/kv_tokens.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::router {

namespace {

using index::VllmAlgorithm;
using index::VllmExtras;
using index::VllmHasher;

/// vLLM's seed without PYTHONHASHSEED, and the usual value of that.
constexpr std::array<std::string_view, 2> kUsualSeeds = {"vllm-none-hash", "0"};

/// In the order in which vLLM's users choose them.
constexpr std::array<std::pair<VllmAlgorithm, std::string_view>, 4> kAlgorithms{
    {{VllmAlgorithm::kSha256, "sha256"},
     {VllmAlgorithm::kSha256Cbor, "sha256_cbor"},
     {VllmAlgorithm::kXxhash, "xxhash"},
     {VllmAlgorithm::kXxhashCbor, "xxhash_cbor"}}};

/// Newer releases first. Bare identifiers write a salt like untagged extras.
constexpr std::array kExtras = {VllmExtras::kTagged, VllmExtras::kUntagged};

bool is_same(const VllmHasher::Options& a, const VllmHasher::Options& b) {
  return a.algorithm == b.algorithm && a.extras == b.extras && a.block_size == b.block_size &&
         a.seed == b.seed;
}

/// Whether the event tells how a chain begins.
bool is_beginning(const index::KvEvent& event) {
  return event.kind == index::EventKind::kStored && !event.parent && !event.hashes.empty() &&
         !event.bigram_tokens && event.block_size > 0 && event.tokens.size() >= event.block_size &&
         event.lora_name.empty();
}

}  // namespace

Result<KvTokens> KvTokens::create(std::span<const std::string> seeds) {
  std::vector<std::string> all(kUsualSeeds.begin(), kUsualSeeds.end());
  for (const std::string& seed : seeds) {
    PEGA_TRY(VllmHasher::create({.seed = seed}));
    if (std::find(all.begin(), all.end(), seed) == all.end()) all.push_back(seed);
  }
  if (all.size() > kMaxSeeds + kUsualSeeds.size()) {
    return fail(Errc::kInvalidArgument, "{} seeds of block hashes are more than {}", seeds.size(),
                kMaxSeeds);
  }
  return KvTokens(std::move(all));
}

bool KvTokens::explains(const VllmHasher& hasher, const index::KvEvent& event,
                        std::string_view salt) {
  const auto hashed =
      hasher.hash({.tokens = event.tokens.first(event.block_size), .cache_salt = salt}, hashes_);
  return hashed && hashes_.size() == 1 && hasher.low64(hashes_.front()) == event.hashes.front();
}

HashMode KvTokens::number_of(const VllmHasher::Options& options, const VllmHasher& hasher) {
  for (std::size_t i = 0; i < modes_.size(); ++i) {
    if (is_same(modes_[i].options, options)) return static_cast<HashMode>(i + 1);
  }
  if (modes_.size() >= kMaxModes) return 0;
  modes_.push_back({options, hasher});
  return static_cast<HashMode>(modes_.size());
}

void KvTokens::find_mode(Engine& engine, const index::KvEvent& event) {
  if (engine.tries >= kMaxTries) return;
  for (const auto& [algorithm, name] : kAlgorithms) {
    for (const std::string& seed : seeds_) {
      const VllmHasher::Options options{.algorithm = algorithm,
                                        .extras = VllmExtras::kTagged,
                                        .seed = seed,
                                        .block_size = event.block_size};
      const auto hasher = VllmHasher::create(options);
      if (!hasher || !explains(*hasher, event, {})) continue;
      engine.mode = number_of(options, *hasher);
      engine.tries = 0;
      return;
    }
  }
  ++engine.tries;
}

void KvTokens::find_salted(Engine& engine, const index::KvEvent& event) {
  VllmHasher::Options options = modes_[engine.mode - 1].options;
  for (const VllmExtras extras : kExtras) {
    options.extras = extras;
    const auto hasher = VllmHasher::create(options);
    if (!hasher || !explains(*hasher, event, event.first_extra)) continue;
    engine.salted = number_of(options, *hasher);
    return;
  }
}

void KvTokens::observe(Engine& engine, const index::KvEvent& event) {
  if (!is_beginning(event)) return;
  if (event.first_extras == 0) {
    if (engine.mode != 0 && explains(modes_[engine.mode - 1].hasher, event, {})) return;
    if (engine.mode != 0) engine = {.contradicted = engine.contradicted + 1};
    find_mode(engine, event);
    return;
  }
  // Its only extra key is a salt, or the name of an image: that one confirms nothing.
  if (event.first_extras != 1 || event.first_extra.empty() || engine.mode == 0) return;
  if (engine.salted == 0) find_salted(engine, event);
}

bool KvTokens::keys(const Engine& engine, std::span<const std::uint32_t> tokens,
                    std::string_view salt, std::vector<index::Key>& keys, HashMode& mode) {
  mode = salt.empty() ? engine.mode : engine.salted;
  if (mode == 0) return false;
  const VllmHasher& hasher = modes_[mode - 1].hasher;
  if (!hasher.hash({.tokens = tokens, .cache_salt = salt}, hashes_)) {
    mode = 0;
    return false;
  }
  keys.clear();
  keys.reserve(hashes_.size());
  for (const BlockKey& hash : hashes_) keys.push_back(index::key_of(0, hasher.low64(hash)));
  return true;
}

std::string KvTokens::name_of(HashMode mode) const {
  if (mode == 0) return "not known";
  const VllmHasher::Options& options = modes_[mode - 1].options;
  const auto* const named =
      std::find_if(kAlgorithms.begin(), kAlgorithms.end(),
                   [&](const auto& each) { return each.first == options.algorithm; });
  // A seed may be a secret: pages do not show those that are configured.
  const bool is_default = options.seed == kUsualSeeds.front();
  const bool is_usual = options.seed == kUsualSeeds.back();
  return fmt::format("{}{}", named->second,
                     is_default ? ""
                     : is_usual ? ", seed 0"
                                : ", configured seed");
}

std::uint32_t KvTokens::block_tokens(HashMode mode) const {
  return mode == 0 ? 0 : modes_[mode - 1].options.block_size;
}

}  // namespace pegaflow::router
