#include "router/kv/kv_tokens.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

using index::VllmAlgorithm;
using index::VllmExtras;
using index::VllmHasher;

constexpr std::uint32_t kBlock = 16;

std::vector<std::uint32_t> tokens_from(std::uint32_t first, std::size_t count) {
  std::vector<std::uint32_t> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(first + static_cast<std::uint32_t>(i));
  }
  return tokens;
}

/// An engine that hashes in one way, and its events.
class FakeEngine {
 public:
  explicit FakeEngine(const VllmHasher::Options& options)
      : hasher_(VllmHasher::create(options).value()) {}

  std::vector<std::uint64_t> hashes(const std::vector<std::uint32_t>& tokens,
                                    std::string_view salt = {}) const {
    std::vector<BlockKey> keys;
    REQUIRE(hasher_.hash({.tokens = tokens, .cache_salt = salt}, keys));
    std::vector<std::uint64_t> hashes;
    for (const BlockKey& key : keys) hashes.push_back(hasher_.low64(key));
    return hashes;
  }

  void announce(KvTokens& to, KvTokens::Engine& engine, const std::vector<std::uint32_t>& tokens,
                std::string_view salt = {}) const {
    const std::vector<std::uint64_t> all = hashes(tokens, salt);
    index::KvEvent event;
    event.kind = index::EventKind::kStored;
    event.block_size = kBlock;
    event.hashes = all;
    event.tokens = tokens;
    event.has_extra_keys = !salt.empty();
    event.first_extras = salt.empty() ? 0 : 1;
    event.first_extra = salt;
    to.observe(engine, event);
  }

 private:
  VllmHasher hasher_;
};

/// The hashes that the engine's mode gives; empty when it has none.
std::vector<std::uint64_t> computed(KvTokens& all, const KvTokens::Engine& engine,
                                    const std::vector<std::uint32_t>& tokens,
                                    std::string_view salt = {}) {
  std::vector<index::Key> keys;
  HashMode mode = 0;
  std::vector<std::uint64_t> hashes;
  if (!all.keys(engine, tokens, salt, keys, mode)) return hashes;
  CHECK(mode != 0);
  for (const index::Key key : keys) hashes.push_back(index::hash_of(0, key));
  return hashes;
}

