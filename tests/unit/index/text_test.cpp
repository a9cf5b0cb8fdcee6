#include "index/text.h"

#include <string>

#include <doctest/doctest.h>

#include "index/key.h"

namespace pegaflow::index {
namespace {

TEST_SUITE("Text") {
  TEST_CASE("only whole chunks are hashed, and each hash covers all text before it") {
    const std::string common(512, 'a');
    Text first;
    Text second;

    hash_text(7, common + std::string(300, 'b'), first);
    hash_text(7, common + std::string(300, 'c'), second);

    REQUIRE(first.chunks.size() == 3);
    CHECK(first.chunks[1] == second.chunks[1]);
    CHECK(first.chunks[2] != second.chunks[2]);
    CHECK(first.chunks[0] != first.chunks[1]);
  }

  TEST_CASE("texts with different roots have no hash in common") {
    const std::string bytes(1024, 'a');
    Text first;
    Text second;

    hash_text(hash_root({.model = "m", .salt = "tenant-a"}), bytes, first);
    hash_text(hash_root({.model = "m", .salt = "tenant-b"}), bytes, second);

    for (std::size_t i = 0; i < 4; ++i) CHECK(first.chunks[i] != second.chunks[i]);
  }

  TEST_CASE("a root depends on where its parts are divided") {
    CHECK(hash_root({.model = "ab", .lora = "c"}) != hash_root({.model = "a", .lora = "bc"}));
    CHECK(hash_root({.lora = "x"}) != hash_root({.salt = "x"}));
    CHECK(hash_root({.model = "m"}) == hash_root({.model = "m"}));
  }
}

TEST_SUITE("Key") {
  TEST_CASE("one hash has another key in another domain") {
    CHECK(key_of(domain_salt("a"), 1) != key_of(domain_salt("b"), 1));
    CHECK(key_of(domain_salt("a"), 1) == key_of(domain_salt("a"), 1));
    CHECK(key_of(domain_salt("a"), 1) != key_of(domain_salt("a"), 2));
  }
}

}  // namespace
}  // namespace pegaflow::index
