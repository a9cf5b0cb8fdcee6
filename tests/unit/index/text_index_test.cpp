#include "index/text_index.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <xxhash.h>

#include "tests/support/seed.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kBlockBytes = 64;  // 16 tokens of 4 bytes.

struct Prompt {
  std::string bytes;
  std::uint64_t root = 1;
  Text text{};
  std::vector<Key> keys{};
  std::vector<BlockKey> hashes{};
};

BlockKey full_hash(Key key) {
  BlockKey hash;
  std::memcpy(hash.bytes.data(), &key, sizeof key);
  std::memcpy(hash.bytes.data() + 24, &key, sizeof key);
  return hash;
}

/// An engine that makes a token of 4 bytes: each block is named by all text up to its end.
void engine(Prompt& prompt, std::uint64_t seed = 0) {
  hash_text(prompt.root, prompt.bytes, prompt.text);
  prompt.keys.clear();
  prompt.hashes.clear();
  for (std::size_t end = kBlockBytes; end <= prompt.bytes.size(); end += kBlockBytes) {
    prompt.keys.push_back(XXH3_64bits_withSeed(prompt.bytes.data(), end, prompt.root + seed));
    prompt.hashes.push_back(full_hash(prompt.keys.back()));
  }
}

Prompt prompt_of(std::string bytes, std::uint64_t root = 1) {
  Prompt prompt{.bytes = std::move(bytes), .root = root};
  engine(prompt);
  return prompt;
}

std::string words(std::mt19937_64& random, std::size_t bytes) {
  std::string text;
  while (text.size() < bytes) text += static_cast<char>('a' + random() % 26);
  return text;
}

bool is_prefix(const std::vector<Key>& part, const std::vector<Key>& whole) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

