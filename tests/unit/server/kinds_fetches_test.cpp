// Which bytes of several kinds are read from which pages of a peer, and when they are worth it.
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <doctest/doctest.h>

#include "base/page_layout.h"
#include "tests/unit/server/kinds_peers_fixture.h"

namespace pegaflow::testing {
namespace {

/// The peer's page of a prompt's block, another one for each block and kind.
std::uint32_t page_at_peer(std::size_t kind, std::size_t block) {
  return static_cast<std::uint32_t>(1000 * (kind + 1) + 2 * block);
}
/// The checksum that the peer knows of that page.
std::uint64_t checksum_at_peer(std::size_t kind, std::size_t block) {
  return 70'000 + page_at_peer(kind, block);
}

/// The number of a block of the prompt 1 that ends with `key`.
std::size_t block_of(std::size_t kind, const BlockKey& key) {
  std::size_t block = 0;
  while (!(KindsPeers::key(kind, 1, block) == key)) ++block;
  return block;
}

/// The peer lends these pages and their checksums. Its shards behind the first have none.
void lend_own_pages(KindsPeers& f) {
  const auto kind_of = [&f](const Bytes32& space) {
    std::size_t kind = 0;
    while (f.space(kind) != space) ++kind;
    return kind;
  };
  f.lenders[0].page_of = [kind_of](const Bytes32& space, const BlockKey& key) {
    const std::size_t kind = kind_of(space);
    return page_at_peer(kind, block_of(kind, key));
  };
  f.lenders[0].checksum_of = [kind_of](const Bytes32& space, const BlockKey& key,
                                       std::size_t shard) {
    const std::size_t kind = kind_of(space);
    return shard == 0 ? checksum_at_peer(kind, block_of(kind, key)) : 0;
  };
}

/// Completes all reads. The result: the peer's page that was read, by the offset here.
std::map<std::uint64_t, std::uint64_t> complete_all_noted(KindsPeers& f) {
  std::map<std::uint64_t, std::uint64_t> read;
  while (!f.fabric.batches.empty()) {
    for (const Fabric::Chunk& chunk : f.fabric.batches.front().chunks) {
      CHECK(chunk.remote_offset % kSlotAlignment == 0);
      const bool is_new =
          read.emplace(chunk.local_offset, chunk.remote_offset / kSlotAlignment).second;
      CHECK(is_new);
    }
    f.complete();
  }
  return read;
}

/// Opens a claimed range of the prompt 1: each block has the bytes of its own page at the peer.
void check_own_bytes(KindsPeers& f, const std::map<std::uint64_t, std::uint64_t>& read,
                     std::size_t kind, std::size_t first, std::size_t count) {
  CAPTURE(kind);
  const auto opened = f.open(kOne, kind, 0, count, ++f.pins);
  REQUIRE(opened);
  REQUIRE(opened->slots.size() == count);
  REQUIRE(opened->checksums.size() == count);
  for (std::size_t i = 0; i < count; ++i) {
    CAPTURE(i);
    CHECK(read.at(opened->slots[i] * std::uint64_t{kSlotAlignment}) ==
          page_at_peer(kind, first + i));
    CHECK(opened->checksums[i] == checksum_at_peer(kind, first + i));
  }
}

/// The peer's reads become known to take 10 ms for each block.
void measure(KindsPeers& f) {
  f.give_eight(0, 9);
  REQUIRE(f.claim_from_peers(kThree, 9, 8).claimed.units == 8);
  while (!f.fabric.batches.empty()) {
    f.clock.advance(milliseconds(10));
    f.complete();
  }
  f.end(kThree);
  f.work();
}

TEST_SUITE("kinds at peers, reads") {
  TEST_CASE("each block has the bytes of its own page, whatever lease the page is lent under") {
    // The peer lends so many blocks under the first lease, then all others, or so many again.
    for (const std::size_t first : {1U, 2U, 3U, 5U, 7U, 8U}) {
      for (const bool has_limit : {false, true}) {
        if (has_limit && first < 3) continue;  // More leases than one claim takes.
        CAPTURE(first);
        CAPTURE(has_limit);
        KindsPeers f;
        f.give_eight(0, 1);
        lend_own_pages(f);
        f.lenders[0].before_lease = [&]() {
          const bool is_limited = has_limit || f.lenders[0].leases == 0;
          f.lenders[0].most_per_lease = is_limited ? first : ~std::size_t{0};
        };
        REQUIRE(text(f.claim_from_peers(kOne, 1, 8).claimed) == kEight);
        CHECK(f.lenders[0].leases >= (first < 8 ? 4 : 3));
        const auto read = complete_all_noted(f);
        CHECK(read.size() == 12);
        check_own_bytes(f, read, kFull, 0, 8);
        check_own_bytes(f, read, kWindow, 5, 3);
        check_own_bytes(f, read, kState, 3, 1);
        f.end(kOne);
        f.check_rest();
      }
    }
  }

  TEST_CASE("blocks that are here between the peer's do not shift what is read of a later lease") {
    KindsPeers f;
    f.save(kFull, 1, {0, 1});
    f.save(kWindow, 1, {6});
    f.give_eight(0, 1);
    lend_own_pages(f);
    f.lenders[0].before_lease = [&]() {
      f.lenders[0].most_per_lease = f.lenders[0].leases < 2 ? 1 : ~std::size_t{0};
    };
    REQUIRE(text(f.claim_from_peers(kOne, 1, 8).claimed) == kEight);
    CHECK(f.lenders[0].leases > 3);
    const auto read = complete_all_noted(f);
    CHECK(read.size() == 6 + 2 + 1);
    const auto opened = f.open(kOne, kFull, 2, 6, ++f.pins);
    REQUIRE(opened);
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(read.at(opened->slots[i] * std::uint64_t{kSlotAlignment}) ==
            page_at_peer(kFull, 2 + i));
    }
    const auto window = f.open(kOne, kWindow, 0, 3, ++f.pins);
    REQUIRE(window);
    for (const std::size_t i : {0U, 2U}) {
      CHECK(read.at(window->slots[i] * std::uint64_t{kSlotAlignment}) ==
            page_at_peer(kWindow, 5 + i));
    }
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("a block keeps the checksum of its one page where another shard has none of its kind") {
    Registration first = full_window_state();
    first.ranks = first.shards = 2;
    Registration second = first;
    second.rank = second.shard = 1;
    second.kinds[kState].page_bytes = 0;
    KindsPeers f(1, kStore, first);
    REQUIRE(f.service->register_rank(f.connect(), second));
    f.give_eight(0, 1);
    lend_own_pages(f);
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    f.complete_all();
    for (const auto& [kind, block] : {std::pair{kState, 3U}, {kWindow, 5U}, {kFull, 0U}}) {
      CAPTURE(kind);
      const auto opened = f.open(kOne, kind, 0, 1, ++f.pins);
      REQUIRE(opened);
      REQUIRE(opened->checksums.size() == 1);
      CHECK(opened->checksums.front() == checksum_at_peer(kind, block));
    }
    f.end(kOne);
    f.check_rest();
  }
}

TEST_SUITE("kinds at peers, worth") {
  TEST_CASE("a claim with a time to compare does not wait for a peer that is stuck") {
    KindsPeers f;
    measure(f);
    f.give_eight(0, 1);
    f.give_eight(0, 2);
    const cluster::ComputeTime slow{.delay = {}, .per_block = milliseconds(1000)};
    REQUIRE(f.claim_from_peers(kOne, 1, 8, slow).claimed.units == 8);

    f.clock.advance(milliseconds(200));  // Of a block that takes 10 ms nothing has arrived.
    CHECK(f.claim_from_peers(kTwo, 2, 8, slow).claimed.units == 0);
    CHECK(f.fetches->stats().declined == 12);

    f.complete_all();
    CHECK(f.claim_from_peers(kTwo, 2, 8, slow).claimed.units == 8);
    f.complete_all();
    f.end(kOne);
    f.end(kTwo);
    f.check_rest();
  }

  TEST_CASE("blocks are read if they arrive before the units that they save are computed") {
    // The prompt's first 6 units are at this node: the last 2 take 6 blocks, about 60 ms.
    for (const auto& [per_unit, units] : {std::pair{15, 0U}, {20, 0U}, {60, 8U}}) {
      CAPTURE(per_unit);
      KindsPeers f;
      measure(f);
      f.save(kFull, 1, {0, 1, 2, 3, 4, 5});
      f.save(kWindow, 1, {3, 4, 5});
      f.save(kState, 1, {2});
      f.give_eight(0, 1);
      const cluster::ComputeTime compute{.delay = {}, .per_block = milliseconds(per_unit)};
      CHECK(f.claim_from_peers(kOne, 1, 8, compute).claimed.units == units);
      f.complete_all();
      f.end(kOne);
      f.check_rest();
    }
  }

  TEST_CASE("the units that the engine has itself are not counted as saved by a fetch") {
    // The last 2 units take 7 pages, about 70 ms.
    for (const auto& [per_unit, units] : {std::pair{15, 0U}, {20, 0U}, {60, 8U}}) {
      CAPTURE(per_unit);
      KindsPeers f;
      measure(f);
      f.give_eight(0, 1);
      const cluster::ComputeTime compute{.delay = {}, .per_block = milliseconds(per_unit)};
      CHECK(f.claim_from_peers(kOne, 1, 8, compute, 6).claimed.units == units);
      f.complete_all();
      f.end(kOne);
      f.check_rest();
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
