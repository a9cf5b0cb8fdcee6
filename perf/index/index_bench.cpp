// The router's index of blocks: matches of long chains with cold and warm caches, the rate at which
// events are applied, and the memory of a block. Times are CPU seconds of this thread.
//
// usage: index_bench [warm]     only the warm matches, for index_dynamo.py

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <time.h>

#include <fmt/core.h>

#include "base/assert.h"
#include "index/block_index.h"
#include "perf/lib/figures.h"
#include "perf/lib/random_draws.h"

namespace pegaflow::perf {
namespace {

using index::BlockIndex;
using index::HolderId;
using index::Key;
using index::Match;

constexpr std::size_t kHolders = 96;
constexpr std::size_t kEvent = 128;  // Blocks.
constexpr std::uint64_t kSeed = 17;

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

struct Fixture {
  std::unique_ptr<BlockIndex> blocks;
  std::vector<HolderId> holders;
  Draws draws{kSeed};

  explicit Fixture(std::size_t max_blocks, std::size_t set_bytes = std::size_t{256} << 20U) {
    auto made =
        BlockIndex::create({.max_blocks = max_blocks, .max_holders = 128, .set_bytes = set_bytes});
    PEGA_ASSERT(made, "{}", to_string(made.error()));
    blocks = std::move(*made);
    for (std::size_t i = 0; i < kHolders; ++i) holders.push_back(blocks->add_engine().value());
  }

  std::vector<Key> random_chain(std::size_t length) {
    std::vector<Key> chain(length);
    for (Key& key : chain) key = draws.next();
    return chain;
  }

  /// As events of many requests come: one event of each chain after another.
  void store_interleaved(const std::vector<std::vector<Key>>& chains, HolderId holder) {
    for (std::size_t from = 0; from < chains.front().size(); from += kEvent) {
      for (const std::vector<Key>& chain : chains) blocks->store(holder, event(chain, from));
    }
  }

