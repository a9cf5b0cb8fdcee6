// Saves that the eviction policy refuses: whose, and how they are counted.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {

namespace {

using testing::keys;
using testing::pool_of;
using testing::StoreFixture;
using testing::token;
using MayRefuse = BlockStore::MayRefuse;
using NoRoom = BlockStore::NoRoom;
constexpr std::uint64_t kFrames = 1024;
constexpr std::uint64_t kPrompt = 16;

/// A pool in which the contest has found that refusals pay: prompts recur in turn, and there are
/// more of them than it has room for.
struct Loop : StoreFixture {
  explicit Loop(EvictionKind eviction = EvictionKind::kAdaptive) : StoreFixture(options(eviction)) {
    for (int i = 0; i < 1200; ++i) serve(next());
    REQUIRE(store->check());
  }
  static BlockStore::Options options(EvictionKind eviction) {
    BlockStore::Options made = pool_of(kFrames);
    made.eviction = eviction;
    return made;
  }
  std::vector<BlockKey> next() { return keys(prompt++ % 96 * 1000, kPrompt); }
  void serve(const std::vector<BlockKey>& all) {
    const auto found = store->claim(holder, space, all, token(1));
    REQUIRE(found);
    if (*found != 0) store->unclaim(holder, token(1));
    save(std::span(all).subspan(*found), MayRefuse::kYes);
  }
  /// The number of keys that were not skipped.
  std::uint64_t save(std::span<const BlockKey> blocks, MayRefuse may_refuse) {
    const JobId job = testing::job(++jobs);
    const auto frames =
        store->reserve(holder, space, job, 0, blocks, NoRoom::kSkip, {}, may_refuse);
    REQUIRE(frames);
    std::uint64_t saved = 0;
    for (const FrameIndex frame : *frames) saved += frame != kNoFrame ? 1 : 0;
    if (saved != 0) REQUIRE(store->publish(holder, job) == 0);
    return saved;
  }
  [[nodiscard]] std::uint64_t refused() const { return store->stats().skipped_refused; }

  std::uint64_t prompt = 0;
  std::uint64_t jobs = 0;
};

}  // namespace

TEST_SUITE("BlockStore, refused saves") {
  TEST_CASE("a refused block has no frame, is counted as refused, and evicts nothing") {
    Loop f;
    REQUIRE(f.refused() > 0);
    REQUIRE(f.store->stats().skipped_no_room == 0);

    // One that comes while even the oldest block is young.
    BlockStore::Stats before;
    std::uint64_t saved = kPrompt;
    for (std::uint64_t i = 0; saved != 0; ++i) {
      REQUIRE(i < 100);
      before = f.store->stats();
      saved = f.save(keys(10'000'000 + i * 1000, kPrompt), MayRefuse::kYes);
    }

    const BlockStore::Stats after = f.store->stats();
    CHECK(after.skipped_refused == before.skipped_refused + kPrompt);
    CHECK(after.skipped_no_room == 0);
    CHECK(after.evictions == before.evictions);
    CHECK(after.insertions == before.insertions);
  }

  TEST_CASE("a save that another engine waits for is never refused") {
    Loop f;
    const std::uint64_t before = f.refused();
    REQUIRE(before > 0);
    for (std::uint64_t i = 0; i < 100; ++i) {
      REQUIRE(f.save(keys(20'000'000 + i * 1000, kPrompt), MayRefuse::kNo) == kPrompt);
    }
    CHECK(f.refused() == before);
  }

  TEST_CASE("the slices of one job are refused alike") {
    Loop f;
    const auto slice_of = [&](std::uint64_t job, std::uint64_t slice) {
      return f.store->reserve(f.holder, f.space, testing::job(job), 0,
                              keys(30'000'000 + slice * 1000, kPrompt), NoRoom::kSkip, {},
                              MayRefuse::kYes);
    };
    std::uint64_t job = 1'000'000;
    for (;; ++job) {
      REQUIRE(job < 1'000'100);
      const auto first = slice_of(job, job);
      REQUIRE(first);
      if (std::count(first->begin(), first->end(), kNoFrame) == std::ptrdiff_t{kPrompt}) break;
    }
    // More blocks than the patience of any rule, if the refused ones of a slice aged the others.
    for (std::uint64_t slice = 0; slice < 16 * kFrames / kPrompt; ++slice) {
      const auto frames = slice_of(job, slice);
      REQUIRE(frames);
      for (const FrameIndex frame : *frames) REQUIRE(frame == kNoFrame);
    }
  }

  TEST_CASE("other policies refuse nothing") {
    for (const EvictionKind kind : {EvictionKind::kLru, EvictionKind::kSlru, EvictionKind::kS3Fifo,
                                    EvictionKind::kWeightedLru}) {
      Loop f(kind);
      CHECK(f.refused() == 0);
    }
  }
}

}  // namespace pegaflow::engine
