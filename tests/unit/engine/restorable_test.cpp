#include "engine/kinds/restorable.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::engine {
namespace {

/// A cache of one prompt, which counts how often each block is asked for.
class Blocks final : public BlockPresence {
 public:
  explicit Blocks(std::vector<std::vector<bool>> present) : present_(std::move(present)) {}

  std::uint64_t present(std::size_t kind, std::size_t first, std::size_t count) override {
    REQUIRE(count >= 1);
    REQUIRE(count <= 64);
    REQUIRE(first + count <= present_[kind].size());
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < count; ++i) {
      ++asked_[{kind, first + i}];
      bits |= std::uint64_t{present_[kind][first + i]} << i;
    }
    return bits;
  }

  [[nodiscard]] bool has(std::size_t kind, const BlockRange& range) const {
    const auto begin = present_[kind].begin();
    return std::all_of(begin + static_cast<std::ptrdiff_t>(range.first),
                       begin + static_cast<std::ptrdiff_t>(range.end()), [](bool b) { return b; });
  }
  [[nodiscard]] std::size_t asked() const { return asked_.size(); }
  [[nodiscard]] bool asked_once() const {
    return std::all_of(asked_.begin(), asked_.end(),
                       [](const auto& row) { return row.second == 1; });
  }

 private:
  std::vector<std::vector<bool>> present_;
  std::map<std::pair<std::size_t, std::size_t>, int> asked_;
};

std::vector<bool> only(std::size_t blocks, const std::set<std::size_t>& present) {
  std::vector<bool> bits(blocks);
  for (const std::size_t block : present) bits[block] = true;
  return bits;
}

constexpr BlockKind kFull{.rule = KindRule::kPrefix, .tokens = 0, .block_tokens = 16};
/// A window of 128 tokens: the next token attends to itself and 127 before it.
constexpr BlockKind kWindow{.rule = KindRule::kTrailing, .tokens = 127, .block_tokens = 16};
constexpr BlockKind kState{.rule = KindRule::kState, .tokens = 0, .block_tokens = 64};

BlockKinds kinds_of(std::vector<BlockKind> kinds, std::uint32_t alignment = 16) {
  BlockKinds all{.kinds = std::move(kinds), .unit_tokens = 16, .alignment_tokens = alignment};
  REQUIRE(all.check());
  return all;
}

/// Every restorable prefix, by the rules alone.
std::vector<std::uint64_t> by_the_rules(const BlockKinds& kinds, std::size_t units,
                                        std::uint64_t local_tokens, const Blocks& blocks) {
  std::vector<std::uint64_t> found;
  for (std::uint64_t tokens = kinds.alignment_tokens; tokens <= units * kinds.unit_tokens;
       tokens += kinds.alignment_tokens) {
    bool is_restorable = tokens > local_tokens;
    for (std::size_t kind = 0; kind < kinds.kinds.size() && is_restorable; ++kind) {
      BlockRange range = BlockKinds::needed(kinds.kinds[kind], tokens);
      if (kinds.kinds[kind].rule == KindRule::kPrefix) {
        const std::size_t local = local_tokens / kinds.kinds[kind].block_tokens;
        range = {.first = local, .count = range.end() - local};
      }
      is_restorable = blocks.has(kind, range);
    }
    if (is_restorable) found.push_back(tokens);
  }
  return found;
}

struct Case {
  BlockKinds kinds;
  std::size_t units = 0;
  std::uint64_t local_tokens = 0;
  std::vector<std::vector<bool>> present;
};

Case random_case(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t limit) {
    return static_cast<std::uint32_t>(random() % limit);
  };
  Case made;
  made.kinds.unit_tokens = 1U << below(5);
  std::uint32_t alignment = made.kinds.unit_tokens;
  const std::size_t count = 1 + below(4);
  for (std::size_t i = 0; i < count; ++i) {
    BlockKind kind{.rule = static_cast<KindRule>(below(4)),
                   .block_tokens = made.kinds.unit_tokens << below(3)};
    if (kind.rule == KindRule::kTrailing) kind.tokens = 1 + below(kind.block_tokens * 6);
    if (kind.rule == KindRule::kChunk) kind.tokens = kind.block_tokens * (1 + below(6));
    alignment = std::max(alignment, kind.block_tokens);  // All are powers of two.
    made.kinds.kinds.push_back(kind);
  }
  made.kinds.alignment_tokens = alignment << below(2);
  REQUIRE(made.kinds.check());
  made.units = below(300);
  const std::uint64_t tokens = made.units * made.kinds.unit_tokens;
  const std::uint64_t boundaries = tokens / made.kinds.alignment_tokens;
  if (below(2) != 0) made.local_tokens = below(boundaries + 1) * made.kinds.alignment_tokens;
  for (const BlockKind& kind : made.kinds.kinds) {
    // Rare holes make long ranges restorable, many holes make most boundaries fail.
    const std::uint32_t hole_in = 2U << below(8);
    std::vector<bool>& bits = made.present.emplace_back(tokens / kind.block_tokens);
    for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = below(hole_in) != 0;
  }
  return made;
}

