#include "engine/block_store.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <set>

#include <sys/resource.h>
#include <unistd.h>

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

/// While it lives the process may map 4 GiB more than now, and no table of 64 GiB.
class LittleMemory {
 public:
  LittleMemory() {
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    REQUIRE(::getrlimit(RLIMIT_AS, &before_) == 0);
    rlimit tight = before_;
    tight.rlim_cur = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + (4ULL << 30);
    REQUIRE(::setrlimit(RLIMIT_AS, &tight) == 0);
  }
  ~LittleMemory() { CHECK(::setrlimit(RLIMIT_AS, &before_) == 0); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  rlimit before_{};
};

TEST_SUITE("BlockStore, made") {
  TEST_CASE("options out of their range are rejected") {
    const ManualClock clock;
    const auto refused = [&](auto&& change) {
      BlockStore::Options options{.pool_bytes = 8 * kPage};
      change(options);
      return code_of(BlockStore::create(options, clock)) == Errc::kInvalidArgument;
    };
    CHECK(refused([](auto& o) { o.pool_bytes = kPage - 1; }));
    CHECK(refused([](auto& o) { o.pool_bytes = (std::uint64_t{1} << 43) + kPage; }));
    CHECK(refused([](auto& o) { o.numa_nodes = 0; }));
    CHECK(refused([](auto& o) { o.numa_nodes = kMaxNumaNodes + 1; }));
    CHECK(refused([](auto& o) { o.instance_share = 0; }));
    CHECK(refused([](auto& o) { o.instance_share = 1.01; }));
    CHECK(refused([](auto& o) { o.server_share = -0.5; }));
    CHECK(refused([](auto& o) { o.reservation_timeout = Duration::zero(); }));
    CHECK(refused([](auto& o) { o.claim_grace = -std::chrono::seconds(1); }));
    CHECK(refused([](auto& o) { o.slice_blocks = 0; }));
    CHECK(refused([](auto& o) { o.max_claims = 0; }));
    CHECK(refused([](auto& o) { o.max_pins = 0; }));
    CHECK(refused([](auto& o) { o.max_pins = 1U << 25U; }));
    CHECK(refused([](auto& o) { o.max_reservations = 0; }));
    CHECK(refused([](auto& o) { o.fetch_share = 1.01; }));
    CHECK(refused([](auto& o) { o.save_reserve = -0.1; }));
    CHECK(refused([](auto& o) { o.lend_share = 2; }));
    CHECK(refused([](auto& o) { o.longest_lease = Duration::zero(); }));
    CHECK(refused([](auto& o) { o.lease_margin = -std::chrono::seconds(1); }));
    CHECK(refused([](auto& o) { o.max_leases = 0; }));
    CHECK(refused([](auto& o) { o.max_leases = (1U << 20U) + 1; }));
    CHECK(refused([](auto& o) { o.max_pins = (1U << 25U) - 1 - o.max_claims; }));
  }

  TEST_CASE("without memory for a table it returns an error, and keeps its other tables") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    const auto large = BlockStore::create({.pool_bytes = std::uint64_t{1} << 42}, f.clock);
    REQUIRE(large);
    std::optional<LittleMemory> little(std::in_place);
    const auto store = BlockStore::create({.pool_bytes = std::uint64_t{1} << 42}, f.clock);
    const auto shape = (*large)->add_shape({{{.page_bytes = kPage}}});
    little.reset();
    CHECK(code_of(store) == Errc::kOutOfCapacity);
    CHECK(code_of(shape) == Errc::kOutOfCapacity);
    CHECK((*large)->add_shape({{{.page_bytes = 1 << 20}}}));
  }

