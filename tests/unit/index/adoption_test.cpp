#include "index/events/adoption.h"

#include <cstddef>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

std::vector<Key> keys_up_to(std::size_t count) {
  std::vector<Key> keys(count);
  std::iota(keys.begin(), keys.end(), Key{1});
  return keys;
}

TEST_SUITE("Adoption") {
  TEST_CASE("a million blocks come in bounded slices, each of them once and in order") {
    Adoption adoption;
    adoption.begin(keys_up_to(1'000'000));

    std::vector<Key> all;
    while (adoption.is_active()) {
      const auto slice = adoption.next();
      REQUIRE(slice.size() <= Adoption::kSlice);
      all.insert(all.end(), slice.begin(), slice.end());
    }

    CHECK(all == keys_up_to(1'000'000));
    CHECK(adoption.next().empty());
  }

  TEST_CASE("a block that the engine has removed meanwhile does not come back") {
    Adoption adoption;
    adoption.begin(keys_up_to(Adoption::kSlice + 3));
    (void)adoption.next();
    const std::vector<Key> left = {Adoption::kSlice + 2, 7};

    adoption.removed(left);

    const auto rest = adoption.next();
    CHECK(std::vector<Key>(rest.begin(), rest.end()) ==
          std::vector<Key>{Adoption::kSlice + 1, Adoption::kSlice + 3});
    CHECK_FALSE(adoption.is_active());
  }

  TEST_CASE("one that was removed and stored again is there") {
    Adoption adoption;
    adoption.begin({1, 2});
    const std::vector<Key> both = {1, 2};
    adoption.removed(both);
    adoption.stored(std::vector<Key>{2});

    const auto rest = adoption.next();

    CHECK(std::vector<Key>(rest.begin(), rest.end()) == std::vector<Key>{2});
  }

  TEST_CASE("after stop() nothing is left, and what is removed then is not remembered") {
    Adoption adoption;
    adoption.begin({1, 2});

    adoption.stop();

    CHECK_FALSE(adoption.is_active());
    adoption.removed(std::vector<Key>{1});
    adoption.begin({1});
    CHECK(adoption.next().size() == 1);
  }
}

}  // namespace
}  // namespace pegaflow::index
