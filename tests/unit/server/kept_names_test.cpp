// The record of a kept pool's names.
#include "server/pool/kept_names.h"

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

KeptNames some_names() {
  KeptNames names;
  names.shapes = {{0, {{{.page_bytes = 4096, .numa_node = 1}, {.page_bytes = 0}}}},
                  {7, {{{.page_bytes = std::uint64_t{1} << 30}}}}};
  KeptNames::Namespace& plain = names.namespaces.emplace_back();
  plain.factors = {{"model", std::string("\xFF\x00\n", 3)}, {"dtype", "float16"}};
  plain.kinds = {{.shape = 0, .space = engine::SpaceId{3}}};
  plain.generation = 12;
  plain.epoch = {.counter = 5, .id = ~std::uint64_t{0}};
  KeptNames::Namespace& hybrid = names.namespaces.emplace_back();
  hybrid.factors = {{"model", "hybrid"}};
  hybrid.rules.kinds = {{.rule = engine::KindRule::kPrefix, .block_tokens = 16},
                        {.rule = engine::KindRule::kTrailing, .tokens = 1023, .block_tokens = 16}};
  hybrid.rules.unit_tokens = 16;
  hybrid.rules.alignment_tokens = 32;
  hybrid.kinds = {{.shape = 0, .space = engine::SpaceId{4}},
                  {.shape = 7, .space = engine::SpaceId{5}}};
  names.namespaces.emplace_back().factors = {{"model", "never complete"}};
  return names;
}

TEST_SUITE("KeptNames") {
  TEST_CASE("a record says what was written, for factors of any bytes too") {
    const KeptNames written = some_names();

    const auto read = read_names(write_names(written));

    REQUIRE(read);
    REQUIRE(read->shapes.size() == 2);
    CHECK(read->shapes[0].shape == written.shapes[0].shape);
    CHECK(read->shapes[1].number == 7);
    CHECK(read->shapes[1].shape == written.shapes[1].shape);
    REQUIRE(read->namespaces.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
      const KeptNames::Namespace& was = written.namespaces[i];
      const KeptNames::Namespace& is = read->namespaces[i];
      CHECK(is.factors == was.factors);
      CHECK(is.rules == was.rules);
      CHECK(is.generation == was.generation);
      CHECK(is.epoch == was.epoch);
      REQUIRE(is.kinds.size() == was.kinds.size());
      for (std::size_t kind = 0; kind < is.kinds.size(); ++kind) {
        CHECK(is.kinds[kind].shape == was.kinds[kind].shape);
        CHECK(is.kinds[kind].space == was.kinds[kind].space);
      }
    }
  }

  TEST_CASE("bytes that are cut or changed are an error, and never another record's names") {
    const std::vector<std::byte> whole = write_names(some_names());
    for (std::size_t size = 0; size < whole.size(); ++size) {
      const auto read = read_names(std::span(whole).first(size));
      REQUIRE_FALSE(read);
      CHECK(read.error().code == Errc::kCorrupt);
    }
    CHECK(read_names(write_names({}))->namespaces.empty());
  }

  TEST_CASE("rules that no engine could have registered are an error") {
    KeptNames names = some_names();
    names.namespaces[1].rules.alignment_tokens = 24;  // No multiple of a block.
    CHECK_FALSE(read_names(write_names(names)));
  }
}

}  // namespace
}  // namespace pegaflow::server