  TEST_CASE("a million blocks cost less than 128 bytes each, claimed, pinned or not") {
    StoreFixture f({.pool_bytes = 1'000'000 * kPage, .instance_share = 1, .server_share = 1});
    CHECK(f.store->memory_bytes() < 128'000'000 / 16 * 15);
    const auto all = keys(0, 100'000);
    f.save(all);
    REQUIRE(f.store->claim(f.holder, f.space, all, token(1)) == 100'000);
    REQUIRE(f.store->open(f.holder, token(1), 0, 100'000, PinId{1}));
    CHECK(f.store->memory_bytes() < 128'000'000);
  }
}

TEST_SUITE("BlockStore, written") {
  TEST_CASE("a block is found once it is published, and not before") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    const auto chain = keys(0, 4);
    const auto frames = f.store->reserve(f.holder, f.space, job(1), 0, chain);
    REQUIRE(frames);
    CHECK(std::set<FrameIndex>(frames->begin(), frames->end()).size() == 4);
    CHECK(f.store->lookup(f.space, chain) == 0);

    CHECK(f.store->publish(f.holder, job(1)) == 0);

    CHECK(f.store->lookup(f.space, chain) == 4);
    CHECK(f.store->lookup(f.space, keys(0, 6)) == 4);
    CHECK(f.store->stats().insertions == 4);
    CHECK(f.store->stats().lookup_hits == 8);
    CHECK(f.store->stats().lookup_misses == 6);
  }

  TEST_CASE("a lookup may skip a hole that hashes like a block; its end and a claim do not") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    const auto chain = keys(0, 3);
    f.save({chain[0], chain[2]});
    // The store's hash reads the first 16 bytes only.
    BlockKey like_first = chain[0];
    like_first.bytes[31] = std::byte{1};
    CHECK(f.store->lookup(f.space, std::vector{like_first}) == 0);
    CHECK(f.store->lookup(f.space, std::vector{chain[0], like_first}) == 1);
    CHECK(f.store->lookup(f.space, std::vector{chain[0], chain[1], chain[2]}) == 1);
    const std::vector with_hole = {chain[0], like_first, chain[2]};
    CHECK(f.store->lookup(f.space, with_hole) == 3);
    CHECK(f.store->claim(f.holder, f.space, with_hole, token(1)) == 1);
    // Next to a block with its hash, a block that is only being written is missing, too.
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, std::vector{like_first, chain[1]}));
    CHECK(f.store->lookup(f.space, std::vector{like_first}) == 0);
    CHECK(f.store->lookup(f.space, std::vector{chain[0], chain[1], chain[2]}) == 1);
    REQUIRE(f.store->publish(f.holder, job(1)) == 0);
    CHECK(f.store->lookup(f.space, with_hole) == 3);
    CHECK(f.store->claim(f.holder, f.space, with_hole, token(2)) == 3);
  }

