// Blocks whose bytes turned out to be wrong: BlockStore::invalidate().
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::code_of;
using testing::job;
using testing::keys;
using testing::StoreFixture;
using testing::token;

TEST_SUITE("BlockStore, wrong bytes") {
  TEST_CASE("an invalidated block is a miss, and its frame is freed with its last pin") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 4));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 4), token(1)) == 4);
    REQUIRE(f.store->claim(f.other, f.space, keys(0, 4), token(2)) == 4);
    REQUIRE(f.store->open(f.holder, token(1), 1, 3, PinId{1}));

    CHECK(f.store->invalidate(f.holder, PinId{1}, 1) == true);  // The third block.

    CHECK(f.store->invalidate(f.holder, PinId{1}, 1) == false);
    CHECK(f.store->lookup(f.space, keys(0, 4)) == 2);
    CHECK(f.store->stats().invalidated == 1);
    CHECK(f.store->stats().sealed == 4);
    // A claim that was made before cannot be opened there, but elsewhere.
    CHECK(code_of(f.store->open(f.other, token(2), 0, 4, PinId{1})) == Errc::kGone);
    CHECK(f.store->open(f.other, token(2), 0, 2, PinId{1}));
    // A repeated open returns the same.
    CHECK(f.store->open(f.holder, token(1), 1, 3, PinId{1}).value().frames.size() == 3);
    CHECK(f.store->check());

    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->stats().sealed == 4);
    f.store->unclaim(f.other, token(2));
    CHECK(f.store->stats().sealed == 3);
    CHECK(f.free() == 5);
  }

  TEST_CASE("its key may be saved again at once, into another frame") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage, .instance_share = 1, .server_share = 1});
    const auto old = f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 0) == true);

    const auto fresh = f.save(keys(0, 1));

    CHECK(fresh[0] != old[0]);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK(f.store->stats().sealed == 2);
  }

  TEST_CASE("a block of a retired generation is counted once") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 1));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)) == 1);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    f.store->retire_space(f.space);
    f.store->release(f.holder, PinId{1});
    while (f.store->work()) {
    }
    CHECK(f.free() == 8);
    CHECK(f.store->stats().invalidated == 1);
    CHECK(f.store->stats().retired == 0);
  }

  TEST_CASE("without that pin, or beyond it, nothing is invalidated") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    CHECK(code_of(f.store->invalidate(f.holder, PinId{2}, 0)) == Errc::kGone);
    CHECK(code_of(f.store->invalidate(f.other, PinId{1}, 0)) == Errc::kGone);
    CHECK(code_of(f.store->invalidate(f.holder, PinId{1}, 2)) == Errc::kInvalidArgument);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
  }

  TEST_CASE("the frames of a job are known until it is published or forgotten") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    const auto frames = f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 3));
    REQUIRE(frames);
    const auto known = f.store->frames_of(f.holder, job(1));
    CHECK(std::vector<FrameIndex>(known.begin(), known.end()) == *frames);
    CHECK(f.store->frames_of(f.other, job(1)).empty());
    CHECK(f.store->frames_of(f.holder, job(2)).empty());
    f.store->retire_space(f.space);
    CHECK(f.store->frames_of(f.holder, job(1)).empty());
    f.store->abandon(f.holder, job(1));
  }
}

}  // namespace
}  // namespace pegaflow::engine