  static std::span<const Key> event(const std::vector<Key>& chain, std::size_t from) {
    return std::span(chain).subspan(from, std::min(kEvent, chain.size() - from));
  }
};

void print(std::string_view name, std::vector<double> times, double p50, double p99) {
  const Samples samples = Samples::of(std::move(times)).value();
  fmt::print("{:66} p50 {:7.1f} (<= {:.0f}) p90 {:7.1f} p99 {:7.1f} us (<= {:.0f}), n={}\n", name,
             samples.median(), p50, samples.quantile(0.9), samples.quantile(0.99), p99,
             samples.count());
}

void print_rate(std::string_view name, std::vector<double> rates, double target) {
  const Samples samples = Samples::of(std::move(rates)).value();
  fmt::print("{:66} {:7.1f} M blocks/s (>= {:.0f}), least {:.1f}, most {:.1f}, n={}\n", name,
             samples.median(), target, samples.quantile(0), samples.quantile(1), samples.count());
}

/// Reads and writes more than the caches hold.
void flush_caches() {
  static std::vector<unsigned char> other(std::size_t{192} << 20U, 1);
  for (std::size_t at = 0; at < other.size(); at += 64) ++other[at];
}

/// 64 conversations of 131,072 tokens that all 96 engines hold, between as many blocks of others.
void measure_cold() {
  Fixture fixture(std::size_t{4} << 20U);
  std::vector<std::vector<Key>> chains;
  for (int i = 0; i < 64; ++i) chains.push_back(fixture.random_chain(8192));
  for (const HolderId holder : fixture.holders) fixture.store_interleaved(chains, holder);
  Match match(128);
  std::vector<double> times;
  for (std::size_t i = 0; i < 200; ++i) {
    const std::vector<Key>& chain = chains[fixture.draws.below(chains.size())];
    flush_caches();
    // The request's own keys were computed right before.
    PEGA_ASSERT(std::count(chain.begin(), chain.end(), 0) == 0, "a key is 0");
    const double begin = cpu_us();
    fixture.blocks->match(chain, match);
    times.push_back(cpu_us() - begin);
    PEGA_ASSERT(match.gpu(fixture.holders[95]) == chain.size(), "{}", match.longest);
  }
  print("8,192 blocks x 96 holders, cold, events of 64 streams interleaved", times, 60, 100);
}

void measure_warm(std::size_t length, double target) {
  Fixture fixture(std::size_t{1} << 20U);
  const std::vector<Key> chain = fixture.random_chain(length);
  for (const HolderId holder : fixture.holders) fixture.blocks->store(holder, chain);
  Match match(128);
  std::vector<double> times;
  for (int i = 0; i < 2000; ++i) {
    const double begin = cpu_us();
    fixture.blocks->match(chain, match);
    times.push_back(cpu_us() - begin);
    PEGA_ASSERT(match.gpu(fixture.holders[95]) == chain.size(), "{}", match.longest);
  }
  print(fmt::format("{} blocks x 96 holders, warm", length), times, target, target);
}

/// Each engine has another part of the chain.
void measure_staggered() {
  Fixture fixture(std::size_t{1} << 20U);
  const std::vector<Key> chain = fixture.random_chain(8192);
  for (const HolderId holder : fixture.holders) {
    fixture.blocks->store(holder, std::span(chain).first(600 + fixture.draws.below(4000)));
  }
  Match match(128);
  std::vector<double> times;
  for (int i = 0; i < 2000; ++i) {
    const double begin = cpu_us();
    fixture.blocks->match(chain, match);
    times.push_back(cpu_us() - begin);
  }
  print("8,192 blocks, 96 holders that end after 600 to 4,600, warm", times, 60, 100);
}

/// New blocks of 64 streams, each of an engine of its own.
void measure_events() {
  std::vector<double> stored;
  std::vector<double> repeated;
  std::vector<double> erased;
  std::vector<double> beyond;
  for (int run = 0; run < 7; ++run) {
    Fixture fixture(std::size_t{4} << 20U);
    std::vector<std::vector<Key>> chains;
    for (int i = 0; i < 64; ++i) chains.push_back(fixture.random_chain(32768));
    const auto rate_of = [&](const auto& apply) {
      const double begin = cpu_us();
      for (std::size_t from = 0; from < 32768; from += kEvent) {
        for (std::size_t i = 0; i < chains.size(); ++i) apply(i, Fixture::event(chains[i], from));
      }
      return static_cast<double>(chains.size()) * 32768 / (cpu_us() - begin);
    };
    BlockIndex& blocks = *fixture.blocks;
    const auto& holders = fixture.holders;
    stored.push_back(rate_of([&](std::size_t i, auto keys) { blocks.store(holders[i], keys); }));
    repeated.push_back(
        rate_of([&](std::size_t i, auto keys) { blocks.store(holders[i + 1], keys); }));
    erased.push_back(rate_of([&](std::size_t i, auto keys) { blocks.erase(holders[i], keys); }));
    for (int more = 0; more < 2; ++more) {
      for (auto& chain : chains) chain = fixture.random_chain(32768);
      beyond.push_back(rate_of([&](std::size_t i, auto keys) { blocks.store(holders[i], keys); }));
    }
    beyond.erase(beyond.end() - 2);  // The first of them still filled the index.
  }
  print_rate("events of new blocks, 64 streams", stored, 15);
  print_rate("the same blocks stored by second engines", repeated, 15);
  print_rate("erased for the first engines", erased, 15);
  print_rate("new blocks into a full index, which forgets as many", beyond, 10);
}

/// Stores and erases of events, and matches of 16 events, of random chains and engines.
void measure_mixed() {
  std::vector<double> rates;
  for (int run = 0; run < 7; ++run) {
    Fixture fixture(std::size_t{4} << 20U);
    std::vector<std::vector<Key>> chains;
    for (int i = 0; i < 512; ++i) chains.push_back(fixture.random_chain(4096));
    Match match(128);
    double blocks = 0;
    const double begin = cpu_us();
    for (int i = 0; i < 60'000; ++i) {
      const std::vector<Key>& chain = chains[fixture.draws.below(chains.size())];
      const HolderId holder = fixture.holders[fixture.draws.below(kHolders)];
      const std::size_t from = fixture.draws.below(chain.size() / kEvent) * kEvent;
      const std::uint64_t choice = fixture.draws.below(20);
      if (choice < 12) {
        fixture.blocks->store(holder, Fixture::event(chain, from));
        blocks += kEvent;
      } else if (choice < 19) {
        fixture.blocks->erase(holder, Fixture::event(chain, from));
        blocks += kEvent;
      } else {
        fixture.blocks->match(chain, match);
        blocks += match.longest;
      }
    }
    rates.push_back(blocks / (cpu_us() - begin));
  }
  print_rate("mixed: 60 % stores, 35 % erases, 5 % matches, random engines", rates, 10);
}

void print_bytes(std::string_view name, const BlockIndex::Stats& stats) {
  const double blocks = static_cast<double>(stats.blocks);
  fmt::print("{:66} {:7.1f} B a block (<= 24) + sets {:.1f} B a block ({} sets, {:.1f} MB)\n", name,
             static_cast<double>(stats.block_bytes) / blocks,
             static_cast<double>(stats.set_bytes) / blocks, stats.sets,
             static_cast<double>(stats.set_bytes) / 1e6);
}

void measure_bytes() {
  constexpr std::size_t kBlocks = std::size_t{1} << 20U;
  Fixture few(kBlocks);
  Fixture by_event(kBlocks);
  Fixture by_block(kBlocks);
  for (std::size_t at = 0; at + kEvent <= kBlocks; at += kEvent) {
    const std::vector<Key> event = few.random_chain(kEvent);
    for (std::size_t i = 0; i < kHolders; ++i) {
      if (i % 8 == at / kEvent % 8) few.blocks->store(few.holders[i], event);
      if (few.draws.below(8) == 0) by_event.blocks->store(few.holders[i], event);
      std::vector<Key> some;
      for (const Key key : event) {
        if (few.draws.below(8) == 0) some.push_back(key);
      }
      by_block.blocks->store(few.holders[i], some);
    }
  }
  print_bytes("memory, full index, 12 of 96 engines hold each block", few.blocks->stats());
  print_bytes("the same, random engines for each event", by_event.blocks->stats());
  print_bytes("the same, random engines for each block", by_block.blocks->stats());
}

int run(int argc, char** argv) {
  fmt::print("{}\n", heading("index of blocks", conditions_now(kSeed)));
  if (argc > 1 && std::string_view(argv[1]) == "warm") {
    measure_warm(8192, 60);
    return 0;
  }
  measure_cold();
  measure_warm(8192, 60);
  measure_warm(15000, 12);
  measure_staggered();
  measure_events();
  measure_mixed();
  measure_bytes();
  return 0;
}

}  // namespace
}  // namespace pegaflow::perf

int main(int argc, char** argv) { return pegaflow::perf::run(argc, argv); }
