// The store's journal for subscribers: BlockStore::journal().
#include "engine/tables/journal.h"

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::keys;
using testing::kPage;
using testing::StoreFixture;
using testing::token;

constexpr std::size_t kAll = 1000;

/// "+3 -1": block 3 is present, block 1 is gone.
std::string text(const BlockStore::JournalPart& part) {
  std::string words;
  for (const BlockStore::JournalEntry& said : part.entries) {
    words += (said.is_present ? "+" : "-") + std::to_string(said.key.hash() - 1) + " ";
  }
  return words;
}

struct Reader {
  explicit Reader(StoreFixture& fixture) : f(fixture) {
    REQUIRE(f.store->keep_journal());
    next = f.store->journal(f.space, BlockStore::kJournalEnd, kAll).next;
  }
  /// The entries since the last call.
  std::string read() {
    const auto part = f.store->journal(f.space, next, kAll);
    CHECK_FALSE(part.has_lost);
    CHECK_FALSE(part.has_more);
    next = part.next;
    return text(part);
  }
  StoreFixture& f;
  std::uint64_t next = 0;
};

TEST_SUITE("Journal") {
  TEST_CASE("nothing is recorded before keep_journal()") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    f.save(keys(0, 2));
    CHECK(f.store->journal(f.space, 0, kAll).entries.empty());
    const std::uint64_t before = f.store->memory_bytes();
    Reader reader(f);
    CHECK(reader.read().empty());
    CHECK(f.store->memory_bytes() == before);
    REQUIRE(f.store->keep_journal());  // Changes nothing.
    f.save(keys(2, 1));
    REQUIRE(f.store->keep_journal());
    CHECK(reader.read() == "+2 ");
  }

  TEST_CASE("blocks are present when the last shard has sealed them, and gone when evicted") {
    StoreFixture f({.pool_bytes = 4 * kPage});
    Reader reader(f);
    REQUIRE(f.store->reserve(f.holder, f.space, testing::job(1), 0, keys(0, 3)));
    CHECK(reader.read().empty());
    CHECK(f.store->publish(f.holder, testing::job(1), 2) == 1);
    CHECK(reader.read() == "+2 +1 ");
    CHECK(f.store->publish(f.holder, testing::job(1)) == 0);
    CHECK(reader.read() == "+0 ");

    f.save(keys(3, 2));

    CHECK(reader.read() == "-2 +4 +3 ");
  }

  TEST_CASE("of several ranks only the last one's publish is recorded") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    const ShapeId shape = f.add_shape(kPage, 2);
    const SpaceId space = f.store->make_space(shape);
    const auto ranks = f.add_ranks(7, 2);
    REQUIRE(f.store->keep_journal());
    for (const HolderId rank : ranks) {
      REQUIRE(f.store->reserve(rank, space, testing::job(1), 0, keys(0, 1)));
    }
    REQUIRE(f.store->publish(ranks[1], testing::job(1)) == 0);
    CHECK(f.store->journal(space, 0, kAll).entries.empty());
    REQUIRE(f.store->publish(ranks[0], testing::job(1)) == 0);
    CHECK(text(f.store->journal(space, 0, kAll)) == "+0 ");
  }

  TEST_CASE("a claim of a block, or another save of it, records again that it is present") {
    StoreFixture f({.pool_bytes = 8 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 2));
    Reader reader(f);
    REQUIRE(f.store->claim(f.other, f.space, keys(0, 3), token(1)) == 2);
    CHECK(reader.read() == "+0 +1 ");
    REQUIRE(f.store->reserve(f.other, f.space, testing::job(1), 0, keys(1, 2)));
    CHECK(reader.read() == "+1 ");
    // A block that another holder is saving is not present yet.
    REQUIRE(f.store->reserve(f.holder, f.space, testing::job(2), 0, keys(2, 1)));
    CHECK(reader.read().empty());
  }

  TEST_CASE("an invalidated block and a cleaned one are gone, each once") {
    StoreFixture f({.pool_bytes = 8 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    Reader reader(f);
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    CHECK(reader.read() == "-0 ");
    f.save(keys(0, 1));  // In another frame, while the wrong one is still pinned.
    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));
    CHECK(reader.read() == "+0 ");
    f.store->start_cleanup();
    while (f.store->work()) {
    }
    const std::string said = reader.read();
    CHECK((said == "-0 -1 " || said == "-1 -0 "));
  }

  TEST_CASE("a retired generation has no further entries") {
    StoreFixture f({.pool_bytes = 8 * kPage, .instance_share = 1, .server_share = 1});
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)) == 1);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    Reader reader(f);
    f.store->retire_space(f.space);
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    f.store->release(f.holder, PinId{1});
    while (f.store->work()) {
    }
    CHECK(f.store->stats().sealed == 0);
    CHECK(reader.read().empty());
  }

  TEST_CASE("generations do not see each other's entries, and read past them") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    const SpaceId second = f.store->make_space(f.shape);
    Reader reader(f);
    f.save(keys(0, 1));
    const auto part = f.store->journal(second, reader.next, kAll);
    CHECK(part.entries.empty());
    CHECK(part.next == reader.next + 1);
  }

  TEST_CASE("a reader continues where it stopped, and learns when it came too late") {
    StoreFixture f(
        {.pool_bytes = 64 * kPage, .journal_entries = 8, .journal_first = ~std::uint64_t{0} - 100});
    Reader reader(f);
    for (std::uint64_t i = 0; i < 8; ++i) f.save(keys(i, 1));

    const auto first = f.store->journal(f.space, reader.next, 5);
    CHECK(text(first) == "+0 +1 +2 +3 +4 ");
    CHECK(first.has_more);
    const auto rest = f.store->journal(f.space, first.next, 5);
    CHECK(text(rest) == "+5 +6 +7 ");
    CHECK_FALSE(rest.has_more);

    f.save(keys(8, 1));
    const auto late = f.store->journal(f.space, reader.next, kAll);
    CHECK(late.has_lost);
    CHECK(text(late) == "+1 +2 +3 +4 +5 +6 +7 +8 ");
    // A position that was never returned here.
    CHECK(f.store->journal(f.space, 5, kAll).has_lost);
    CHECK(f.store->journal(f.space, late.next + 1, kAll).has_lost);
  }

  TEST_CASE("its memory is bounded") {
    StoreFixture f({.pool_bytes = 64 * kPage, .journal_entries = 8});
    REQUIRE(f.store->keep_journal());
    std::uint64_t after_one = 0;
    for (int round = 0; round < 100; ++round) {
      f.save(keys(0, 4));  // 4 entries, and 4 more when they are gone.
      f.store->start_cleanup();
      while (f.store->work()) {
      }
      if (round == 0) after_one = f.store->memory_bytes();
    }
    CHECK(f.store->memory_bytes() == after_one);
  }

  TEST_CASE("a reader that waits is woken once, by the next entry or by a reset") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    Reader reader(f);
    int woken = 0;
    f.store->on_next_entry([&] { ++woken; });
    CHECK(woken == 0);
    f.save(keys(0, 3));
    CHECK(woken == 1);
    f.store->on_next_entry([&] { ++woken; });
    f.store->retire_space(f.space);
    CHECK(woken == 2);
  }

  TEST_CASE("the list has each findable block of a generation once, in parts of bounded work") {
    StoreFixture f({.pool_bytes = 8 * kPage});
    CHECK(f.store->list(f.space, 0, kAll).keys.empty());
    f.save(keys(0, 6));
    const SpaceId other = f.store->make_space(f.shape);
    const auto wrong = f.store->lend(f.space, keys(2, 1), std::chrono::seconds(1)).value();
    REQUIRE(f.store->invalidate(wrong.frames.front()));

    std::vector<BlockKey> all;
    FrameIndex from = 0;
    while (from != kNoFrame) {
      const auto part = f.store->list(f.space, from, 2);
      CHECK(part.keys.size() <= 2);
      all.insert(all.end(), part.keys.begin(), part.keys.end());
      from = part.next;
    }

    std::vector<BlockKey> expected = keys(0, 6);
    expected.erase(expected.begin() + 2);  // Its bytes are wrong.
    std::sort(all.begin(), all.end());
    std::sort(expected.begin(), expected.end());
    CHECK(all == expected);
    CHECK(f.store->list(other, 0, kAll).keys.empty());
  }
}

}  // namespace
}  // namespace pegaflow::engine
