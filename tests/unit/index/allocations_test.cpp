// Counts the allocations of this whole test program, by replacing the global operators.

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "index/block_index.h"
#include "index/placement/expected_blocks.h"
#include "index/placement/placement.h"

namespace {

std::atomic<std::size_t> allocations = 0;

void* counted(std::size_t bytes) {
  ++allocations;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace pegaflow::index {
namespace {

TEST_SUITE("BlockIndex") {
  TEST_CASE("a match allocates nothing, also after changes of its sets and holders") {
    const auto index = *BlockIndex::create({.max_blocks = 1 << 16, .max_holders = 128});
    std::vector<HolderId> engines;
    const HolderId node = *index->add_node();
    for (int i = 0; i < 100; ++i) engines.push_back(*index->add_engine());
    for (const HolderId engine : engines) index->attach(engine, node);
    std::mt19937_64 random(1);
    std::vector<Key> chain(20'000);
    for (Key& key : chain) key = random();
    for (const HolderId engine : engines) {
      index->store(engine, std::span(chain).first(random() % chain.size() + 1));
    }
    index->store(node, std::span(chain).first(5'000));
    Match match(128);

    const auto allocations_of_match = [&] {
      const std::size_t before = allocations;
      index->match(chain, match);
      return allocations - before;
    };
    CHECK(allocations_of_match() == 0);
    index->clear(node);
    CHECK(allocations_of_match() == 0);
    index->erase(engines[0], chain);
    CHECK(allocations_of_match() == 0);
    const HolderId late = *index->add_engine();
    index->store(late, chain);
    CHECK(allocations_of_match() == 0);

    CHECK(match.gpu(late) == chain.size());
    const std::size_t before = allocations;
    CHECK(std::make_unique<int>(1) != nullptr);
    CHECK(allocations > before);  // The counter counts.
  }
}

TEST_SUITE("Placement") {
  TEST_CASE("a decision, its account and what is expected of it allocate nothing") {
    const auto placement = *Placement::create({.max_engines = 96, .max_nodes = 96});
    auto expected = *ExpectedBlocks::create({});
    std::vector<Candidate> candidates;
    std::vector<PullSource> sources;
    for (std::uint32_t i = 0; i < 96; ++i) {
      const NodeId node = *placement->add_node();
      candidates.push_back({.engine = *placement->add_engine({.node = node}), .local_blocks = i});
      sources.push_back({.node = node, .blocks = i});
    }
    const std::vector<Key> chain(2000, 7);
    std::vector<std::uint32_t> blocks(96);

    const std::size_t before = allocations;
    for (std::uint64_t id = 0; id < 1000; ++id) {
      const TimePoint now{std::chrono::milliseconds(id)};
      expected.match(chain, now, blocks);
      const auto decision = placement->choose(
          {.prompt_tokens = 32000, .candidates = candidates, .sources = sources}, now);
      (void)placement->placed(id, decision->best(), 32000, now);
      expected.placed(decision->best().engine, chain, now);
      if (id > 50) placement->first_token(id - 50, now);
      if (id > 100) placement->done(id - 100, now);
    }
    CHECK(allocations == before);
  }
}

}  // namespace
}  // namespace pegaflow::index
