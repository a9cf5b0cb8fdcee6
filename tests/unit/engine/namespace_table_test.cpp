#include "engine/namespace_table.h"

#include <span>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using Factors = std::vector<NamespaceFactor>;

const Factors kLlama = {{"weights", "llama@1"}, {"kv_dtype", "float16"}, {"block_size", "16"}};
const Factors kLlamaFp8 = {{"weights", "llama@1"}, {"kv_dtype", "fp8"}, {"block_size", "16"}};
const Shape kShape{{{.page_bytes = 4096}}};
const Factors kQwen = {{"weights", "qwen@3"}, {"kv_dtype", "fp8"}, {"block_size", "16"}};

struct Fixture : testing::StoreFixture {
  explicit Fixture(std::size_t max_namespaces = 8)
      : StoreFixture({.pool_bytes = 8 * testing::kPage}), table(*store, max_namespaces) {}
  /// As an engine whose blocks are of one kind.
  Result<void> fix_shape(NamespaceId id, const Shape& only) {
    return table.fix_shapes(id, {}, std::span(&only, 1));
  }
  [[nodiscard]] Result<void> fits(NamespaceId id, std::uint32_t shard, std::uint32_t shards,
                                  std::uint64_t page_bytes) const {
    return table.fits(id, shard, shards, {}, std::span(&page_bytes, 1));
  }
  NamespaceTable table;
};

TEST_SUITE("NamespaceTable") {
  TEST_CASE("lists with equal content are one namespace, in whatever order") {
    Fixture f;
    const auto first = f.table.enter(kLlama);
    const auto same = f.table.enter({kLlama[2], kLlama[0], kLlama[1]});
    const auto other = f.table.enter(kLlamaFp8);
    REQUIRE(first);
    REQUIRE(same);
    REQUIRE(other);
    CHECK(*first == *same);
    CHECK((*first)->users == 2);
    REQUIRE(f.fix_shape((*first)->id, kShape));
    REQUIRE(f.fix_shape((*other)->id, kShape));
    CHECK((*first)->space() != (*other)->space());
    CHECK((*first)->hash != (*other)->hash);
    CHECK((*first)->hash.size() == 32);
    CHECK(f.table.all().size() == 2);
  }

  TEST_CASE("a list that is empty, too long, or names a factor twice is rejected") {
    Fixture f;
    const auto code = [&](Factors factors) {
      const auto entered = f.table.enter(std::move(factors));
      REQUIRE_FALSE(entered);
      return entered.error().code;
    };
    CHECK(code({}) == Errc::kInvalidArgument);
    CHECK(code({{"", "x"}}) == Errc::kInvalidArgument);
    CHECK(code({{"a", "1"}, {"b", "1"}, {"a", "2"}}) == Errc::kInvalidArgument);
    CHECK(code({{"a", std::string(kMaxNamespaceBytes, 'x')}}) == Errc::kInvalidArgument);
    Factors many;
    for (std::size_t i = 0; i <= kMaxNamespaceFactors; ++i) {
      many.push_back({std::to_string(i), "x"});
    }
    CHECK(code(many) == Errc::kInvalidArgument);
    many.pop_back();
    CHECK(f.table.enter(many));
  }

  TEST_CASE("another page size in one namespace is rejected, and the error names both") {
    Fixture f;
    const auto id = (*f.table.enter(kLlama))->id;
    REQUIRE(f.fits(id, 0, 1, 8192));  // No engine was complete: any size does.
    REQUIRE(f.fix_shape(id, kShape));
    REQUIRE(f.fix_shape(
        id, {{{.page_bytes = 4096, .numa_node = 1}}}));  // Another NUMA node does not matter.
    const auto refused = f.fits(id, 0, 1, 8192);
    REQUIRE_FALSE(refused);
    CHECK(f.fix_shape(id, {{{.page_bytes = 8192}}}).error().code == Errc::kRefused);
    CHECK(f.fits(id, 1, 2, 4096).error().code == Errc::kRefused);
    CHECK(refused.error().code == Errc::kRefused);
    CHECK(refused.error().detail.find("8192") != std::string::npos);
    CHECK(refused.error().detail.find("4096") != std::string::npos);
  }

  TEST_CASE("a reset raises the generation, and older blocks are never found again") {
    Fixture f;
    const auto entered = f.table.enter(kLlama);
    REQUIRE(entered);
    const auto& space = **entered;
    REQUIRE(f.fix_shape(space.id, kShape));
    f.space = space.space();
    f.save(testing::keys(0, 3));
    const SpaceId before = space.space();
    f.table.reset(space.id);
    CHECK(space.generation == 2);
    CHECK(space.space() != before);
    CHECK(f.store->lookup(before, testing::keys(0, 3)) == 0);
    CHECK(f.store->lookup(space.space(), testing::keys(0, 3)) == 0);
    f.table.reset(NamespaceId{99});
  }

  TEST_CASE("a namespace stays when its last user left, until the table is full") {
    Fixture f(2);
    const auto llama = f.table.enter(kLlama);
    const auto qwen = f.table.enter(kQwen);
    REQUIRE(llama);
    REQUIRE(qwen);
    const auto full = f.table.enter(kLlamaFp8);
    REQUIRE_FALSE(full);
    CHECK(full.error().code == Errc::kBusy);

    REQUIRE(f.fix_shape((*llama)->id, kShape));
    f.space = (*llama)->space();
    f.save(testing::keys(0, 3));
    const NamespaceId id = (*llama)->id;
    f.table.leave(id);
    REQUIRE(f.table.find(id) != nullptr);
    CHECK(f.store->lookup(f.space, testing::keys(0, 3)) == 3);
    REQUIRE(f.table.enter(kLlama));
    f.table.leave(id);

    REQUIRE(f.table.enter(kLlamaFp8));
    CHECK(f.table.find(id) == nullptr);
    CHECK(f.table.find((*qwen)->id) == *qwen);
    CHECK(f.store->lookup(f.space, testing::keys(0, 3)) == 0);
  }

  TEST_CASE("a shape ends with the last block of an unused namespace, and not before") {
    Fixture f;
    const Shape pages{{{.page_bytes = 8192}}};
    const std::size_t shapes = f.store->shapes().size();
    const NamespaceTable::Namespace& space = **f.table.enter(kLlama);
    REQUIRE(f.fix_shape(space.id, pages));
    f.space = space.space();
    f.save(testing::keys(0, 3));
    const auto work = [&] {
      while (f.store->work()) {
      }
      f.table.forget_shapes();
      while (f.store->work()) {
      }
    };
    f.table.leave(space.id);
    work();
    CHECK(f.store->shapes().size() == shapes + 1);
    CHECK(f.store->lookup(space.space(), testing::keys(0, 3)) == 3);

    REQUIRE(f.table.enter(kLlama));
    f.store->start_cleanup();
    work();
    CHECK(f.store->shapes().size() == shapes + 1);  // It has a user.
    CHECK(space.kinds.front().shape == pages);

    f.table.leave(space.id);
    work();
    CHECK(f.store->shapes().size() == shapes);
    CHECK(f.table.find(space.id)->generation == 1);
    REQUIRE(f.table.enter(kLlama));
    CHECK(f.fix_shape(space.id, kShape));
  }

  TEST_CASE("of two unused namespaces the one left first is removed") {
    Fixture f(2);
    const NamespaceId llama = (*f.table.enter(kLlama))->id;
    const NamespaceId qwen = (*f.table.enter(kQwen))->id;
    f.table.leave(qwen);
    f.table.leave(llama);
    REQUIRE(f.table.enter(kLlamaFp8));
    CHECK(f.table.find(qwen) == nullptr);
    CHECK(f.table.find(llama) != nullptr);
  }
}

