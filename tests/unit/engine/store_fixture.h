#pragma once
/// \file
/// A store with a clock, a space and two connections, for the tests of engine/.

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

struct StoreFixture {
  explicit StoreFixture(const BlockStore::Options& options) {
    auto made = BlockStore::create(options, clock);
    REQUIRE(made);
    store = std::move(*made);
    space = store->make_space();
    holder = store->add_holder(1, kProcess);
    other = store->add_holder(2, kOtherProcess);
  }
  ~StoreFixture() {
    const auto checked = store->check();
    CHECK_MESSAGE(checked.has_value(), (checked ? "" : checked.error().detail));
  }
  StoreFixture(const StoreFixture&) = delete;
  StoreFixture& operator=(const StoreFixture&) = delete;

  /// Saves blocks, all of which get a slot; which ones it returns.
  std::vector<SlotIndex> save(const std::vector<BlockKey>& blocks) {
    const JobId saved{kProcess, ++jobs_saved + 1'000'000};
    const auto slots = store->reserve(holder, space, saved, blocks);
    REQUIRE(slots);
    for (const SlotIndex slot : *slots) REQUIRE(slot != kNoSlot);
    REQUIRE(store->publish(holder, saved) == 0);
    return *slots;
  }

  ManualClock clock;
  std::unique_ptr<BlockStore> store;
  SpaceId space{};
  HolderId holder{};
  HolderId other{};
  std::uint64_t jobs_saved = 0;
};

}  // namespace pegaflow::testing
