#include "router/kv/kv_keys.h"

#include <map>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::router {
namespace {

BlockKey key_of_bytes(std::size_t length, unsigned from) {
  BlockKey key;
  for (std::size_t i = 0; i < length; ++i) key.bytes.at(i) = static_cast<std::byte>(from + i);
  return key;
}

BlockKey random_key(std::mt19937_64& random) {
  BlockKey key;
  for (std::byte& each : key.bytes) each = static_cast<std::byte>(random());
  return key;
}

index::Key name_of(const BlockKey& key) { return index::key_of(0, low_bits(key)); }

TEST_SUITE("kv_keys") {
  TEST_CASE("the low bits are the last 8 bytes of the hash, as engines' events have them") {
    CHECK(low_bits(key_of_bytes(32, 1)) == 0x191A1B1C1D1E1F20U);
    CHECK(low_bits(key_of_bytes(16, 1)) == 0x090A0B0C0D0E0F10U);
    CHECK(low_bits(key_of_bytes(8, 1)) == 0x0102030405060708U);
  }

  TEST_CASE("a key is found by its name in the index, and others are not") {
    KvKeys keys = KvKeys::create(KvKeys::kLeastBytes).value();
    const BlockKey one = key_of_bytes(32, 1);
    keys.add(one);
    keys.add(one);
    CHECK(keys.find(name_of(one)) == one);
    CHECK(!keys.find(name_of(key_of_bytes(32, 2))));
    CHECK(keys.size() == 1);
  }

  TEST_CASE("of two keys with the same low bits the newer one stays") {
    KvKeys keys = KvKeys::create(KvKeys::kLeastBytes).value();
    const BlockKey one = key_of_bytes(32, 1);
    BlockKey other = one;
    other.bytes[0] = std::byte{77};
    keys.add(one);
    keys.add(other);
    CHECK(keys.find(name_of(one)) == other);
  }

  TEST_CASE("it forgets the oldest keys only, and has all others") {
    std::mt19937_64 random(testing::seed());
    KvKeys keys = KvKeys::create(KvKeys::kLeastBytes).value();
    const std::size_t capacity = keys.capacity();
    CHECK(capacity * 60 >= KvKeys::kLeastBytes);
    std::vector<BlockKey> all;
    for (std::size_t i = 0; i < 5 * capacity; ++i) {
      all.push_back(random_key(random));
      keys.add(all.back());
      if (i % 7 == 0) keys.add(all[all.size() - 1 - random() % std::min(all.size(), capacity)]);
    }
    CHECK(keys.size() == capacity);
    CHECK(keys.forgotten() == 4 * capacity);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto found = keys.find(name_of(all[i]));
      const bool is_right = i < 4 * capacity ? !found : found == all[i];
      if (!is_right) FAIL("key ", i, " of ", all.size());
    }
    CHECK(keys.bytes() <= KvKeys::kLeastBytes);
  }

  TEST_CASE("too little memory is an error that names the option") {
    CHECK(KvKeys::create(1).error().detail == "--prefetch-key-bytes is 1, not 0 or 65536 and more");
  }
}

}  // namespace
}  // namespace pegaflow::router