  TEST_CASE("a long job is reserved and published in slices, its end first") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 3)));
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(3, 3)));
    CHECK(f.store->publish(f.holder, job(1), 4) == 2);
    CHECK(f.store->lookup(f.space, keys(0, 6)) == 0);
    CHECK(f.store->lookup(f.space, keys(2, 4)) == 4);
    CHECK(f.store->publish(f.holder, job(1), 4) == 0);
    CHECK(f.store->lookup(f.space, keys(0, 6)) == 6);
  }

  TEST_CASE("blocks that are present or being saved are skipped") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 2));
    REQUIRE(f.store->reserve(f.holder, f.space, job(50), 0, keys(2, 1)));
    const auto frames = f.store->reserve(f.other, f.space, job(51), 0, keys(0, 4));
    REQUIRE(frames);
    CHECK((*frames)[0] == kNoFrame);
    CHECK((*frames)[1] == kNoFrame);
    CHECK((*frames)[2] == kNoFrame);
    CHECK((*frames)[3] != kNoFrame);
    CHECK(f.store->stats().skipped_present == 3);
  }

  TEST_CASE("a job without any frame does not exist") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 2));
    REQUIRE(f.store->reserve(f.holder, f.space, job(50), 0, keys(0, 2)));
    CHECK(f.store->stats().reservations == 0);
    CHECK_FALSE(f.store->next_deadline());
    CHECK(code_of(f.store->publish(f.holder, job(50))) == Errc::kGone);
    CHECK(f.store->stats().late_publishes == 0);
  }

  TEST_CASE("when every frame is being written there is no room") {
    StoreFixture f({.pool_bytes = 2 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    const auto frames = f.store->reserve(f.holder, f.space, job(2), 0, keys(5, 1));
    REQUIRE(frames);
    CHECK(frames->front() == kNoFrame);
    CHECK(f.store->stats().skipped_no_room == 1);
  }

  TEST_CASE("an abandoned job leaves nothing behind") {
    StoreFixture f({.pool_bytes = 2 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    f.store->abandon(f.holder, job(1));
    f.store->abandon(f.holder, job(1));
    CHECK(f.free() == 2);
    CHECK(f.store->is_idle());
    f.save(keys(0, 2));
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
  }

  TEST_CASE("a job belongs to its holder and its generation") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    const SpaceId elsewhere = f.store->make_space(f.shape);
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    CHECK(code_of(f.store->reserve(f.other, f.space, job(1), 0, keys(2, 1))) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->reserve(f.holder, elsewhere, job(1), 0, keys(2, 1))) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->publish(f.other, job(1))) == Errc::kGone);
    f.store->abandon(f.other, job(1));
    CHECK(f.store->publish(f.holder, job(1)) == 0);
  }

  TEST_CASE("reserving for an unknown holder or generation, or too many jobs, is rejected") {
    StoreFixture f({.pool_bytes = 8 * kPage, .max_reservations = 1});
    CHECK(code_of(f.store->reserve(HolderId{99}, f.space, job(1), 0, keys(0, 1))) == Errc::kGone);
    CHECK(code_of(f.store->reserve(f.holder, SpaceId{99}, job(1), 0, keys(0, 1))) == Errc::kGone);
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 1)));
    CHECK(code_of(f.store->reserve(f.holder, f.space, job(2), 0, keys(1, 1))) == Errc::kBusy);
    CHECK(f.store->reserve(f.holder, f.space, job(1), 0, keys(1, 1)));
  }
}