/// Full attention and a window, in blocks of 16 tokens.
BlockKinds full_and_window(std::uint32_t window = 64) {
  return {.kinds = {{.rule = KindRule::kPrefix, .block_tokens = 16},
                    {.rule = KindRule::kTrailing, .tokens = window, .block_tokens = 16}},
          .unit_tokens = 16,
          .alignment_tokens = 16};
}
const std::vector<Shape> kTwoShapes = {kShape, Shape{{{.page_bytes = 8192}}}};

TEST_SUITE("NamespaceTable, several kinds") {
  TEST_CASE("each kind is a space of its own, with a shape of its own") {
    Fixture f;
    const NamespaceTable::Namespace& space = **f.table.enter(kLlama);
    CHECK(space.space(0) == SpaceId{});
    REQUIRE(f.table.fix_shapes(space.id, full_and_window(), kTwoShapes));
    REQUIRE(space.kinds.size() == 2);
    CHECK(space.rules == full_and_window());
    CHECK(space.space(0) != space.space(1));
    CHECK(space.kinds[1].shape == kTwoShapes[1]);
    CHECK(space.space(2) == SpaceId{});
    // Kinds of equal shape too.
    const NamespaceTable::Namespace& other = **f.table.enter(kQwen);
    REQUIRE(f.table.fix_shapes(other.id, full_and_window(), std::vector<Shape>{kShape, kShape}));
    CHECK(other.space(0) != other.space(1));
    f.space = other.space(1);
    f.save(testing::keys(0, 2));
    CHECK(f.store->lookup(other.space(1), testing::keys(0, 2)) == 2);
    CHECK(f.store->lookup(other.space(0), testing::keys(0, 2)) == 0);
  }

  TEST_CASE("an engine with other kinds, rules or sizes does not fit, and the error names both") {
    Fixture f;
    const NamespaceId id = (*f.table.enter(kLlama))->id;
    const std::vector<std::uint64_t> sizes = {4096, 8192};
    CHECK(f.table.fits(id, 0, 1, full_and_window(), sizes));  // No engine was complete.
    REQUIRE(f.table.fix_shapes(id, full_and_window(), kTwoShapes));
    CHECK(f.table.fits(id, 0, 1, full_and_window(), sizes));
    CHECK(f.table.fix_shapes(id, full_and_window(), kTwoShapes));

    const auto refused = f.table.fits(id, 0, 1, full_and_window(128), sizes);
    REQUIRE(testing::code_of(refused) == Errc::kRefused);
    CHECK(refused.error().detail.find("window 128 of 16 tokens") != std::string::npos);
    CHECK(refused.error().detail.find("window 64 of 16 tokens") != std::string::npos);
    const auto one = f.fits(id, 0, 1, 4096);
    REQUIRE(testing::code_of(one) == Errc::kRefused);
    CHECK(one.error().detail.find("one kind") != std::string::npos);
    const auto size =
        f.table.fits(id, 0, 1, full_and_window(), std::vector<std::uint64_t>{4096, 4096});
    REQUIRE(testing::code_of(size) == Errc::kRefused);
    CHECK(size.error().detail.find("8192") != std::string::npos);
    CHECK(testing::code_of(f.table.fits(id, 0, 2, full_and_window(), sizes)) == Errc::kRefused);
    CHECK(testing::code_of(f.fix_shape(id, kShape)) == Errc::kRefused);
  }

  TEST_CASE("a namespace without room for one kind has none") {
    Fixture f;
    const std::size_t shapes = f.store->shapes().size();
    const NamespaceTable::Namespace& space = **f.table.enter(kLlama);
    const std::vector<Shape> large = {Shape{{{.page_bytes = 8192}}},
                                      Shape{{{.page_bytes = 64 * testing::kPage}}}};
    CHECK(testing::code_of(f.table.fix_shapes(space.id, full_and_window(), large)) ==
          Errc::kRefused);
    while (f.store->work()) {
    }
    CHECK_FALSE(space.has_shapes());
    CHECK(f.store->shapes().size() == shapes);
    CHECK(f.table.fix_shapes(space.id, full_and_window(), kTwoShapes));
  }

  TEST_CASE("a reset retires the blocks of all kinds") {
    Fixture f;
    const NamespaceTable::Namespace& space = **f.table.enter(kLlama);
    REQUIRE(f.table.fix_shapes(space.id, full_and_window(), kTwoShapes));
    const std::vector<SpaceId> before = {space.space(0), space.space(1)};
    for (const SpaceId kind : before) {
      f.space = kind;
      f.save(testing::keys(0, 1));
    }
    f.table.reset(space.id);
    CHECK(space.generation == 2);
    for (std::size_t kind = 0; kind < 2; ++kind) {
      CHECK(space.space(kind) != before[kind]);
      CHECK(f.store->lookup(before[kind], testing::keys(0, 1)) == 0);
      CHECK(f.store->lookup(space.space(kind), testing::keys(0, 1)) == 0);
    }
  }

  TEST_CASE("the shapes stay while one kind has a block") {
    Fixture f;
    const std::size_t shapes = f.store->shapes().size();
    const NamespaceTable::Namespace& space = **f.table.enter(kLlama);
    REQUIRE(f.table.fix_shapes(space.id, full_and_window(),
                               std::vector<Shape>{Shape{{{.page_bytes = 12288}}}, kTwoShapes[1]}));
    f.space = space.space(1);
    f.save(testing::keys(0, 1));
    const auto work = [&] {
      while (f.store->work()) {
      }
      f.table.forget_shapes();
      while (f.store->work()) {
      }
    };
    f.table.leave(space.id);
    work();
    CHECK(space.has_shapes());
    CHECK(f.store->lookup(space.space(1), testing::keys(0, 1)) == 1);
    f.store->start_cleanup();
    work();
    CHECK_FALSE(space.has_shapes());
    CHECK(space.rules.kinds.empty());
    CHECK(f.store->shapes().size() == shapes);
  }
}

TEST_SUITE("namespace factors") {
  TEST_CASE("the hash depends on where a name ends") {
    CHECK(namespace_hash(Factors{{"ab", "c"}}) != namespace_hash(Factors{{"a", "bc"}}));
    CHECK(namespace_hash(Factors{{"a", "1"}}) == namespace_hash(Factors{{"a", "1"}}));
  }
}

}  // namespace
}  // namespace pegaflow::engine
