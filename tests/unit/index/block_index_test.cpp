#include "index/block_index.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

std::unique_ptr<BlockIndex> make_index(const BlockIndex::Options& options = {.max_blocks = 4096,
                                                                             .max_holders = 300}) {
  auto index = BlockIndex::create(options);
  REQUIRE(index);
  return std::move(*index);
}

std::vector<Key> chain_of(std::uint64_t name, std::size_t blocks) {
  std::vector<Key> chain(blocks);
  for (std::size_t i = 0; i < blocks; ++i) chain[i] = key_of(name << 32U, i + 1);
  return chain;
}

std::span<const Key> part(const std::vector<Key>& chain, std::size_t from, std::size_t to) {
  return std::span(chain).subspan(from, to - from);
}

TEST_SUITE("BlockIndex") {
  TEST_CASE("options out of their range are refused") {
    CHECK(BlockIndex::create({.max_blocks = 63}).error().code == Errc::kInvalidArgument);
    CHECK(BlockIndex::create({.max_blocks = (std::size_t{1} << 28U) + 1}).error().code ==
          Errc::kInvalidArgument);
    CHECK(BlockIndex::create({.max_holders = 0}).error().code == Errc::kInvalidArgument);
    CHECK(BlockIndex::create({.max_holders = 4097}).error().code == Errc::kInvalidArgument);
    CHECK(BlockIndex::create({.set_bytes = 1000}).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a match gives the prefix of each engine, of its node, and of both together") {
    const auto index = make_index();
    const HolderId engine = *index->add_engine();
    const HolderId other = *index->add_engine();
    const HolderId node = *index->add_node();
    index->attach(engine, node);
    const std::vector<Key> chain = chain_of(1, 100);
    index->store(engine, part(chain, 0, 30));
    index->store(node, part(chain, 20, 60));
    index->store(node, part(chain, 0, 10));
    index->store(other, part(chain, 60, 100));
    Match match(300);

    index->match(chain, match);

    CHECK(match.longest == 100);
    CHECK(match.gpu(engine) == 30);
    CHECK(match.local(engine) == 60);
    CHECK(match.pool(node) == 10);
    CHECK(match.gpu(other) == 0);
    CHECK(match.local(other) == 0);
  }

  TEST_CASE("a chain ends at the first block without a holder") {
    const auto index = make_index();
    const HolderId engine = *index->add_engine();
    const std::vector<Key> chain = chain_of(1, 64);
    index->store(engine, chain);
    index->erase(engine, part(chain, 40, 41));
    Match match(300);

    index->match(chain, match);
    CHECK(match.longest == 40);
    CHECK(match.gpu(engine) == 40);

    index->store(engine, part(chain, 40, 41));
    index->match(chain, match);
    CHECK(match.gpu(engine) == 64);

    index->match(chain_of(2, 64), match);
    CHECK(match.longest == 0);
    CHECK(match.gpu(engine) == 0);

    index->match({}, match);
    CHECK(match.longest == 0);
  }

  TEST_CASE("a cleared holder has nothing at once, and what others have stays") {
    const auto index = make_index();
    const HolderId engine = *index->add_engine();
    const HolderId node = *index->add_node();
    index->attach(engine, node);
    const std::vector<Key> chain = chain_of(1, 100);
    index->store(engine, chain);
    index->store(node, part(chain, 0, 50));
    Match match(300);

    index->clear(engine);

    CHECK(index->blocks_of(engine) == 0);
    CHECK_FALSE(index->holds(engine, chain[0]));
    index->match(chain, match);
    CHECK(match.longest == 50);
    CHECK(match.gpu(engine) == 0);
    CHECK(match.local(engine) == 50);

    index->store(engine, part(chain, 0, 70));
    while (index->sweep(100)) {
    }
    index->match(chain, match);
    CHECK(match.gpu(engine) == 70);
    CHECK(index->stats().blocks == 70);
    CHECK(index->stats().sets == 2);
  }

  TEST_CASE("clearing more often than the sweep follows is exact") {
    const auto index = make_index({.max_blocks = 4096, .max_holders = 4});
    const HolderId engine = *index->add_engine();
    Match match(4);
    for (std::uint64_t round = 0; round < 100; ++round) {
      index->store(engine, chain_of(round, 10));
      index->clear(engine);
      index->match(chain_of(round, 10), match);
      REQUIRE(match.longest == 0);
    }
    while (index->sweep(4096)) {
    }
    CHECK(index->stats().blocks == 0);
    CHECK(index->stats().sets == 0);
  }

  TEST_CASE("a number is given again only after the sweep, and without the former blocks") {
    const auto index = make_index({.max_blocks = 4096, .max_holders = 2});
    const HolderId first = *index->add_engine();
    const HolderId second = *index->add_node();
    index->attach(first, second);
    index->store(first, chain_of(1, 10));
    index->store(second, chain_of(1, 20));
    CHECK(index->add_engine().error().code == Errc::kOutOfCapacity);

    index->remove(second);
    CHECK(index->add_node().error().code == Errc::kOutOfCapacity);
    while (index->sweep(1000)) {
    }

    const HolderId again = *index->add_engine();
    CHECK(again == second);
    Match match(2);
    index->match(chain_of(1, 20), match);
    CHECK(match.longest == 10);
    CHECK(match.local(first) == 10);
    CHECK(match.gpu(again) == 0);
  }

  TEST_CASE("an engine belongs to one node, and to none after detach") {
    const auto index = make_index();
    const HolderId engine = *index->add_engine();
    const HolderId former = *index->add_node();
    const HolderId node = *index->add_node();
    const std::vector<Key> chain = chain_of(1, 40);
    index->store(former, part(chain, 0, 10));
    index->store(node, part(chain, 0, 20));
    Match match(300);

    index->attach(engine, former);
    index->match(chain, match);
    CHECK(match.local(engine) == 10);

    index->attach(engine, node);
    index->match(chain, match);
    CHECK(match.local(engine) == 20);

    index->detach(engine);
    index->match(chain, match);
    CHECK(match.local(engine) == 0);
    CHECK(match.pool(node) == 20);
  }

  TEST_CASE("duplicate stores change nothing, and an unknown erase is counted") {
    const auto index = make_index();
    const HolderId engine = *index->add_engine();
    const std::vector<Key> chain = chain_of(1, 10);

    index->store(engine, chain);
    index->store(engine, chain);
    CHECK(index->blocks_of(engine) == 10);
    CHECK(index->stats().blocks == 10);

    index->erase(engine, chain_of(2, 5));
    CHECK(index->stats().erased_unknown == 5);
    index->erase(engine, chain);
    index->erase(engine, chain);
    CHECK(index->stats().erased_unknown == 15);
    CHECK(index->stats().blocks == 0);
  }

  TEST_CASE("a full index forgets old blocks of one holder, and starts of prompts last") {
    const auto index = make_index({.max_blocks = 4096, .max_holders = 4});
    const HolderId first = *index->add_engine();
    const HolderId second = *index->add_engine();
    const std::vector<Key> root = chain_of(1, 32);
    const std::vector<Key> shared = chain_of(2, 32);
    const std::vector<Key> old = chain_of(3, 1024);
    index->store(first, root, true);
    index->store(first, shared);
    index->store(second, shared);
    index->store(first, old);

    for (std::uint64_t name = 10; index->stats().evicted < 1000; ++name) {
      index->store(first, chain_of(name, 128));
      REQUIRE(index->stats().blocks <= 4096);
    }

    Match match(4);
    index->match(root, match);
    CHECK(match.gpu(first) == 32);
    index->match(shared, match);
    CHECK(match.gpu(second) == 32);
    index->match(old, match);
    CHECK(match.longest == 0);
    CHECK(index->blocks_of(first) == index->stats().blocks);
  }

  TEST_CASE("a full index of shared blocks still takes new ones") {
    const auto index = make_index({.max_blocks = 256, .max_holders = 4});
    const HolderId first = *index->add_engine();
    const HolderId second = *index->add_engine();
    for (std::uint64_t name = 0; name < 100; ++name) {
      index->store(first, chain_of(name, 32), true);
      index->store(second, chain_of(name, 32), true);
      Match match(4);
      index->match(chain_of(name, 32), match);
      REQUIRE(match.gpu(first) == 32);
      REQUIRE(match.gpu(second) == 32);
    }
    CHECK(index->stats().blocks <= 256);
  }

  TEST_CASE("without memory for another set of holders, blocks are forgotten and counted") {
    const auto index =
        make_index({.max_blocks = 65536, .max_holders = 64, .set_bytes = 64 * 8 * 96});
    std::vector<HolderId> engines;
    for (int i = 0; i < 64; ++i) engines.push_back(*index->add_engine());
    const std::vector<Key> chain = chain_of(1, 4000);

    for (std::size_t block = 0; block < chain.size(); ++block) {
      for (std::size_t bit = 0; bit < 12; ++bit) {
        if ((block >> bit & 1U) != 0) index->store(engines[bit], part(chain, block, block + 1));
      }
    }

    CHECK(index->stats().sets_refused > 0);
    CHECK(index->stats().set_bytes <= 2 * 64 * 8 * 96);
    std::size_t kept = 0;
    for (std::size_t block = 0; block < chain.size(); ++block) {
      for (std::size_t bit = 0; bit < 64; ++bit) {
        if (!index->holds(engines[bit], chain[block])) continue;
        REQUIRE(bit < 12);
        REQUIRE((block >> bit & 1U) != 0);
        ++kept;
      }
    }
    CHECK(kept > 100);
  }

  TEST_CASE("the blocks of one holder can be listed in slices") {
    const auto index = make_index();
    const HolderId engine = *index->add_engine();
    const HolderId other = *index->add_engine();
    std::vector<Key> mine = chain_of(1, 300);
    index->store(engine, mine);
    index->store(other, part(mine, 100, 200));
    index->store(other, chain_of(2, 50));
    index->erase(engine, part(mine, 0, 10));

    std::vector<Key> listed;
    std::size_t calls = 0;
    for (std::size_t cell = 1; cell != 0; ++calls) cell = index->list(engine, cell, 64, listed);

    CHECK(calls > 4);
    mine.erase(mine.begin(), mine.begin() + 10);
    std::sort(listed.begin(), listed.end());
    std::sort(mine.begin(), mine.end());
    CHECK(listed == mine);
    index->clear(engine);
    listed.clear();
    index->list(engine, 1, 1'000'000, listed);
    CHECK(listed.empty());
  }

  TEST_CASE("a fragmented index joins its runs") {
    const auto index = make_index({.max_blocks = 65536, .max_holders = 4});
    const HolderId engine = *index->add_engine();
    std::vector<std::vector<Key>> chains;
    for (std::uint64_t name = 0; name < 500; ++name) {
      chains.push_back(chain_of(name, 128));
      index->store(engine, chains.back());
    }
    for (std::vector<Key>& chain : chains) {
      std::vector<Key> odd;
      for (std::size_t i = 64; i < 128; ++i) odd.push_back(chain[i]);
      index->erase(engine, odd);
      chain.resize(64);
    }
    while (index->sweep(1000)) {
    }
    CHECK(index->stats().moved > 0);
    Match match(4);
    for (const std::vector<Key>& chain : chains) {
      index->match(chain, match);
      REQUIRE(match.gpu(engine) == 64);
    }
  }
}

}  // namespace
}  // namespace pegaflow::index
