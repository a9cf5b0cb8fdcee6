#include "engine/pool_cut.h"

#include <doctest/doctest.h>

#include "base/page_layout.h"
#include "tests/unit/engine/store_fixture.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kPool = 64 * 4096;

struct Fixture {
  Fixture() {
    auto made = PoolCut::create({.pool_bytes = kPool}, clock);
    REQUIRE(made);
    cut = std::move(*made);
    space = cut->store().make_space();
  }
  ManualClock clock;
  std::unique_ptr<PoolCut> cut;
  SpaceId space{};
};

TEST_SUITE("PoolCut") {
  TEST_CASE("the first instance sets the size, in slots of 4 KiB steps") {
    Fixture f;
    CHECK(f.cut->slot_bytes() == 0);
    CHECK(f.cut->store().slot_count() == 0);
    CHECK(f.cut->enter(1, 5000) == PoolCut::Answer::kServed);
    CHECK(f.cut->slot_bytes() == 8192);
    CHECK(f.cut->store().slot_count() == 32);
    CHECK(f.cut->enter(2, 8192) == PoolCut::Answer::kServed);
    CHECK(f.cut->cuts() == 1);
    CHECK_FALSE(f.cut->is_waiting());
  }

  TEST_CASE("a pool or a page that cannot be cut is refused") {
    const ManualClock clock;
    CHECK(PoolCut::create({.pool_bytes = 4095}, clock).error().code == Errc::kInvalidArgument);
    CHECK(PoolCut::create({.pool_bytes = 4096, .store = {.slice_blocks = 0}}, clock).error().code ==
          Errc::kInvalidArgument);
    Fixture f;
    CHECK(f.cut->enter(1, 0).error().code == Errc::kInvalidArgument);
    CHECK(f.cut->enter(1, kPool + 1).error().code == Errc::kRefused);
    CHECK(f.cut->enter(1, kMaxPageBytes + 1).error().code == Errc::kRefused);
    CHECK_FALSE(f.cut->is_served(1));
    REQUIRE(f.cut->enter(1, kPool));
    CHECK(f.cut->enter(1, kPool).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("another size waits until nobody of the old one is connected") {
    Fixture f;
    REQUIRE(f.cut->enter(1, 4096));
    CHECK(f.cut->enter(2, 8192) == PoolCut::Answer::kWaiting);
    CHECK(f.cut->is_waiting());
    CHECK_FALSE(f.cut->is_served(2));
    CHECK_FALSE(f.cut->settle());
    f.cut->leave(1);
    CHECK(f.cut->settle());
    CHECK(f.cut->is_served(2));
    CHECK(f.cut->slot_bytes() == 8192);
    CHECK(f.cut->store().slot_count() == 32);
    CHECK_FALSE(f.cut->settle());
  }

  TEST_CASE("it waits for the last page that somebody may touch") {
    Fixture f;
    REQUIRE(f.cut->enter(1, 4096));
    BlockStore& store = f.cut->store();
    const HolderId holder = store.add_holder(1, testing::kProcess);
    REQUIRE(store.reserve(holder, f.space, testing::job(1), testing::keys(0, 2)));
    store.holder_lost(holder);
    f.cut->leave(1);
    CHECK(f.cut->enter(2, 8192) == PoolCut::Answer::kWaiting);
    CHECK_FALSE(f.cut->settle());
    store.holder_gone(holder);
    CHECK(f.cut->settle());
    CHECK(f.cut->is_served(2));
  }

  TEST_CASE("with nobody waiting the blocks stay, and an engine that starts again finds them") {
    Fixture f;
    REQUIRE(f.cut->enter(1, 4096));
    BlockStore& store = f.cut->store();
    const HolderId holder = store.add_holder(1, testing::kProcess);
    REQUIRE(store.reserve(holder, f.space, testing::job(1), testing::keys(0, 2)));
    REQUIRE(store.publish(holder, testing::job(1)) == 0);
    store.holder_gone(holder);
    f.cut->leave(1);
    f.cut->leave(1);
    CHECK_FALSE(f.cut->settle());
    CHECK(f.cut->enter(2, 4096) == PoolCut::Answer::kServed);
    CHECK(store.lookup(f.space, testing::keys(0, 2)) == 2);

    f.cut->leave(2);
    CHECK(f.cut->enter(3, 8192) == PoolCut::Answer::kServed);
    CHECK(store.lookup(f.space, testing::keys(0, 2)) == 0);
  }

  TEST_CASE("of those that wait the first is served") {
    Fixture f;
    REQUIRE(f.cut->enter(1, 4096));
    REQUIRE(f.cut->enter(2, 8192));
    REQUIRE(f.cut->enter(3, 12288));
    REQUIRE(f.cut->enter(4, 8000));
    f.cut->leave(1);
    REQUIRE(f.cut->settle());
    CHECK(f.cut->is_served(2));
    CHECK_FALSE(f.cut->is_served(3));
    CHECK(f.cut->is_served(4));
    CHECK(f.cut->is_waiting());
    f.cut->leave(3);
    CHECK_FALSE(f.cut->is_waiting());
  }
}

}  // namespace
}  // namespace pegaflow
