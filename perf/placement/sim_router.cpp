#include "perf/placement/sim_router.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "index/block_index.h"
#include "index/placement/expected_blocks.h"

namespace pegaflow::perf {

namespace {

constexpr std::size_t kExpectedBlocks = std::size_t{1} << 17U;

}  // namespace

struct SimRouter::State {
  State(std::size_t nodes, std::unique_ptr<index::BlockIndex> its_index,
        index::ExpectedBlocks its_placed, index::ExpectedBlocks its_computed,
        std::uint32_t max_holders)
      : index(std::move(its_index)),
        placed(std::move(its_placed)),
        computed(std::move(its_computed)),
        match(max_holders),
        placed_blocks(nodes),
        computed_blocks(nodes),
        candidates(nodes) {
    sources.reserve(nodes);
  }

  std::unique_ptr<index::BlockIndex> index;
  index::ExpectedBlocks placed;    ///< The engine will have them when it comes to the request.
  index::ExpectedBlocks computed;  ///< The first token came: the node's pool has them.
  std::vector<index::HolderId> engines;
  std::vector<index::HolderId> pools;
  // Scratch of one choice.
  index::Match match;
  std::vector<std::uint32_t> placed_blocks;
  std::vector<std::uint32_t> computed_blocks;
  std::vector<index::Candidate> candidates;
  std::vector<index::PullSource> sources;
};

Result<std::unique_ptr<SimRouter>> SimRouter::create(std::size_t nodes, const SimHardware& hardware,
                                                     const index::Placement::Options& options) {
  const auto holders = static_cast<std::uint32_t>(2 * nodes);
  const std::size_t blocks = nodes * (hardware.gpu_blocks + hardware.pool_blocks);
  PEGA_TRY_LET(auto index, index::BlockIndex::create(
                               {.max_blocks = 2 * blocks + 4096, .max_holders = holders}));
  PEGA_TRY_LET(auto placement, index::Placement::create(options));
  // Blocks of 512 tokens: each has a cell.
  const index::ExpectedBlocks::Options each{.max_blocks = kExpectedBlocks, .stride = 1};
  PEGA_TRY_LET(auto placed, index::ExpectedBlocks::create(each));
  PEGA_TRY_LET(auto computed, index::ExpectedBlocks::create(each));
  auto state = std::make_unique<State>(nodes, std::move(index), std::move(placed),
                                       std::move(computed), holders);
  std::unique_ptr<SimRouter> router(new SimRouter(std::move(placement), std::move(state)));
  State& its = *router->state_;
  for (std::size_t i = 0; i < nodes; ++i) {
    PEGA_TRY_LET(const index::HolderId engine, its.index->add_engine());
    PEGA_TRY_LET(const index::HolderId pool, its.index->add_node());
    its.index->attach(engine, pool);
    its.engines.push_back(engine);
    its.pools.push_back(pool);
    PEGA_TRY_LET(const index::NodeId node, router->placement_->add_node());
    PEGA_TRY(router->placement_->add_engine({.node = node, .max_num_seqs = hardware.max_num_seqs}));
    router->placement_->set_pool(
        node, {.latency_seconds = 0,
               .bytes_per_second = hardware.block_bytes() / hardware.load_block_seconds});
  }
  // As the servers' `/links` would report after some fetches.
  const index::LinkRate link{.latency_seconds = hardware.link_latency_seconds,
                             .bytes_per_second = hardware.link_bytes_per_second};
  for (index::NodeId from = 0; from < nodes; ++from) {
    for (index::NodeId to = 0; to < nodes; ++to) router->placement_->set_link(from, to, link);
  }
  return router;
}

SimRouter::SimRouter(std::unique_ptr<index::Placement> placement, std::unique_ptr<State> state)
    : placement_(std::move(placement)), state_(std::move(state)) {}

SimRouter::~SimRouter() = default;

index::PlacementRequest SimRouter::look_up(const PlaceRequest& request, double now) {
  state_->index->match(request.chain, state_->match);
  std::fill(state_->placed_blocks.begin(), state_->placed_blocks.end(), 0);
  state_->placed.match(request.chain, time_point(now), state_->placed_blocks);
  std::fill(state_->computed_blocks.begin(), state_->computed_blocks.end(), 0);
  state_->computed.match(request.chain, time_point(now), state_->computed_blocks);
  state_->sources.clear();
  for (std::uint32_t i = 0; i < state_->candidates.size(); ++i) {
    const std::uint32_t gpu =
        std::max(state_->match.gpu(state_->engines[i]), state_->placed_blocks[i]);
    state_->candidates[i] = {
        .engine = i,
        .gpu_blocks = gpu,
        .local_blocks = std::max(gpu, state_->match.local(state_->engines[i]))};
    const std::uint32_t pool =
        std::max(state_->match.pool(state_->pools[i]), state_->computed_blocks[i]);
    if (pool > 0) state_->sources.push_back({.node = i, .blocks = pool});
  }
  return {.prompt_tokens = request.input_tokens,
          .block_tokens = kTraceBlockTokens,
          .candidates = state_->candidates,
          .sources = state_->sources};
}

double SimRouter::turn(const PlaceRequest& request, double now) {
  if (placement_->is_turn(time_point(request.at))) return 0;
  const TimePoint end =
      placement_->turn_end(time_point(request.at), placement_->turn_limit(look_up(request, now)));
  return std::max(0.0, std::chrono::duration<double>(end - time_point(now)).count());
}

SimRouter::Choice SimRouter::choose(std::uint64_t id, const PlaceRequest& request, double now) {
  const Result<index::Decision> decision =
      placement_->choose(look_up(request, now), time_point(now));
  PEGA_ASSERT(decision.has_value(), "{}", decision.error().detail);
  const index::Terms& best = decision->best();
  Choice choice{.choice = {.node = best.engine, .predicted_blocks = best.reach_blocks},
                .record = {}};
  if (!decision->sources.empty()) choice.choice.source = decision->sources.front().node;
  const auto record = placement_->placed(id, best, request.input_tokens, time_point(now));
  PEGA_ASSERT(record.has_value(), "{}", record.error().detail);
  choice.record = *record;
  state_->placed.placed(best.engine, request.chain, time_point(now));
  return choice;
}

void SimRouter::first_token(std::uint64_t id, const PlaceRequest& request, std::uint32_t node,
                            const Served& served) {
  const TimePoint now = time_point(served.first_token);
  placement_->reported_cached(id, request.input_tokens - served.uncached_tokens);
  placement_->first_token(id, now);
  state_->computed.placed(node, request.chain, now);
}

void SimRouter::stored(std::uint32_t node, bool in_pool, std::span<const index::Key> keys) {
  if (!keys.empty())
    state_->index->store(in_pool ? state_->pools[node] : state_->engines[node], keys);
}

void SimRouter::erased(std::uint32_t node, bool in_pool, std::span<const index::Key> keys) {
  if (keys.empty()) return;
  state_->index->erase(in_pool ? state_->pools[node] : state_->engines[node], keys);
  (in_pool ? state_->computed : state_->placed).erased(node, keys);
}

void SimRouter::apply(const index::PlacementRecord& record, const PlaceRequest& request,
                      double now) {
  placement_->apply(record, time_point(now));
  if (record.stage == index::Stage::kPlaced) {
    state_->placed.placed(record.engine, request.chain, time_point(now));
  } else if (record.stage == index::Stage::kFirstToken) {
    state_->computed.placed(record.engine, request.chain, time_point(now));
  }
}

}  // namespace pegaflow::perf