TEST_SUITE("BlockStore, quarantined") {
  TEST_CASE("a reservation is forgotten after its timeout, its frames when the writer has ended") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    REQUIRE(f.store->next_deadline() == f.clock.now() + std::chrono::seconds(30));
    f.clock.advance(std::chrono::seconds(29));
    f.store->expire();
    CHECK(f.store->stats().reservations_timed_out == 0);
    f.clock.advance(std::chrono::seconds(1));
    f.store->expire();

    CHECK(f.store->stats().reservations_timed_out == 1);
    CHECK(f.store->stats().quarantined_timeout == 2);
    CHECK_FALSE(f.store->next_deadline());
    CHECK_FALSE(f.store->is_idle());
    // The keys may be reserved at once, in other frames.
    const auto again = f.store->reserve(f.other, f.space, job(2), 0, keys(0, 3));
    REQUIRE(again);
    CHECK((*again)[0] != kNoFrame);
    CHECK((*again)[1] != kNoFrame);
    CHECK((*again)[2] == kNoFrame);

    CHECK(code_of(f.store->reserve(f.holder, f.space, job(1), 0, keys(4, 1))) == Errc::kGone);
    CHECK(code_of(f.store->publish(f.holder, job(1))) == Errc::kGone);
    CHECK(f.store->stats().late_publishes == 1);
    CHECK(f.store->stats().quarantined_timeout == 0);
    CHECK(f.free() == 2);
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 0);
    CHECK(f.store->publish(f.other, job(2)) == 0);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
  }

  TEST_CASE("frames of a lost writer wait until its process is gone") {
    StoreFixture f({.pool_bytes = 2 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    f.store->holder_lost(f.holder);
    f.store->holder_lost(f.holder);
    CHECK(f.store->stats().quarantined_writer_lost == 2);
    const auto none = f.store->reserve(f.other, f.space, job(2), 0, keys(0, 2));
    REQUIRE(none);
    CHECK(none->front() == kNoFrame);

    f.store->holder_gone(f.holder);

    CHECK(f.store->stats().quarantined_writer_lost == 0);
    CHECK(f.free() == 2);
    f.store->holder_gone(f.holder);
    CHECK(f.store->check());
  }

  TEST_CASE("a holder with a pin or a job may access frames, until that is ended") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    f.save(keys(0, 1));
    CHECK_FALSE(f.store->may_touch(f.holder));
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(1, 1)));
    CHECK(f.store->may_touch(f.holder));
    CHECK_FALSE(f.store->may_touch(f.other));
    f.store->holder_lost(f.holder);
    CHECK(f.store->may_touch(f.holder));
    f.store->abandon(f.holder, job(1));
    CHECK_FALSE(f.store->may_touch(f.holder));

    REQUIRE(f.store->claim(f.other, f.space, keys(0, 1), token(1)) == 1);
    CHECK_FALSE(f.store->may_touch(f.other));
    REQUIRE(f.store->open(f.other, token(1), 0, 1, PinId{1}));
    CHECK(f.store->may_touch(f.other));
    f.store->holder_gone(f.other);
    CHECK_FALSE(f.store->may_touch(f.other));
  }

  TEST_CASE("a lost writer may still report that its copies ended") {
    StoreFixture f({.pool_bytes = 2 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 1)));
    REQUIRE(f.store->reserve(f.holder, f.space, job(2), 0, keys(1, 1)));
    f.store->holder_lost(f.holder);
    CHECK(code_of(f.store->publish(f.holder, job(1))) == Errc::kGone);
    f.store->abandon(f.holder, job(2));
    CHECK(f.free() == 2);
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 0);
  }

  TEST_CASE("a reset forgets the jobs in progress, and a late publish seals nothing") {
    StoreFixture f({.pool_bytes = 2 * kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    f.store->retire_space(f.space);
    CHECK(f.store->stats().quarantined_timeout == 2);
    CHECK(code_of(f.store->reserve(f.holder, f.space, job(2), 0, keys(0, 1))) == Errc::kGone);
    CHECK(code_of(f.store->publish(f.holder, job(1))) == Errc::kGone);
    CHECK(f.free() == 2);
    CHECK(f.store->stats().insertions == 0);
  }
}

TEST_SUITE("BlockStore, read") {
  TEST_CASE("a claim holds the sealed prefix, and a pin the part that was opened") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    const auto frames = f.save(keys(0, 4));
    CHECK(f.store->claim(f.holder, f.space, keys(0, 6), token(1)) == 4);
    const auto pages = f.store->open(f.holder, token(1), 1, 2, PinId{7});
    REQUIRE(pages);
    CHECK(pages->frames == std::vector<FrameIndex>{frames[1], frames[2]});
    CHECK(pages->by_this_process == 2);
    CHECK(f.store->stats().held == 4);

    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->stats().held == 2);
    f.store->release(f.holder, PinId{7});
    f.store->release(f.holder, PinId{7});
    CHECK(f.store->is_idle());
  }

  TEST_CASE("the writer of a block is known by its process, not by its connection") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 2));
    const HolderId again = f.store->add_holder(1, testing::kProcess);
    REQUIRE(f.store->claim(again, f.space, keys(0, 2), token(1)) == 2);
    CHECK(f.store->open(again, token(1), 0, 2, PinId{1})->by_this_process == 2);
    CHECK(f.store->open(f.other, token(1), 0, 2, PinId{1})->by_this_process == 0);
  }

  TEST_CASE("a repeated open returns the same, another one under its name is rejected") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 4));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 4), token(1)) == 4);
    const auto first = f.store->open(f.holder, token(1), 0, 2, PinId{7});
    REQUIRE(first);
    f.store->unclaim(f.holder, token(1));
    const auto again = f.store->open(f.holder, token(1), 0, 2, PinId{7});
    REQUIRE(again);
    CHECK(again->frames == first->frames);
    CHECK(f.store->stats().pins == 1);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 3, PinId{7})) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->open(f.holder, token(1), 1, 2, PinId{7})) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->open(f.holder, token(2), 0, 2, PinId{7})) == Errc::kInvalidArgument);
  }

  TEST_CASE("a long claim and a long pin are made in slices, and are one") {
    StoreFixture f({.pool_bytes = 16 * kPage, .instance_share = 0.75});
    const auto frames = f.save(keys(0, 16));
    CHECK(f.store->claim(f.holder, f.space, keys(0, 3), token(1)) == 3);
    CHECK(f.store->claim_more(f.holder, token(1), keys(3, 4)) == 4);
    // It ends at a missing block, and at the share.
    CHECK(f.store->claim_more(f.holder, token(1), keys(99, 4)) == 0);
    CHECK(f.store->claim_more(f.holder, token(1), keys(7, 9)) == 5);
    CHECK(f.store->stats().claims_shortened == 1);

    std::vector<FrameIndex> opened;
    for (const std::size_t expected : {5, 5, 1}) {
      const auto pages = f.store->open(f.holder, token(1), 1, 11, PinId{7}, 5);
      REQUIRE(pages);
      CHECK(pages->is_new);
      CHECK(pages->frames.size() == expected);
      CHECK(pages->by_this_process == expected);
      opened.insert(opened.end(), pages->frames.begin(), pages->frames.end());
    }
    CHECK(opened == std::vector<FrameIndex>(frames.begin() + 1, frames.begin() + 12));
    const auto again = f.store->open(f.holder, token(1), 1, 11, PinId{7}, 5);
    CHECK(again->frames == opened);
    CHECK_FALSE(again->is_new);

    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->stats().held == 11);
    f.store->release(f.holder, PinId{7});
    while (f.store->work()) {
    }
    CHECK(f.store->is_idle());
  }

  TEST_CASE("a claim that ended between two slices is not continued, nor is its pin") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 4));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    CHECK(code_of(f.store->claim_more(f.other, token(1), keys(2, 1))) == Errc::kGone);
    CHECK(code_of(f.store->claim_more(f.holder, token(2), keys(2, 1))) == Errc::kGone);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{7}, 1));
    f.store->unclaim(f.holder, token(1));
    CHECK(code_of(f.store->claim_more(f.holder, token(1), keys(2, 1))) == Errc::kGone);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 2, PinId{7}, 1)) == Errc::kGone);
    // Another claim with that token is not the one that the pin began with.
    REQUIRE(f.store->claim(f.holder, f.space, keys(2, 2), token(1)) == 2);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 2, PinId{7}, 1)) == Errc::kGone);
    f.store->retire_space(f.space);
    CHECK(code_of(f.store->claim_more(f.holder, token(1), keys(3, 1))) == Errc::kGone);
    CHECK(f.store->stats().held == 1);
    f.store->release(f.holder, PinId{7});
    CHECK(f.store->is_idle());
  }

  TEST_CASE("invalid claims and opens are rejected") {
    StoreFixture f({.pool_bytes = 8 * kPage, .max_claims = 1, .max_pins = 1});
    f.save(keys(0, 2));
    CHECK(code_of(f.store->claim(f.holder, f.space, keys(0, 2), Id128{})) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->claim(HolderId{99}, f.space, keys(0, 2), token(1))) == Errc::kGone);
    CHECK(f.store->claim(f.holder, f.space, keys(5, 2), token(1)) == 0);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    CHECK(code_of(f.store->claim(f.other, f.space, keys(0, 2), token(1))) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->claim(f.other, f.space, keys(0, 2), token(2))) == Errc::kBusy);
    CHECK(code_of(f.store->open(HolderId{99}, token(1), 0, 1, PinId{1})) == Errc::kGone);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 0, PinId{1})) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 3, PinId{1})) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->open(f.holder, token(1), 2, 1, PinId{1})) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->open(f.holder, token(1), 1, ~std::size_t{0}, PinId{1})) ==
          Errc::kInvalidArgument);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{2})) == Errc::kBusy);
    f.store->unclaim(f.other, token(1));
    CHECK(f.store->stats().claims == 1);
  }

  TEST_CASE("a lost connection ends claims and keeps pins, whose blocks stay findable") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    f.store->holder_lost(f.holder);
    CHECK(code_of(f.store->open(f.other, token(1), 0, 1, PinId{1})) == Errc::kGone);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 2, PinId{1})) == Errc::kGone);
    CHECK(code_of(f.store->claim(f.holder, f.space, keys(0, 1), token(2))) == Errc::kGone);
    CHECK(f.store->stats().pinned_by_lost_readers == 2);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK_FALSE(f.store->is_idle());

    f.store->holder_gone(f.holder);

    CHECK(f.store->stats().pinned_by_lost_readers == 0);
    CHECK(f.store->stats().pins == 0);
    CHECK(f.store->is_idle());
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
  }

  TEST_CASE("a reset makes blocks unfindable and revokes claims; pins stay") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 4));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    f.store->retire_space(f.space);
    f.store->retire_space(f.space);

    CHECK(f.store->lookup(f.space, keys(0, 4)) == 0);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{2})) == Errc::kGone);
    CHECK(f.store->claim(f.holder, f.space, keys(0, 4), token(2)) == 0);
    CHECK(f.free() == 7);
    CHECK(f.store->stats().held == 1);

    f.store->release(f.holder, PinId{1});
    CHECK(f.free() == 8);
    CHECK(f.store->stats().retired == 4);
  }

  TEST_CASE("the time of the oldest pin is reported") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 2));
    CHECK_FALSE(f.store->stats().oldest_pin);
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    const TimePoint then = f.clock.now();
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    f.clock.advance(std::chrono::seconds(5));
    REQUIRE(f.store->open(f.holder, token(1), 1, 1, PinId{2}));
    CHECK(f.store->stats().oldest_pin == then);
    f.store->release(f.holder, PinId{1});
    CHECK(f.store->stats().oldest_pin == f.clock.now());
  }
}

