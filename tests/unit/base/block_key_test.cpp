#include "base/block_key.h"

#include <vector>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("BlockKey") {
  TEST_CASE("a short hash is padded with zeros") {
    const std::vector<std::byte> raw(16, std::byte{0xAB});
    const auto key = BlockKey::from_bytes(raw);
    REQUIRE(key);
    CHECK(key->bytes[15] == std::byte{0xAB});
    CHECK(key->bytes[16] == std::byte{0});
    CHECK(to_string(*key) == std::string(32, '0').insert(0, "abababababababababababababababab"));
  }

  TEST_CASE("an empty key and one of 33 bytes are rejected") {
    CHECK(BlockKey::from_bytes({}).error().code == Errc::kInvalidArgument);
    const std::vector<std::byte> raw(33);
    const auto key = BlockKey::from_bytes(raw);
    REQUIRE_FALSE(key);
    CHECK(key.error().detail == "a block key has 1 to 32 bytes, not 33");
  }
}

}  // namespace
}  // namespace pegaflow
