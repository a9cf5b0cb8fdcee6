// Blocks of different sizes in one pool.
#include <algorithm>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::code_of;
using testing::job;
using testing::keys;
using testing::kPage;
using testing::StoreFixture;
using testing::token;

TEST_SUITE("BlockStore, shapes and extents") {
  TEST_CASE("invalid shapes and shapes beyond the pool are rejected") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const auto code = [&](const Shape& shape) { return code_of(f.store->add_shape(shape)); };
    CHECK(code({}) == Errc::kInvalidArgument);
    CHECK(code({{{.page_bytes = 0}}}) == Errc::kInvalidArgument);
    CHECK(code({std::vector<Shape::Shard>(kMaxShards + 1, {.page_bytes = 1})}) ==
          Errc::kInvalidArgument);
    CHECK(code({{{.page_bytes = (std::uint64_t{1} << 30) + 1}}}) == Errc::kRefused);
    CHECK(code({{{.page_bytes = 65 * kPage}}}) == Errc::kRefused);
    CHECK(code({{{.page_bytes = 40 * kPage}, {.page_bytes = 40 * kPage}}}) == Errc::kRefused);
    CHECK(f.store->add_shape({{{.page_bytes = 64 * kPage}}}));
    CHECK(f.add_shape(kPage) == f.shape);  // An equal shape is the same.
  }

  TEST_CASE("at most 256 shapes") {
    StoreFixture f({.pool_bytes = 1024 * kPage});
    for (std::uint64_t pages = 2; pages <= 256; ++pages) f.add_shape(pages * kPage);
    CHECK(code_of(f.store->add_shape({{{.page_bytes = 300 * kPage}}})) == Errc::kBusy);
    CHECK(f.store->add_shape({{{.page_bytes = kPage}}}));
  }

  TEST_CASE("a shape ends with its last user, generation and block, and its memory with it") {
    StoreFixture f({.pool_bytes = 4096 * kPage});
    const ShapeId odd = f.add_shape(3 * kPage);
    CHECK(f.add_shape(3 * kPage) == odd);  // Its second user.
    while (f.store->work()) {
    }
    const SpaceId space = f.space = f.store->make_space(odd);
    const std::uint64_t with_it = f.store->memory_bytes();
    const std::size_t shapes = f.store->shapes().size();
    REQUIRE(f.save(keys(0, 5)).size() == 5);

    f.store->leave_shape(odd);
    f.store->retire_space(space);
    while (f.store->work()) {
    }
    CHECK_FALSE(f.store->has_blocks(odd));
    CHECK(f.store->shapes().size() == shapes);  // It has a user.

    f.store->leave_shape(odd);
    CHECK(f.store->has_work());
    while (f.store->work()) {
    }
    CHECK(f.store->shapes().size() == shapes - 1);
    CHECK(f.store->memory_bytes() < with_it);
    CHECK(f.store->check());
  }

  TEST_CASE("a shape that is left stays until its last pinned block is released") {
    StoreFixture f({.pool_bytes = 4096 * kPage});
    const ShapeId odd = f.add_shape(3 * kPage);
    f.space = f.store->make_space(odd);
    REQUIRE(f.save(keys(0, 5)).size() == 5);
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 5), token(1)) == 5);
    REQUIRE(f.store->open(f.holder, token(1), 0, 5, PinId{1}));

    f.store->leave_shape(odd);
    f.store->retire_space(f.space);
    while (f.store->work()) {
    }
    CHECK(f.store->has_blocks(odd));

    f.store->release(f.holder, PinId{1});
    while (f.store->work()) {
    }
    CHECK(f.store->shapes().size() == 1);
    CHECK(f.store->check());
  }

  TEST_CASE("after 256 shapes have ended another is made, in their places") {
    StoreFixture f({.pool_bytes = 1024 * kPage});
    for (std::uint64_t pages = 2; pages <= 1000; ++pages) {
      const auto added = f.store->add_shape({{{.page_bytes = pages * kPage}}});
      REQUIRE(added);
      CHECK(static_cast<std::uint32_t>(*added) < 512);
      f.space = f.store->make_space(*added);
      f.store->retire_space(f.space);
      f.store->leave_shape(*added);
      f.store->work();
    }
    while (f.store->work()) {
    }
    CHECK(f.store->shapes().size() == 1);
  }

  TEST_CASE("the pages of a block lie one behind the other, and no two blocks overlap") {
    StoreFixture f({.pool_bytes = 1000 * kPage});
    const Shape shape{{{.page_bytes = 5000}, {.page_bytes = 100}, {.page_bytes = 3 * kPage}}};
    f.space = f.store->make_space(*f.store->add_shape(shape));
    std::set<std::uint64_t> begins;
    std::uint64_t end = 0;
    f.store->set_shard(f.holder, 0, 1);
    for (const FrameIndex frame : f.save(keys(0, 150))) {
      const std::uint64_t begin = f.store->page_offset(frame, 0);
      CHECK(f.store->page_offset(frame, 1) == begin + 2 * kPage);
      CHECK(f.store->page_offset(frame, 2) == begin + 3 * kPage);
      CHECK(f.store->page_bytes(frame, 2) == 3 * kPage);
      for (std::uint64_t page = 0; page < 6; ++page) {
        CHECK(begins.insert(begin + page * kPage).second);
      }
      end = std::max(end, begin + 6 * kPage);
    }
    CHECK(end <= 1000 * kPage);
  }

  TEST_CASE("an engine alone gets the whole pool, except for 6 percent at most") {
    for (const std::uint64_t pages : {1, 2, 3, 7, 13, 64, 100, 999}) {
      StoreFixture f({.pool_bytes = 2000 * kPage, .instance_share = 1, .server_share = 1});
      const ShapeId shape = f.add_shape(pages * kPage);
      f.space = f.store->make_space(shape);
      const auto frames = f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2000));
      REQUIRE(frames);
      const auto got = static_cast<std::uint64_t>(std::count_if(
          frames->begin(), frames->end(), [](FrameIndex s) { return s != kNoFrame; }));
      INFO(pages, " pages a block: ", got, " blocks");
      CHECK(got * pages >= 2000 * 94 / 100 - pages);
    }
  }

  TEST_CASE("blocks of another size take the extents unused for longest, and then stop taking") {
    StoreFixture f({.pool_bytes = 256 * kPage});  // 64 units of 4 pages.
    const SpaceId old_space = f.space;
    f.save(keys(0, 256));
    const SpaceId young = f.store->make_space(f.add_shape(2 * kPage));
    f.space = young;
    for (std::uint64_t i = 0; i < 16; ++i) f.save(keys(1000 + 4 * i, 4));
    // Nothing of its own is evicted: all that it ever saved is present.
    CHECK(f.store->lookup(young, keys(1000, 64)) == 64);
    CHECK(f.store->stats().extents_taken == 32);
    CHECK(f.store->stats().evictions == 128);
    // A chain becomes evictable last block first, so its end was evicted first.
    CHECK(f.store->lookup(old_space, keys(0, 256)) == 128);
  }

  TEST_CASE(
      "an extent stays that is unused no longer than the block that would be evicted instead") {
    StoreFixture f({.pool_bytes = 256 * kPage});  // 64 units of 4 pages.
    const SpaceId small = f.space;
    const SpaceId large = f.store->make_space(f.add_shape(2 * kPage));
    const auto save_in = [&](SpaceId space, std::uint64_t first, std::uint64_t count) {
      f.space = space;
      f.save(keys(first, count));
    };
    // The first extent's blocks become evictable two before and two after the large one: as old on
    // average.
    save_in(small, 0, 2);
    save_in(large, 0, 1);
    save_in(small, 2, 2);
    save_in(large, 1, 1);
    save_in(small, 4, 62 * 4);

    save_in(large, 2, 1);

    CHECK(f.store->stats().extents_taken == 0);
    CHECK(f.store->stats().evictions == 1);
    CHECK(f.store->lookup(large, keys(0, 1)) == 0);
    CHECK(f.store->lookup(large, keys(1, 2)) == 2);
    CHECK(f.store->lookup(small, keys(0, 252)) == 252);
  }

  TEST_CASE("for a block on two NUMA nodes the younger extent decides") {
    for (const std::uint32_t younger : {0U, 1U}) {
      CAPTURE(younger);
      StoreFixture f({.pool_bytes = 256 * kPage, .numa_nodes = 2});  // 32 units of 4 pages on each.
      const auto space_on = [&](const std::vector<std::uint32_t>& nodes) {
        Shape shape;
        for (const std::uint32_t node : nodes) {
          shape.shards.push_back({.page_bytes = kPage, .numa_node = node});
        }
        const auto added = f.store->add_shape(shape);
        REQUIRE(added);
        return f.store->make_space(*added);
      };
      const SpaceId both = space_on({0, 1});
      const SpaceId old_space = space_on({1 - younger});
      const SpaceId young = space_on({younger});
      while (f.store->work()) {
      }
      const auto save_in = [&](SpaceId space, std::uint64_t first, std::uint64_t count) {
        f.space = space;
        f.save(keys(first, count));
      };
      save_in(old_space, 0, 31 * 4);
      save_in(both, 0, 4);
      save_in(young, 0, 31 * 4);

      save_in(both, 4, 1);

      CHECK(f.store->stats().extents_taken == 0);
      CHECK(f.store->stats().evictions == 1);
      CHECK(f.store->lookup(old_space, keys(0, 124)) == 124);
      CHECK(f.store->lookup(young, keys(0, 124)) == 124);
    }
  }

  TEST_CASE("an extent with a pinned block stays where it is") {
    StoreFixture f({.pool_bytes = 256 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 256));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 256), token(1)) == 256);
    REQUIRE(f.store->open(f.holder, token(1), 0, 256, PinId{1}));
    f.store->unclaim(f.holder, token(1));
    f.space = f.store->make_space(f.add_shape(2 * kPage));

    const auto none = f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2));
    CHECK(none->front() == kNoFrame);
    f.store->release(f.holder, PinId{1});
    while (f.store->work()) {
    }
    CHECK(f.store->reserve(f.holder, f.space, job(2), 0, keys(0, 2))->front() != kNoFrame);
  }

  TEST_CASE("blocks in a leaving extent are no longer found, and their keys can be saved again") {
    StoreFixture f({.pool_bytes = 256 * kPage, .slice_blocks = 1});
    const SpaceId old_space = f.space;
    f.save(keys(0, 256));
    while (f.store->work()) {
    }
    f.space = f.store->make_space(f.add_shape(64 * kPage));
    // One step a call: the leaving extents take a while.
    CHECK(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 1))->front() == kNoFrame);
    CHECK(f.store->has_work());
    const std::size_t found = f.store->lookup(old_space, keys(0, 256));
    CHECK(found < 256);
    const auto again = f.store->reserve(f.holder, old_space, job(2), 0, keys(found, 1));
    REQUIRE(again);
    CHECK(f.store->check());
    while (f.store->work()) {
    }
    CHECK(f.store->reserve(f.holder, f.space, job(3), 0, keys(0, 1))->front() != kNoFrame);
  }

  TEST_CASE("a caller that can wait gets the room that an exchange makes, in slices") {
    StoreFixture f({.pool_bytes = 256 * kPage, .slice_blocks = 8});  // 64 units of 4 pages.
    f.save(keys(0, 256));
    while (f.store->work()) {
    }
    f.space = f.store->make_space(f.add_shape(64 * kPage));
    const auto ask = [&](std::uint64_t first, std::uint64_t count) {
      const auto frames = f.store->reserve(f.holder, f.space, job(1), 0, keys(first, count),
                                           BlockStore::NoRoom::kStop);
      REQUIRE(frames);
      return *frames;
    };

    // The first two blocks take 16 units each, with four small blocks in each of them.
    std::size_t got = 0;
    std::size_t turns = 0;
    for (; got < 2; ++turns) {
      REQUIRE(turns < 100);
      const std::uint64_t before = f.store->stats().evictions;
      for (const FrameIndex frame : ask(got, 2 - got)) {
        CHECK(frame != kNoFrame);
        ++got;
      }
      CHECK(f.store->stats().evictions - before <= 8);
      CHECK(f.store->check());
    }
    CHECK(turns >= 2 * 64 / 8);
    CHECK(f.store->stats().skipped_no_room == 0);
    CHECK(f.store->publish(f.holder, job(1)) == 0);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
  }

  TEST_CASE("where no exchange makes room, no caller waits for it") {
    StoreFixture f({.pool_bytes = 64 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 64));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 64), token(1)) == 64);
    REQUIRE(f.store->open(f.holder, token(1), 0, 64, PinId{1}));
    const auto frames =
        f.store->reserve(f.holder, f.space, job(1), 0, keys(100, 2), BlockStore::NoRoom::kStop);
    CHECK(*frames == std::vector<FrameIndex>(2, kNoFrame));
  }

  TEST_CASE("each page has a number of its own, without gaps within an extent") {
    StoreFixture f({.pool_bytes = 1024 * kPage, .numa_nodes = 2});
    // On one NUMA node a page of 5 x 4 KiB, on the other two of 4 KiB; and blocks of one small
    // page.
    const Shape shape{{{.page_bytes = kPage, .numa_node = 1},
                       {.page_bytes = 5 * kPage, .numa_node = 0},
                       {.page_bytes = 100, .numa_node = 1}}};
    std::set<std::uint32_t> numbers;
    const auto add = [&](FrameIndex frame, std::uint32_t shards) {
      for (std::uint32_t shard = 0; shard < shards; ++shard) {
        const std::uint32_t number = f.store->page_number(frame, shard);
        CHECK(number < 1024);
        CHECK(numbers.insert(number).second);
        // Not before the extent that the page lies in.
        CHECK(number <= f.store->page_offset(frame, shard) / kPage);
      }
    };
    for (const FrameIndex frame : f.save(keys(0, 100))) add(frame, 1);
    f.space = f.store->make_space(*f.store->add_shape(shape));
    f.store->set_shard(f.holder, 0, 1);
    const auto frames = f.save(keys(0, 3));
    for (const FrameIndex frame : frames) add(frame, 3);
    CHECK(f.store->page_number(frames[1], 1) == f.store->page_number(frames[0], 1) + 1);
    CHECK(f.store->page_number(frames[0], 2) == f.store->page_number(frames[0], 0) + 1);
    CHECK(f.store->page_number(frames[1], 0) == f.store->page_number(frames[0], 0) + 2);
  }

  TEST_CASE("a reserve visits no more units when another NUMA node has free ones") {
    // 2,048 units on each NUMA node.
    constexpr std::uint64_t kUnits = 4096;
    const auto steps_of_a_save = [&](std::uint32_t nodes) {
      const std::uint64_t pool = kUnits * (std::uint64_t{64} << 20);
      constexpr std::uint64_t kLargePage = std::uint64_t{32} << 20;  // 2 frames a unit.
      StoreFixture f({.pool_bytes = nodes * pool / 2, .numa_nodes = nodes, .server_share = 1.0});
      f.space = f.store->make_space(f.add_shape(kLargePage));
      f.save(keys(0, kUnits));  // All of NUMA node 0.
      const std::uint64_t before = f.store->stats().unit_steps;
      f.save(keys(10'000, 256));
      CHECK(f.store->stats().evictions == 256);
      return f.store->stats().unit_steps - before;
    };

    const std::uint64_t one = steps_of_a_save(1);
    const std::uint64_t two = steps_of_a_save(2);

    CHECK(two <= one + one / 4);
    CHECK(two <= 256 * 40);
  }

  TEST_CASE("free units too few for a block cost a reserve no walk over the pool") {
    // Blocks of a unit and a half in extents of three units; one unit stays free at the end.
    constexpr std::uint64_t kUnit = std::uint64_t{64} << 20;
    constexpr std::uint64_t kUnits = 3 * 1000 + 1;
    StoreFixture f({.pool_bytes = kUnits * kUnit, .server_share = 1.0});
    f.space = f.store->make_space(f.add_shape(kUnit * 3 / 2));
    f.save(keys(0, 2000));
    CHECK(f.store->stats().free_units == 1);
    const std::uint64_t before = f.store->stats().unit_steps;

    f.save(keys(10'000, 256));

    CHECK(f.store->stats().evictions == 256);
    CHECK(f.store->stats().unit_steps - before <= 256 * 60);
  }

  TEST_CASE(
      "beside a second shape a reserve searches a part of a large pool, and all parts in turn") {
    // A block is a unit: 8,192 of them, one half for each shape.
    constexpr std::uint64_t kUnit = std::uint64_t{64} << 20;
    constexpr std::uint64_t kUnits = 8192;
    StoreFixture f({.pool_bytes = kUnits * kUnit, .server_share = 1.0});
    f.space = f.store->make_space(f.add_shape(kUnit - kPage));
    f.save(keys(0, kUnits / 2));
    f.space = f.store->make_space(f.add_shape(kUnit));
    f.save(keys(100'000, kUnits / 2));
    const auto steps_of_a_save = [&](std::uint64_t number) {
      const std::uint64_t before = f.store->stats().unit_steps;
      f.save(keys(200'000 + number, 1));
      return f.store->stats().unit_steps - before;
    };

    // The rival's blocks are the oldest, wherever they lie: each save replaces one of them.
    for (std::uint64_t save = 0; save < 200; ++save) REQUIRE(steps_of_a_save(save) <= 600);

    CHECK(f.store->stats().extents_taken > 50);
  }

  TEST_CASE("pages lie on the NUMA node that their shard names") {
    StoreFixture f({.pool_bytes = 256 * kPage, .numa_nodes = 2});
    const Shape shape{
        {{.page_bytes = kPage, .numa_node = 1}, {.page_bytes = 2 * kPage, .numa_node = 0}}};
    f.space = f.store->make_space(*f.store->add_shape(shape));
    for (const FrameIndex frame : f.save(keys(0, 60))) {
      CHECK(f.store->page_offset(frame, 0) >= 128 * kPage);
      CHECK(f.store->page_offset(frame, 1) < 128 * kPage);
    }
    // Evicted on the same NUMA node: free memory of the other one is of no use.
    f.save(keys(100, 60));
    CHECK(f.store->stats().evictions != 0);
  }
}

}  // namespace
}  // namespace pegaflow::engine
