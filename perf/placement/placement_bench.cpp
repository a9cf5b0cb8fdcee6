// The router's decisions: placement among 96 engines, beside the match of the same prompt in the
// index. Times are CPU time of this thread.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <time.h>

#include "base/assert.h"
#include "index/block_index.h"
#include "index/placement/expected_blocks.h"
#include "index/placement/placement.h"
#include "perf/lib/figures.h"
#include "perf/lib/random_draws.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint32_t kEngines = 96;
constexpr std::size_t kBlocks = 8192;
constexpr std::size_t kDecisions = 5000;
constexpr std::uint64_t kSeed = 17;
constexpr std::uint64_t kInFlight = 8 * kEngines;

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

/// 96 nodes with one engine each; all pools hold a part of the prompt.
struct Fixture {
  std::unique_ptr<index::BlockIndex> blocks;
  std::unique_ptr<index::Placement> placement;
  std::unique_ptr<index::ExpectedBlocks> expected;
  std::vector<index::HolderId> engines;
  std::vector<index::HolderId> pools;
  std::vector<index::Key> chain;

  Fixture() : chain(kBlocks) {
    blocks = std::move(*index::BlockIndex::create({.max_blocks = 1U << 20U, .max_holders = 256}));
    placement =
        std::move(*index::Placement::create({.max_engines = kEngines, .max_nodes = kEngines}));
    expected = std::make_unique<index::ExpectedBlocks>(*index::ExpectedBlocks::create({}));
    Draws draws(kSeed);
    for (index::Key& key : chain) key = draws.next();
    for (std::uint32_t i = 0; i < kEngines; ++i) {
      const index::NodeId node = *placement->add_node();
      PEGA_ASSERT(placement->add_engine({.node = node}), "engine {}", i);
      engines.push_back(*blocks->add_engine());
      pools.push_back(*blocks->add_node());
      blocks->attach(engines.back(), pools.back());
      const std::span<const index::Key> all = chain;
      blocks->store(engines.back(), all.first(draws.below(kBlocks / 4) + 1), true);
      blocks->store(pools.back(), all.first(draws.below(kBlocks) + 1), true);
    }
  }
};

struct Times {
  std::vector<double> match;
  std::vector<double> decision;
};

Times measure() {
  Fixture fixture;
  index::Match match(256);
  std::vector<std::uint32_t> expected(kEngines);
  std::vector<index::Candidate> candidates(kEngines);
  std::vector<index::PullSource> sources;
  sources.reserve(kEngines);
  Times times;
  for (std::uint64_t id = 0; id < kDecisions; ++id) {
    const TimePoint now{std::chrono::milliseconds(id)};
    const double began = cpu_us();
    fixture.blocks->match(fixture.chain, match);
    const double matched = cpu_us();
    std::fill(expected.begin(), expected.end(), 0);
    fixture.expected->match(fixture.chain, now, expected);
    sources.clear();
    for (std::uint32_t i = 0; i < kEngines; ++i) {
      const std::uint32_t gpu = std::max(expected[i], match.gpu(fixture.engines[i]));
      candidates[i] = {.engine = i,
                       .gpu_blocks = gpu,
                       .local_blocks = std::max(gpu, match.local(fixture.engines[i]))};
      sources.push_back({.node = i, .blocks = match.pool(fixture.pools[i])});
    }
    const auto decision = fixture.placement->choose(
        {.prompt_tokens = kBlocks * 16, .candidates = candidates, .sources = sources}, now);
    PEGA_ASSERT(decision, "{}", to_string(decision.error()));
    PEGA_ASSERT(fixture.placement->placed(id, decision->best(), kBlocks * 16, now), "{}", id);
    if (id >= kInFlight) {
      fixture.placement->first_token(id - kInFlight, now);
      fixture.placement->done(id - kInFlight, now);
    }
    times.decision.push_back(cpu_us() - matched);
    times.match.push_back(matched - began);
  }
  return times;
}

}  // namespace
}  // namespace pegaflow::perf

int main() {
  using namespace pegaflow;        // NOLINT(google-build-using-namespace): this is main.
  using namespace pegaflow::perf;  // NOLINT(google-build-using-namespace)
  Times times = measure();
  const auto match = *Samples::of(std::move(times.match));
  const auto decision = *Samples::of(std::move(times.decision));
  std::vector<Figure> figures;
  for (const double fraction : {0.5, 0.99}) {
    figures.push_back(
        {.run = fmt::format("a decision among 96 engines and 96 pools, p{:.0f}", fraction * 100),
         .params = {},
         .figure = decision.quantile(fraction),
         .unit = "us",
         .bound = match.quantile(fraction),
         .bound_name = "match of its 8,192 blocks",
         .target = std::nullopt,
         .n = kDecisions,
         .spread = fmt::format("least {:.1f} us", decision.quantile(0))});
  }
  fmt::print("{}", table("placement", figures, conditions_now(kSeed)));
}
