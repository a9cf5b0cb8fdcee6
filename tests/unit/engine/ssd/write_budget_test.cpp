#include "engine/ssd/write_budget.h"

#include <cstring>

#include <doctest/doctest.h>

namespace pegaflow::engine::ssd {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kDay = 86400 * kMiB;  // 1 MiB a second.

BlockKey key_of(std::uint64_t number) {
  BlockKey key;
  number *= 0x9E3779B97F4A7C15ULL;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

/// Offers new blocks of 1 MiB, and counts those that are taken.
struct Offers {
  WriteBudget& budget;
  TimePoint now{};
  std::uint64_t next = 1;
  std::uint64_t bytes = kMiB;

  bool offer(WriteBudget::Offer block) {
    block.key = key_of(next++);
    block.bytes = bytes;
    return budget.take(block, now);
  }
};

}  // namespace

TEST_SUITE("the budget of writes") {
  TEST_CASE("without a limit everything may be written") {
    WriteBudget budget(0, TimePoint{});

    CHECK(budget.take({.key = {}, .bytes = ~std::uint64_t{0}}, TimePoint{}));
    CHECK(budget.take_last(~std::uint64_t{0}, TimePoint{}));
    CHECK_FALSE(budget.is_limited());
  }

  TEST_CASE("at once no more is written than the budget of half an hour") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    std::uint64_t written = 0;
    for (int i = 0; i < 4000; ++i) written += offers.offer({.was_used = true}) ? 1 : 0;

    CHECK(written == 1800);
    CHECK_FALSE(budget.take_last(kMiB, offers.now));
  }

  TEST_CASE("each hour of a day writes the budget within 2 %, from whatever blocks") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    offers.bytes = kMiB / 4;
    for (int hour = 0; hour < 24; ++hour) {
      std::uint64_t written = 0;
      for (int second = 0; second < 3600; ++second, offers.now += std::chrono::seconds(1)) {
        for (std::uint8_t i = 0; i < 32; ++i) {
          written += offers.offer({.depth = static_cast<Depth>(i % 7 + 1)}) ? 1 : 0;
        }
      }
      CAPTURE(hour);
      CHECK(written >= 4 * 3600 * 98 / 100);
      CHECK(written <= 4 * 3600 * 102 / 100);
    }
  }

  TEST_CASE("used blocks go before those that came back, and those before new ones, by depth") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    std::uint64_t used = 0;
    std::uint64_t back = 0;
    std::array<std::uint64_t, kMostDepth + 1> by_depth{};
    constexpr int kSeconds = 4000;
    for (int second = 0; second < kSeconds; ++second, offers.now += std::chrono::seconds(1)) {
      // A quarter, a quarter, and a quarter for each depth: enough for the first two depths.
      if (second % 4 == 0) used += offers.offer({.was_used = true, .depth = kMostDepth}) ? 1 : 0;
      if (second % 4 == 1) back += offers.offer({.came_back = true, .depth = kMostDepth}) ? 1 : 0;
      for (Depth depth = 1; depth <= kMostDepth; ++depth) {
        if (second % 4 == 2) by_depth[depth] += offers.offer({.depth = depth}) ? 1 : 0;
      }
    }

    CHECK(used >= kSeconds / 4 * 99 / 100);
    CHECK(back >= kSeconds / 4 * 99 / 100);
    CHECK(by_depth[1] >= kSeconds / 4 * 95 / 100);
    CHECK(by_depth[2] >= kSeconds / 4 * 80 / 100);
    CHECK(by_depth[3] <= kSeconds / 4 * 20 / 100);
    CHECK(by_depth[kMostDepth] <= kSeconds / 4 * 2 / 100);
  }

  TEST_CASE("a block of unknown depth goes with the deepest ones") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    std::uint64_t unknown = 0;
    std::uint64_t first = 0;
    for (int second = 0; second < 1000; ++second, offers.now += std::chrono::seconds(1)) {
      first += offers.offer({.depth = 1}) ? 1 : 0;
      unknown += offers.offer({.depth = kUnknownDepth}) ? 1 : 0;
    }

    CHECK(first >= 990);
    CHECK(unknown <= 50);
  }

  TEST_CASE("a rejected block that is saved again counts as one that came back") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    for (int second = 0; second < 100; ++second, offers.now += std::chrono::seconds(1)) {
      for (int i = 0; i < 20; ++i) (void)offers.offer({.depth = kMostDepth});
      (void)offers.offer({.depth = 1});
    }
    const WriteBudget::Offer deep{.key = key_of(~0ULL), .bytes = kMiB, .depth = kMostDepth};
    REQUIRE(budget.limit() < WriteBudget::kRanks);

    CHECK_FALSE(budget.take(deep, offers.now));
    CHECK(budget.take(deep, offers.now));
  }

  TEST_CASE("the rank that the budget is not enough for is taken in runs of consecutive blocks") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    std::uint64_t taken = 0;
    std::uint64_t changes = 0;
    bool before = false;
    for (int second = 0; second < 2000; ++second, offers.now += std::chrono::seconds(1)) {
      for (int i = 0; i < 2; ++i) {
        const bool is_taken = offers.offer({.depth = 3});
        taken += is_taken ? 1 : 0;
        changes += is_taken != before ? 1 : 0;
        before = is_taken;
      }
    }

    CHECK(taken >= 1900);
    CHECK(changes <= taken / 20);
  }

  TEST_CASE("what a night did not use is spent in the hours after it") {
    WriteBudget budget(kDay, TimePoint{});
    Offers offers{budget};
    offers.now += std::chrono::hours(8);
    std::uint64_t written = 0;
    for (int second = 0; second < 3600; ++second, offers.now += std::chrono::seconds(1)) {
      for (int i = 0; i < 4; ++i) written += offers.offer({.depth = 2}) ? 1 : 0;
    }

    CHECK(written >= 3600 * 120 / 100);
    CHECK(written <= 3600 * 150 / 100);
  }
}

TEST_SUITE("the depth of a block") {
  TEST_CASE("a client sends a logarithm, of which the server keeps eight steps") {
    CHECK(sent_depth(0) == 1);
    CHECK(sent_depth(1) == 2);
    CHECK(sent_depth(2) == 2);
    CHECK(sent_depth(3) == 3);
    CHECK(sent_depth(~std::uint32_t{0}) == 33);

    CHECK(depth_from_sent(0) == kUnknownDepth);
    CHECK(depth_from_sent(sent_depth(0)) == 1);
    CHECK(depth_from_sent(sent_depth(2)) == 1);
    CHECK(depth_from_sent(sent_depth(3)) == 2);
    CHECK(depth_from_sent(sent_depth(14)) == 2);
    CHECK(depth_from_sent(sent_depth(15)) == 3);
    CHECK(depth_from_sent(sent_depth(4094)) == 6);
    CHECK(depth_from_sent(sent_depth(4095)) == kMostDepth);
    CHECK(depth_from_sent(255) == kMostDepth);
  }
}

}  // namespace pegaflow::engine::ssd
