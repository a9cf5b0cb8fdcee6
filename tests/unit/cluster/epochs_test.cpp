#include "cluster/epochs.h"

#include <doctest/doctest.h>

namespace pegaflow::cluster {
namespace {

Bytes32 space(std::size_t number) {
  Bytes32 name{};
  name[0] = static_cast<std::byte>(number);
  name[1] = static_cast<std::byte>(number >> 8);
  return name;
}

TEST_SUITE("Epochs") {
  TEST_CASE("the newer epoch stays, by its counter and then by its id") {
    int news = 0;
    Epochs epochs([&]() { ++news; });
    CHECK(epochs.of(space(1)).is_zero());
    CHECK(epochs.learn(space(1), {.counter = 5, .id = 7}));
    CHECK_FALSE(epochs.learn(space(1), {.counter = 5, .id = 7}));
    CHECK_FALSE(epochs.learn(space(1), {.counter = 4, .id = 9}));
    CHECK(epochs.learn(space(1), {.counter = 5, .id = 8}));
    CHECK(epochs.of(space(1)) == Epoch{5, 8});
    CHECK(epochs.of(space(2)).is_zero());
    CHECK(news == 2);
  }

  TEST_CASE("two nodes that reset at once agree, whichever learns first") {
    Epochs one({}, [](const Epoch& known) { return Epoch{known.counter + 1, 1}; });
    Epochs two({}, [](const Epoch& known) { return Epoch{known.counter + 1, 2}; });
    const Epoch by_one = one.raise(space(1)).value();
    const Epoch by_two = two.raise(space(1)).value();
    one.learn(space(1), by_two);
    two.learn(space(1), by_one);
    CHECK(one.of(space(1)) == by_two);
    CHECK(two.of(space(1)) == by_two);
  }

  TEST_CASE("a reset is newer than all known epochs, and than those before a restart") {
    Epochs former;
    const Epoch before = former.raise(space(1)).value();
    CHECK(former.raise(space(1)) > before);
    Epochs forgetful;
    CHECK(forgetful.raise(space(1)) > before);
  }

  TEST_CASE("a full table discards too many blocks and never too few") {
    Epochs epochs({}, {}, 4);
    for (std::uint64_t i = 1; i <= 6; ++i) epochs.learn(space(i), {.counter = 10 * i, .id = i});
    CHECK(epochs.size() == 4);
    for (std::uint64_t i = 1; i <= 6; ++i) CHECK(epochs.of(space(i)) >= Epoch{10 * i, i});
    // What gave way is the epoch of all others.
    CHECK(epochs.of(space(99)) == Epoch{20, 2});
    CHECK_FALSE(epochs.learn(space(99), {.counter = 15, .id = 1}));
    CHECK(epochs.raise(space(99)) > Epoch{20, 2});
  }

  TEST_CASE("the known epochs of one node bring another one up to date") {
    Epochs full({}, {}, 2);
    for (std::uint64_t i = 1; i <= 4; ++i) full.learn(space(i), {.counter = i, .id = i});
    int news = 0;
    Epochs other([&]() { ++news; });
    other.learn(space(4), {.counter = 9, .id = 9});
    other.learn(full.known());
    full.learn(other.known());
    for (std::uint64_t i = 1; i <= 5; ++i) CHECK(other.of(space(i)) == full.of(space(i)));
    CHECK(other.of(space(4)) == Epoch{9, 9});
    CHECK(news == 2);
  }

  TEST_CASE("of two full tables the newest epochs stay, and the floor rises once") {
    constexpr std::uint64_t kMany = Epochs::kMaxSpaces;
    int news = 0;
    Epochs old([&]() { ++news; });
    Epochs recent;
    for (std::uint64_t i = 0; i < kMany; ++i) {
      old.learn(space(i), {.counter = 1000 + i, .id = 1});
      recent.learn(space(kMany + i), {.counter = 5000 + i, .id = 1});
    }
    news = 0;
    old.learn(recent.known());
    CHECK(news == 1);
    CHECK(old.size() == kMany);
    CHECK(old.known().floor == Epoch{1000 + kMany - 1, 1});
    for (std::uint64_t i = 0; i < kMany; ++i) {
      REQUIRE(old.of(space(i)) == old.known().floor);
      REQUIRE(old.of(space(kMany + i)) == Epoch{5000 + i, 1});
    }
  }

  TEST_CASE("a reset without an epoch above the known one is reported") {
    int news = 0;
    Epochs epochs([&]() { ++news; });
    const Epoch last{.counter = Epoch::kEnd - 1, .id = ~std::uint64_t{0}};
    REQUIRE(epochs.learn(space(1), last));
    CHECK_FALSE(epochs.raise(space(1)));
    CHECK(epochs.of(space(1)) == last);
    CHECK(news == 1);
    CHECK(epochs.raise(space(2)));
  }

  TEST_CASE("two names of one namespace have one epoch, the newest of both") {
    int news = 0;
    Epochs epochs([&]() { ++news; });
    epochs.learn(space(1), {.counter = 2, .id = 1});
    epochs.learn(space(2), {.counter = 5, .id = 1});
    epochs.alias(space(2), space(1));
    CHECK(epochs.of(space(1)) == Epoch{5, 1});
    CHECK(epochs.size() == 1);
    CHECK(news == 3);
    epochs.alias(space(3), space(1));
    epochs.alias(space(2), space(1));
    CHECK(news == 3);
    CHECK(epochs.of(space(3)) == Epoch{5, 1});

    CHECK(epochs.learn(space(3), {.counter = 7, .id = 1}));
    CHECK_FALSE(epochs.learn(space(2), {.counter = 6, .id = 1}));
    const Epoch raised = epochs.raise(space(1)).value();
    for (const std::size_t name : {1, 2, 3}) CHECK(epochs.of(space(name)) == raised);
    CHECK(epochs.size() == 1);
  }

  TEST_CASE("a name keeps its epoch when it stops to be that of another") {
    Epochs epochs;
    epochs.alias(space(2), space(1));
    epochs.learn(space(1), {.counter = 5, .id = 1});
    epochs.alias(space(2), space(3));  // The same kind beside another kind 0.
    CHECK(epochs.of(space(3)) == Epoch{5, 1});
    epochs.learn(space(3), {.counter = 6, .id = 1});
    CHECK(epochs.of(space(1)) == Epoch{5, 1});
    epochs.forget_alias(space(2));
    epochs.learn(space(3), {.counter = 7, .id = 1});
    CHECK(epochs.of(space(2)) == Epoch{6, 1});
    epochs.forget_alias(space(9));
    CHECK(epochs.of(space(9)).is_zero());
  }
}

}  // namespace
}  // namespace pegaflow::cluster