TEST_SUITE("KvTokens") {
  TEST_CASE("one event tells the algorithm and the seed of an engine") {
    for (const auto& [algorithm, name] : {std::pair{VllmAlgorithm::kSha256, "sha256"},
                                          std::pair{VllmAlgorithm::kSha256Cbor, "sha256_cbor"},
                                          std::pair{VllmAlgorithm::kXxhash, "xxhash"},
                                          std::pair{VllmAlgorithm::kXxhashCbor, "xxhash_cbor"}}) {
      for (const std::string seed : {"vllm-none-hash", "0", "a seed of ours"}) {
        CAPTURE(name);
        CAPTURE(seed);
        const std::vector<std::string> seeds = {"a seed of ours"};
        KvTokens all = KvTokens::create(seeds).value();
        KvTokens::Engine engine;
        const FakeEngine real({.algorithm = algorithm, .seed = seed, .block_size = kBlock});
        const auto prompt = tokens_from(7, 100);
        CHECK(computed(all, engine, prompt).empty());

        real.announce(all, engine, tokens_from(1, 32));

        CHECK(computed(all, engine, prompt) == real.hashes(prompt));
        CHECK(all.name_of(engine.mode).starts_with(name));
        CHECK(all.name_of(engine.mode).find("of ours") == std::string::npos);
        CHECK(all.block_tokens(engine.mode) == kBlock);
      }
    }
  }

  TEST_CASE("an engine with a seed that is not known, or other hashes, is learned as text") {
    KvTokens all = KvTokens::create({}).value();
    KvTokens::Engine engine;
    const FakeEngine random({.algorithm = VllmAlgorithm::kXxhash, .seed = "3f"});
    for (std::uint32_t i = 0; i < 2 * KvTokens::kMaxTries; ++i) {
      random.announce(all, engine, tokens_from(i, 16));
    }
    CHECK(engine.mode == 0);
    CHECK(engine.tries == KvTokens::kMaxTries);
    CHECK(computed(all, engine, tokens_from(1, 64)).empty());
    CHECK(all.name_of(engine.mode) == "not known");
  }

  TEST_CASE("an event that contradicts the mode ends it, and the next one finds the new mode") {
    KvTokens all = KvTokens::create({}).value();
    KvTokens::Engine engine;
    const FakeEngine before({.algorithm = VllmAlgorithm::kSha256});
    const FakeEngine after({.algorithm = VllmAlgorithm::kSha256Cbor, .seed = "0"});
    const FakeEngine other({.algorithm = VllmAlgorithm::kSha256, .seed = "not known"});
    const auto prompt = tokens_from(5, 48);
    before.announce(all, engine, prompt);
    CHECK(computed(all, engine, prompt) == before.hashes(prompt));
    after.announce(all, engine, prompt);
    CHECK(computed(all, engine, prompt) == after.hashes(prompt));
    CHECK(engine.contradicted == 1);
    other.announce(all, engine, prompt);
    CHECK(computed(all, engine, prompt).empty());
  }

  TEST_CASE("prompts with a salt need an event with one, in the form of either release") {
    for (const VllmExtras extras : {VllmExtras::kTagged, VllmExtras::kUntagged}) {
      KvTokens all = KvTokens::create({}).value();
      KvTokens::Engine engine;
      const FakeEngine real({.algorithm = VllmAlgorithm::kSha256Cbor, .extras = extras});
      const auto prompt = tokens_from(9, 80);
      real.announce(all, engine, prompt, "tenant-a");  // Nothing is known to compare it with.
      CHECK(engine.salted == 0);
      real.announce(all, engine, prompt);
      CHECK(computed(all, engine, prompt, "tenant-b").empty());
      real.announce(all, engine, prompt, "tenant-a");
      CHECK(computed(all, engine, prompt, "tenant-b") == real.hashes(prompt, "tenant-b"));
      CHECK(computed(all, engine, prompt) == real.hashes(prompt));
    }
  }

  TEST_CASE("events in the middle of a chain, of adapters and with several extras tell nothing") {
    KvTokens all = KvTokens::create({}).value();
    KvTokens::Engine engine;
    const FakeEngine real({.algorithm = VllmAlgorithm::kSha256});
    const auto tokens = tokens_from(1, 16);
    const auto hashes = real.hashes(tokens);
    index::KvEvent event;
    event.kind = index::EventKind::kStored;
    event.block_size = kBlock;
    event.hashes = hashes;
    event.tokens = tokens;
    index::KvEvent middle = event;
    middle.parent = 5;
    index::KvEvent adapter = event;
    adapter.lora_name = "a";
    index::KvEvent images = event;
    images.first_extras = 2;
    index::KvEvent cut = event;
    cut.tokens = cut.tokens.first(15);
    index::KvEvent pairs = event;
    pairs.bigram_tokens = true;
    for (const index::KvEvent& each : {middle, adapter, images, cut, pairs}) {
      all.observe(engine, each);
      CHECK(engine.mode == 0);
      CHECK(engine.tries == 0);
    }
    all.observe(engine, event);
    CHECK(engine.mode != 0);
  }

  TEST_CASE("a salt of more than 1,024 bytes has no keys, and a bad seed no object") {
    KvTokens all = KvTokens::create({}).value();
    KvTokens::Engine engine;
    const FakeEngine real({.algorithm = VllmAlgorithm::kSha256});
    const auto prompt = tokens_from(1, 32);
    real.announce(all, engine, prompt);
    real.announce(all, engine, prompt, "s");
    CHECK(computed(all, engine, prompt, std::string(1025, 's')).empty());
    const std::vector<std::string> long_seed = {std::string(256, 'x')};
    CHECK(KvTokens::create(long_seed).error().code == Errc::kInvalidArgument);
    std::vector<std::string> many;
    for (int i = 0; i < 17; ++i) many.push_back("seed " + std::to_string(i));
    CHECK(KvTokens::create(many).error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::router