TEST_SUITE("BlockStore, limited") {
  TEST_CASE("a claim is shortened to the share of its instance") {
    StoreFixture f({.pool_bytes = 10 * kPage, .instance_share = 0.5, .server_share = 1});
    f.save(keys(0, 8));
    CHECK(f.store->claim(f.holder, f.space, keys(0, 8), token(1)) == 5);
    CHECK(f.store->claim(f.holder, f.space, keys(0, 8), token(2)) == 0);
    CHECK(f.store->claim(f.other, f.space, keys(0, 8), token(3)) == 5);
    CHECK(f.store->stats().claims_shortened == 3);
    CHECK(f.store->stats().held == 5);
  }

  TEST_CASE("a claim is shortened to the share of the server, in distinct blocks") {
    StoreFixture f({.pool_bytes = 10 * kPage, .instance_share = 0.5, .server_share = 0.6});
    f.save(keys(0, 8));
    CHECK(f.store->claim(f.holder, f.space, keys(0, 5), token(1)) == 5);
    CHECK(f.store->claim(f.other, f.space, keys(3, 5), token(2)) == 3);
    CHECK(f.store->stats().held == 6);
  }

  TEST_CASE("a pin counts once its claim has ended, and open never fails for a share") {
    StoreFixture f({.pool_bytes = 10 * kPage, .instance_share = 0.5, .server_share = 1});
    f.save(keys(0, 8));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 5), token(1)) == 5);
    REQUIRE(f.store->open(f.holder, token(1), 0, 4, PinId{1}));
    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->claim(f.holder, f.space, keys(0, 8), token(2)) == 1);
    REQUIRE(f.store->open(f.holder, token(2), 0, 1, PinId{2}));
    f.store->release(f.holder, PinId{1});
    CHECK(f.store->claim(f.holder, f.space, keys(0, 8), token(3)) == 4);
  }

  TEST_CASE("with full shares, a pool full of pins accepts no save and loses no block") {
    StoreFixture f({.pool_bytes = 4 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 4));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 4), token(1)) == 4);
    REQUIRE(f.store->open(f.holder, token(1), 0, 4, PinId{1}));
    const auto frames = f.store->reserve(f.holder, f.space, job(99), 0, keys(50, 2));
    REQUIRE(frames);
    CHECK(frames->front() == kNoFrame);
    CHECK(f.store->stats().skipped_no_room == 2);
    CHECK(f.store->stats().claims_revoked == 1);
    CHECK(f.store->lookup(f.space, keys(0, 4)) == 4);
  }
}

