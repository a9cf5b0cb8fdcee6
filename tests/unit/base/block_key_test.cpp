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

  TEST_CASE("the ends of a hash are numbers, whatever its length") {
    const auto key_of = [](std::size_t length) {
      std::vector<std::byte> raw(length, std::byte{0x11});
      raw.front() = std::byte{0xAA};
      raw.back() = std::byte{0xFF};
      return BlockKey::from_bytes(raw).value();
    };
    for (const std::size_t length : {16U, 32U}) {
      CHECK(key_of(length).low_bits() == 0x11111111111111FF);
      CHECK(key_of(length).first_bits() == 0xAA11111111111111);
    }
    CHECK(key_of(8).low_bits() == 0xAA111111111111FF);
    CHECK(key_of(8).first_bits() == 0xAA111111111111FF);
  }
}

}  // namespace
}  // namespace pegaflow