TEST_SUITE("RestorableSearch") {
  TEST_CASE("a window makes a prompt restorable where its last blocks are, and not in between") {
    const BlockKinds kinds = kinds_of({kFull, kWindow});
    // 20 blocks of 16 tokens; the windows that end after 10 and after 20 blocks.
    std::set<std::size_t> windows;
    for (const std::size_t end : {10U, 20U}) {
      for (std::size_t block = end - 8; block < end; ++block) windows.insert(block);
    }
    windows.erase(15);
    Blocks blocks({std::vector<bool>(20, true), only(20, windows)});
    CHECK(RestorableSearch(kinds, 20, blocks).longest() == 160);
    Blocks again({std::vector<bool>(20, true), only(20, windows)});
    CHECK(RestorableSearch(kinds, 20, again).all() == std::vector<std::uint64_t>{160});
  }

  TEST_CASE("a prompt shorter than the window needs all its blocks") {
    const BlockKinds kinds = kinds_of({kWindow});
    Blocks blocks({only(6, {0, 1, 2, 4, 5})});
    CHECK(RestorableSearch(kinds, 6, blocks).longest() == 48);
  }

  TEST_CASE("a multiple of the chunk needs no block of it") {
    const BlockKind chunk{.rule = KindRule::kChunk, .tokens = 64, .block_tokens = 16};
    const BlockKinds kinds = kinds_of({kFull, chunk});
    Blocks none({std::vector<bool>(12, true), std::vector<bool>(12)});
    CHECK(RestorableSearch(kinds, 12, none).all() == std::vector<std::uint64_t>{64, 128, 192});
    Blocks some({std::vector<bool>(11, true), only(11, {8, 9})});
    CHECK(RestorableSearch(kinds, 11, some).longest() == 160);
  }

  TEST_CASE("a state is one block, at every boundary its own") {
    const BlockKinds kinds = kinds_of({kFull, kState}, 64);
    Blocks blocks({std::vector<bool>(16, true), only(4, {0, 2})});
    RestorableSearch search(kinds, 16, blocks);
    CHECK(search.longest() == 192);
    CHECK(search.wanted(0, 192, 64) == BlockRange{.first = 4, .count = 8});
    CHECK(search.wanted(1, 192, 64) == BlockRange{.first = 2, .count = 1});
  }

  TEST_CASE(
      "tokens that the engine has need no block of the prefix, and the windows all the same") {
    const BlockKinds kinds = kinds_of({kFull, kWindow});
    std::set<std::size_t> windows;
    for (std::size_t block = 2; block < 10; ++block) windows.insert(block);
    const auto full = only(10, {5, 6, 7, 8, 9});
    Blocks blocks({full, only(10, windows)});
    CHECK(RestorableSearch(kinds, 10, blocks).longest(80) == 160);
    Blocks without({full, only(10, windows)});
    CHECK(RestorableSearch(kinds, 10, without).longest(64) == 0);
    Blocks hole({full, only(10, {3, 4, 5, 6, 7, 8, 9})});
    CHECK(RestorableSearch(kinds, 10, hole).longest(80) == 0);
    Blocks longer({full, only(10, windows)});
    CHECK(RestorableSearch(kinds, 10, longer).longest(160) == 0);
  }

  TEST_CASE("the kind that shortens the prefix of full attention is named, with the tokens") {
    const BlockKinds kinds = kinds_of({kFull, kWindow, kState}, 64);
    const std::vector<bool> full(18, true);
    const auto shortened = [&](const std::set<std::size_t>& windows,
                               const std::set<std::size_t>& states, std::uint64_t local = 0) {
      Blocks blocks({full, only(16, windows), only(4, states)});
      RestorableSearch search(kinds, 16, blocks);
      const std::uint64_t tokens = search.longest(local);
      const auto& found = search.shortened();
      return found ? std::to_string(tokens) + ", kind " + std::to_string(found->kind) + ": " +
                         std::to_string(found->tokens)
                   : std::to_string(tokens);
    };
    const std::set<std::size_t> windows = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    CHECK(shortened(windows, {3}) == "256");
    CHECK(shortened(windows, {0, 1, 2}) == "192, kind 2: 64");
    CHECK(shortened({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {2, 3}) == "192, kind 1: 64");
    CHECK(shortened(windows, {}, 128) == "0, kind 2: 128");
    CHECK(shortened(windows, {}, 256) == "0");

    const BlockKinds without_prefix = kinds_of({kWindow});
    Blocks blocks({only(16, {0, 1, 2, 3})});
    RestorableSearch search(without_prefix, 16, blocks);
    CHECK(search.longest() == 64);
    CHECK_FALSE(search.shortened());
  }

  TEST_CASE("one kind of full attention is a prefix, and no block behind a hole is asked for") {
    const BlockKinds kinds = kinds_of({kFull});
    std::vector<bool> present(1000, true);
    present[100] = false;
    Blocks blocks({present});
    CHECK(RestorableSearch(kinds, 1000, blocks).longest() == 1600);
    CHECK(blocks.asked() == 128);
  }

  TEST_CASE("a whole window at the end costs one group of questions") {
    const BlockKinds kinds = kinds_of({kWindow});
    Blocks blocks({std::vector<bool>(6400, true)});
    CHECK(RestorableSearch(kinds, 6400, blocks).longest() == 102400);
    CHECK(blocks.asked() == 64);
  }

  TEST_CASE("random kinds and holes: as the rules say, with each block asked for once") {
    std::mt19937_64 random(testing::seed());
    std::size_t restorable = 0;
    for (int i = 0; i < 20000; ++i) {
      const Case one = random_case(random);
      CAPTURE(i);
      Blocks blocks(one.present);
      const auto expected = by_the_rules(one.kinds, one.units, one.local_tokens, blocks);
      const std::uint64_t longest =
          RestorableSearch(one.kinds, one.units, blocks).longest(one.local_tokens);
      REQUIRE(longest == (expected.empty() ? 0 : expected.back()));
      REQUIRE(blocks.asked_once());
      Blocks again(one.present);
      REQUIRE(RestorableSearch(one.kinds, one.units, again).all(one.local_tokens) == expected);
      REQUIRE(again.asked_once());
      restorable += expected.empty() ? 0 : 1;
    }
    CHECK(restorable > 5000);
    CHECK(restorable < 19000);
  }
}

TEST_SUITE("BlockKinds") {
  TEST_CASE("kinds that contradict each other are rejected with their number") {
    const auto error_of = [](const BlockKinds& kinds) {
      const auto checked = kinds.check();
      return checked ? std::string() : checked.error().detail;
    };
    const auto with = [](BlockKind kind) {
      return BlockKinds{.kinds = {kFull, kind}, .unit_tokens = 16, .alignment_tokens = 64};
    };
    CHECK(error_of({}) == "0 kinds of blocks, 1 to 16 are possible");
    CHECK(error_of({.kinds = std::vector<BlockKind>(17, kFull),
                    .unit_tokens = 16,
                    .alignment_tokens = 16}) == "17 kinds of blocks, 1 to 16 are possible");
    CHECK(error_of({.kinds = {kFull}, .unit_tokens = 0, .alignment_tokens = 16}) ==
          "a hash unit of 0 tokens and an alignment of 16");
    CHECK(error_of(with({.rule = KindRule::kState, .block_tokens = 24})) ==
          "kind 1: a block of 24 tokens is not a multiple of the hash unit of 16");
    CHECK(error_of(with({.rule = KindRule::kState, .block_tokens = 48})) ==
          "kind 1: the alignment of 64 tokens is not a multiple of its block of 48");
    CHECK(error_of(with({.rule = KindRule::kTrailing, .tokens = 0, .block_tokens = 16})) ==
          "kind 1: a window or chunk of 0 tokens");
    CHECK(error_of(with({.rule = KindRule::kChunk, .tokens = 40, .block_tokens = 16})) ==
          "kind 1: a chunk of 40 tokens is not a multiple of its block of 16");
    CHECK(error_of(with(kWindow)).empty());
  }

  TEST_CASE("a block has the key of the unit that it ends with") {
    const BlockKinds kinds = kinds_of({kFull, kState}, 64);
    CHECK(kinds.key_of(kFull, 0) == 0);
    CHECK(kinds.key_of(kFull, 5) == 5);
    CHECK(kinds.key_of(kState, 0) == 3);
    CHECK(kinds.key_of(kState, 2) == 11);
  }
}

}  // namespace
}  // namespace pegaflow::engine