TEST_SUITE("BlockStore, evicted") {
  TEST_CASE("the block evictable for longest is evicted first, and a chain from its end") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    f.save(keys(0, 2));
    f.save(keys(10, 2));
    f.save(keys(20, 1));
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 1);
    f.save(keys(30, 1));
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 0);
    CHECK(f.store->lookup(f.space, keys(10, 2)) == 2);
    CHECK(f.store->stats().evictions == 2);
  }

  TEST_CASE("a claim makes its blocks recent") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    f.save(keys(0, 2));
    f.save(keys(10, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    f.store->unclaim(f.holder, token(1));
    f.save(keys(20, 2));
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK(f.store->lookup(f.space, keys(10, 2)) == 0);
  }

  TEST_CASE("a pinned block survives, whatever is saved") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    const auto frames = f.save(keys(0, 1));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)) == 1);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    f.store->unclaim(f.holder, token(1));
    for (unsigned first = 10; first < 100; first += 3) {
      const auto others = f.save(keys(first, 3));
      CHECK(std::find(others.begin(), others.end(), frames.front()) == others.end());
    }
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 1);
  }

  TEST_CASE("when no block is evictable the oldest claim is revoked as a whole") {
    StoreFixture f({.pool_bytes = 4 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 2));
    f.save(keys(10, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->claim(f.holder, f.space, keys(10, 2), token(2)) == 2);
    f.save(keys(20, 1));
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
    CHECK(f.store->open(f.holder, token(2), 0, 1, PinId{2}));
    CHECK(f.store->stats().claims_revoked == 1);
  }

  TEST_CASE("a claim that was not opened within the grace is revoked before older ones") {
    StoreFixture f({.pool_bytes = 4 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 2));
    f.save(keys(10, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    f.store->release(f.holder, PinId{1});
    REQUIRE(f.store->claim(f.holder, f.space, keys(10, 2), token(2)) == 2);
    f.clock.advance(std::chrono::seconds(1));
    f.save(keys(20, 1));
    CHECK(code_of(f.store->open(f.holder, token(2), 0, 1, PinId{2})) == Errc::kGone);
    CHECK(f.store->open(f.holder, token(1), 0, 1, PinId{3}));
  }

  TEST_CASE("recent_frame counts from the most recent block") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    CHECK_FALSE(f.store->recent_frame(0));
    const auto frames = f.save(keys(0, 2));
    CHECK(f.store->recent_frame(0) == frames[0]);
    CHECK(f.store->recent_frame(1) == frames[1]);
    CHECK_FALSE(f.store->recent_frame(2));
  }
}

TEST_SUITE("BlockStore, in slices") {
  TEST_CASE("a long operation takes effect at once, and its blocks are returned in slices") {
    StoreFixture f(
        {.pool_bytes = 64 * kPage, .instance_share = 1, .server_share = 1, .slice_blocks = 4});
    f.save(keys(0, 20));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 20), token(1)) == 20);
    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->has_work());
    CHECK(f.store->stats().claims == 0);
    CHECK(f.store->stats().held == 16);
    int slices = 1;
    while (f.store->work()) ++slices;
    CHECK(slices == 5);
    CHECK(f.store->stats().held == 0);
  }

  TEST_CASE("a save finds room in a long claim that it revokes, a slice at a time") {
    StoreFixture f(
        {.pool_bytes = 20 * kPage, .instance_share = 1, .server_share = 1, .slice_blocks = 4});
    f.save(keys(0, 20));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 20), token(1)) == 20);
    const auto frames = f.store->reserve(f.holder, f.space, job(99), 0, keys(50, 6));
    REQUIRE(frames);
    CHECK(std::count(frames->begin(), frames->end(), kNoFrame) == 2);
    const auto more = f.store->reserve(f.holder, f.space, job(99), 0, keys(60, 2));
    REQUIRE(more);
    CHECK(std::count(more->begin(), more->end(), kNoFrame) == 0);
  }

  TEST_CASE("a holder with many pins ends in slices") {
    StoreFixture f(
        {.pool_bytes = 64 * kPage, .instance_share = 1, .server_share = 1, .slice_blocks = 8});
    f.save(keys(0, 10));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 10), token(1)) == 10);
    for (std::uint64_t pin = 1; pin <= 1000; ++pin) {
      REQUIRE(f.store->open(f.holder, token(1), pin % 10, 1, PinId{pin}));
    }
    f.store->holder_gone(f.holder);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
    CHECK(f.store->stats().pins > 900);
    while (f.store->work()) CHECK(f.store->check());
    CHECK(f.store->stats().pins == 0);
    CHECK(f.store->is_idle());
    CHECK(f.store->lookup(f.space, keys(0, 10)) == 10);
  }

  TEST_CASE("the end of a holder with many small pins needs no memory, and no slice more blocks") {
    constexpr std::uint64_t kPins = 20'000;
    StoreFixture f(
        {.pool_bytes = 64 * kPage, .instance_share = 1, .server_share = 1, .slice_blocks = 8});
    f.save(keys(0, 12));
    REQUIRE(f.store->claim(f.other, f.space, keys(0, 12), token(1)) == 12);
    std::uint64_t blocks = 0;
    for (std::uint64_t pin = 1; pin <= kPins; ++pin) {
      const std::uint64_t count = pin % 3 + 1;
      REQUIRE(f.store->open(f.holder, token(1), pin % 9, count, PinId{pin}));
      blocks += count;
    }
    f.store->holder_lost(f.holder);
    std::uint64_t memory = f.store->memory_bytes();

    f.store->holder_gone(f.holder);

    std::uint64_t left = f.store->stats().pinned_by_lost_readers;
    CHECK(left >= blocks - 10);
    while (f.store->work()) {
      const std::uint64_t now_left = f.store->stats().pinned_by_lost_readers;
      const std::uint64_t now_memory = f.store->memory_bytes();
      REQUIRE(now_left < left);
      REQUIRE(left - now_left <= 10);  // The last pin of a slice may have 3 blocks.
      REQUIRE(now_memory < memory);
      left = now_left;
      memory = now_memory;
    }
    CHECK(f.store->stats().pins == 0);
  }

  TEST_CASE("cleanup evicts all evictable blocks and counts the others") {
    StoreFixture f(
        {.pool_bytes = 64 * kPage, .instance_share = 1, .server_share = 1, .slice_blocks = 8});
    f.save(keys(0, 20));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 3), token(1)) == 3);
    REQUIRE(f.store->reserve(f.holder, f.space, job(99), 0, keys(40, 2)));
    CHECK_FALSE(f.store->cleanup().done);
    f.store->start_cleanup();
    CHECK_FALSE(f.store->cleanup().done);
    f.store->start_cleanup();  // Joins the first.
    while (f.store->work()) {
    }
    CHECK(f.store->cleanup().done);
    CHECK(f.store->cleanup().evicted_blocks == 17);
    CHECK(f.store->cleanup().still_referenced_blocks == 5);
    CHECK(f.store->stats().cleaned == 17);
    CHECK(f.store->lookup(f.space, keys(0, 20)) == 3);
  }
}

}  // namespace
}  // namespace pegaflow::engine