TEST_SUITE("TextIndex") {
  TEST_CASE("a text that was learned gives its keys and full hashes; another one gives none") {
    std::mt19937_64 random(1);
    TextIndex index({.bytes = 1 << 20});
    const Prompt prompt = prompt_of(words(random, 5000));
    TextIndex::Known known;

    index.look_up(prompt.text, known);
    CHECK(known.keys.empty());
    index.learn(prompt.text, prompt.keys, prompt.hashes);
    index.look_up(prompt.text, known);

    CHECK(known.keys == prompt.keys);
    CHECK(known.hashes == prompt.hashes);
    CHECK(known.sure == prompt.keys.size());
    CHECK(known.text_bytes == 5000);
    index.look_up(prompt_of(words(random, 5000)).text, known);
    CHECK(known.keys.empty());
    CHECK(known.text_bytes == 0);
  }

  TEST_CASE("the next turn of a conversation finds all blocks of the one before") {
    std::mt19937_64 random(2);
    TextIndex index({.bytes = 1 << 20});
    std::string history = words(random, 700);
    TextIndex::Known known;
    std::vector<Key> former;
    for (int turn = 0; turn < 12; ++turn) {
      const Prompt prompt = prompt_of(history);
      index.look_up(prompt.text, known);
      CHECK(known.keys == former);
      index.learn(prompt.text, prompt.keys);
      former = prompt.keys;
      history += words(random, 100 + random() % 900);
    }
  }

  TEST_CASE("each turn adds its own part only") {
    std::mt19937_64 random(3);
    TextIndex index({.bytes = 16 << 20});
    std::string history;
    for (int turn = 0; turn < 50; ++turn) {
      history += words(random, 2000);
      const Prompt prompt = prompt_of(history);
      index.learn(prompt.text, prompt.keys, prompt.hashes);
    }

    CHECK(index.stats().chunks == history.size() / Text::kChunkBytes);
    CHECK(index.stats().blocks == history.size() / kBlockBytes);
    CHECK(index.stats().chains == 1);
  }

  TEST_CASE("how long a common start is, is estimated first and measured when learned") {
    std::mt19937_64 random(4);
    TextIndex index({.bytes = 1 << 20});
    const std::string system = words(random, 4000);
    const Prompt first = prompt_of(system + words(random, 3000));
    const Prompt second = prompt_of(system + words(random, 3000));
    const Prompt third = prompt_of(system + words(random, 3000));
    const std::size_t common = 4000 / kBlockBytes;
    TextIndex::Known known;

    index.learn(first.text, first.keys);
    index.look_up(second.text, known);
    CHECK(is_prefix(known.keys, second.keys));
    CHECK(known.keys.size() + 6 >= common);
    CHECK(known.sure == 0);

    index.learn(second.text, second.keys);
    index.look_up(third.text, known);
    CHECK(is_prefix(known.keys, third.keys));
    CHECK(known.keys.size() == common);
    CHECK(known.sure == common);
    CHECK(index.stats().blocks == first.keys.size() + second.keys.size() - common);
    index.look_up(first.text, known);
    CHECK(known.keys == first.keys);
  }

  TEST_CASE("two tenants with the same text share nothing") {
    std::mt19937_64 random(5);
    TextIndex index({.bytes = 1 << 20});
    const std::string bytes = words(random, 4000);
    const Prompt one = prompt_of(bytes, hash_root({.model = "m", .salt = "one"}));
    const Prompt two = prompt_of(bytes, hash_root({.model = "m", .salt = "two"}));
    TextIndex::Known known;

    index.learn(one.text, one.keys);
    index.look_up(two.text, known);
    CHECK(known.keys.empty());
    index.learn(two.text, two.keys);
    index.look_up(one.text, known);
    CHECK(known.keys == one.keys);
    index.look_up(two.text, known);
    CHECK(known.keys == two.keys);
  }

  TEST_CASE("an engine whose hashes are all new replaces what was learned") {
    std::mt19937_64 random(6);
    TextIndex index({.bytes = 1 << 20});
    Prompt prompt = prompt_of(words(random, 4000));
    const Prompt longer = prompt_of(prompt.bytes + words(random, 2000));
    index.learn(prompt.text, prompt.keys);
    index.learn(longer.text, longer.keys);
    TextIndex::Known known;

    engine(prompt, 99);
    index.learn(prompt.text, prompt.keys);

    index.look_up(prompt.text, known);
    CHECK(known.keys == prompt.keys);
    index.look_up(longer.text, known);
    CHECK(known.keys == prompt.keys);
    CHECK(index.stats().relearned == 1);
  }

  TEST_CASE("full hashes are known up to the first that was never learned") {
    std::mt19937_64 random(7);
    TextIndex index({.bytes = 1 << 20});
    const Prompt first = prompt_of(words(random, 2048));
    const Prompt second = prompt_of(first.bytes + words(random, 2048));
    const Prompt third = prompt_of(second.bytes + words(random, 2048));
    index.learn(first.text, first.keys, first.hashes);
    index.learn(second.text, second.keys);
    index.learn(third.text, third.keys, third.hashes);
    TextIndex::Known known;

    index.look_up(third.text, known);

    CHECK(known.keys == third.keys);
    CHECK(known.hashes == first.hashes);
  }

  TEST_CASE("memory stays within its bound, and the least recently used ends go first") {
    std::mt19937_64 random(8);
    TextIndex index({.bytes = 1 << 20});
    const std::string system = words(random, 4096);
    const Prompt kept = prompt_of(system + words(random, 4096));
    index.learn(kept.text, kept.keys, kept.hashes);
    TextIndex::Known known;
    Prompt last;
    for (int i = 0; i < 300; ++i) {
      last = prompt_of(system + words(random, 4096 + random() % 20'000));
      index.learn(last.text, last.keys, last.hashes);
      REQUIRE(index.stats().bytes <= 1 << 20);
      index.look_up(kept.text, known);
      REQUIRE(known.keys == kept.keys);
    }
    CHECK(index.stats().evicted > 100);
    index.look_up(last.text, known);
    CHECK(known.keys == last.keys);

    const Prompt huge = prompt_of(words(random, 4 << 20));
    index.learn(huge.text, huge.keys);
    index.look_up(huge.text, known);
    CHECK(known.keys.empty());
    index.look_up(kept.text, known);
    CHECK(known.keys == kept.keys);
  }

  TEST_CASE("texts shorter than a chunk, and without keys, are not learned") {
    TextIndex index({.bytes = 1});
    const Prompt shorter = prompt_of(std::string(255, 'x'));
    index.learn(shorter.text, shorter.keys);
    const Prompt longer = prompt_of(std::string(4096, 'x'));
    index.learn(longer.text, {});
    CHECK(index.stats().learned == 0);
    TextIndex::Known known;
    index.look_up(shorter.text, known);
    CHECK(known.keys.empty());
  }

  TEST_CASE("what one index has learned can be learned by another without the bytes of the texts") {
    std::mt19937_64 random(11);
    TextIndex one({.bytes = 1 << 20});
    TextIndex other({.bytes = 1 << 20});
    std::vector<Prompt> last;
    const std::string system = words(random, 1500);
    for (int conversation = 0; conversation < 5; ++conversation) {
      std::string history = system + words(random, 700);
      for (int turn = 0; turn < 4; ++turn) {
        const Prompt prompt = prompt_of(history);
        one.learn(prompt.text, prompt.keys, prompt.hashes);
        if (turn == 3) last.push_back(prompt);
        history += words(random, 100 + random() % 900);
      }
    }

    TextIndex::Learned learned;
    std::size_t copied = 0;
    for (const std::uint32_t end : one.ends()) {
      if (!one.copy(end, learned)) continue;
      ++copied;
      other.learn(learned.text, learned.keys, learned.hashes);
    }

    CHECK(copied == 5);
    TextIndex::Known known;
    for (Prompt& prompt : last) {
      engine(prompt);  // A text views the bytes, which were copied.
      other.look_up(prompt.text, known);
      CHECK(known.keys == prompt.keys);
      CHECK(known.hashes == prompt.hashes);
      CHECK(known.text_bytes == prompt.bytes.size());
      const Prompt next = prompt_of(prompt.bytes + words(random, 300));
      other.look_up(next.text, known);
      CHECK(known.keys == prompt.keys);
    }
    CHECK_FALSE(one.copy(1'000'000, learned));
  }

  TEST_CASE("random trees of conversations: what is known is right to within a chunk") {
    const std::uint64_t seed = testing::seed();
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    for (const std::size_t bytes : {std::size_t{128} << 10U, std::size_t{64} << 20U}) {
      TextIndex index({.bytes = bytes});
      std::vector<std::string> texts = {words(random, 300)};
      TextIndex::Known known;
      for (int i = 0; i < 1000; ++i) {
        CAPTURE(i);
        // Continues an earlier text from somewhere, mostly from its end.
        std::string bytes_of_text = texts[random() % texts.size()];
        if (random() % 3 == 0) bytes_of_text.resize(random() % bytes_of_text.size() + 1);
        bytes_of_text += words(random, random() % 1500);
        if (bytes_of_text.size() > 20'000) bytes_of_text.resize(300);
        const Prompt prompt = prompt_of(bytes_of_text);
        index.look_up(prompt.text, known);
        REQUIRE(known.text_bytes <= prompt.bytes.size());
        const std::size_t likely = known.keys.size();
        const std::size_t right =
            static_cast<std::size_t>(std::mismatch(known.keys.begin(), known.keys.end(),
                                                   prompt.keys.begin(), prompt.keys.end())
                                         .first -
                                     known.keys.begin());
        REQUIRE(likely <= right + Text::kChunkBytes / kBlockBytes + 1);
        index.learn(prompt.text, prompt.keys, prompt.hashes);
        if (prompt.text.chunks.empty()) continue;
        index.look_up(prompt.text, known);
        REQUIRE(is_prefix(known.keys, prompt.keys));
        REQUIRE(known.keys.size() + Text::kChunkBytes / kBlockBytes >= prompt.keys.size());
        REQUIRE(known.hashes.size() == known.keys.size());
        REQUIRE(std::equal(known.hashes.begin(), known.hashes.end(), prompt.hashes.begin()));
        REQUIRE(index.stats().bytes <= bytes);
        texts.push_back(bytes_of_text);
        if (texts.size() > 100) texts.erase(texts.begin() + static_cast<long>(random() % 100));
      }
    }
  }
}

}  // namespace
}  // namespace pegaflow::index
