#pragma once
/// \file
/// A store with a clock, a namespace generation and two connections, for the tests of engine/.

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "engine/block_store.h"

namespace pegaflow::testing {

inline constexpr Id128 kProcess{1, 1};
inline constexpr Id128 kOtherProcess{1, 2};
inline constexpr std::uint64_t kPage = 4096;  ///< The page size of the fixture's own shape.

inline Id128 token(std::uint64_t number) { return {9, number}; }
inline JobId job(std::uint64_t number) { return {kProcess, number}; }

/// `count` keys, from number `first` on.
inline std::vector<BlockKey> keys(std::uint64_t first, std::uint64_t count) {
  std::vector<BlockKey> made(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t number = first + i + 1;
    std::memcpy(made[i].bytes.data(), &number, sizeof number);
  }
  return made;
}

/// The code of the error; the result must be one.
inline Errc code_of(const auto& result) {
  REQUIRE_FALSE(result.has_value());
  return result.error().code;
}

/// Every share is the whole pool, unless a test sets another one.
inline engine::BlockStore::Options pool_of(std::uint64_t frames) {
  return {.pool_bytes = frames * kPage,
          .instance_share = 1,
          .server_share = 1,
          .fetch_share = 1,
          .save_reserve = 0};
}

struct StoreFixture {
  explicit StoreFixture(const engine::BlockStore::Options& options) {
    auto made = engine::BlockStore::create(options, clock);
    REQUIRE(made);
    store = std::move(*made);
    shape = add_shape(kPage);
    space = store->make_space(shape);
    holder = store->add_holder(1, kProcess);
    other = store->add_holder(2, kOtherProcess);
  }
  ~StoreFixture() {
    const auto checked = store->check();
    CHECK_MESSAGE(checked.has_value(), (checked ? "" : checked.error().detail));
  }
  StoreFixture(const StoreFixture&) = delete;
  StoreFixture& operator=(const StoreFixture&) = delete;

  /// Blocks of one shard, or of several, with pages of that size.
  engine::ShapeId add_shape(std::uint64_t page_bytes, std::uint32_t shards = 1) {
    const auto added = store->add_shape(engine::Shape{
        std::vector<engine::Shape::Shard>(shards, engine::Shape::Shard{.page_bytes = page_bytes})});
    REQUIRE(added);
    while (store->work()) {
    }
    return *added;
  }
  /// Holders for the ranks of one instance.
  std::vector<engine::HolderId> add_ranks(std::uint32_t instance, std::uint32_t shards) {
    std::vector<engine::HolderId> ranks;
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      ranks.push_back(store->add_holder(instance, Id128{instance, shard + 1}));
      store->set_shard(ranks.back(), shard, shards);
    }
    return ranks;
  }
  /// Frames of the fixture's shape that are not in use.
  [[nodiscard]] std::uint64_t free() const {
    return (store->stats().pool_bytes - store->stats().used_bytes) / kPage;
  }

  /// Saves blocks, all of which get a frame; returns the frames.
  std::vector<engine::FrameIndex> save(const std::vector<BlockKey>& blocks) {
    const JobId saved{kProcess, ++jobs_saved + 1'000'000};
    const auto frames = store->reserve(holder, space, saved, 0, blocks);
    REQUIRE(frames);
    for (const engine::FrameIndex frame : *frames) REQUIRE(frame != engine::kNoFrame);
    REQUIRE(store->publish(holder, saved) == 0);
    return *frames;
  }

  ManualClock clock;
  std::unique_ptr<engine::BlockStore> store;
  engine::ShapeId shape{};
  engine::SpaceId space{};
  engine::HolderId holder{};
  engine::HolderId other{};
  std::uint64_t jobs_saved = 0;
};

}  // namespace pegaflow::testing
