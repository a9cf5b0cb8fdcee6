#include "index/placement/placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "index/placement/state.h"

namespace pegaflow::index {

namespace {

constexpr std::uint32_t kMostEngines = 4096;
/// Another router's request without a first token ends after its predicted time times 4, and 2 s.
constexpr double kExpiryFactor = 4;
constexpr double kExpirySeconds = 2;
/// The router knows its own requests until they end; this is for one that it forgot. Ending them
/// earlier would hide a queue that is longer than predicted, and send still more requests there.
constexpr double kOpenSeconds = 1800;
constexpr std::size_t kLearningSamples = 8;

Result<void> in_range(const char* name, std::uint64_t value, std::uint64_t least,
                      std::uint64_t most) {
  if (value >= least && value <= most) return {};
  return fail(Errc::kInvalidArgument, "placement: {} is {}, not {} to {}", name, value, least,
              most);
}

Result<void> at_least_zero(const char* name, double value) {
  if (std::isfinite(value) && value >= 0) return {};
  return fail(Errc::kInvalidArgument, "placement: {} is {}, not a number of at least 0", name,
              value);
}

bool is_usable(const LinkRate& rate) {
  return std::isfinite(rate.bytes_per_second) && rate.bytes_per_second > 0 &&
         std::isfinite(rate.latency_seconds) && rate.latency_seconds >= 0;
}

}  // namespace

PlacementState::PlacementState(const PlacementOptions& its_options)
    : options(its_options),
      draw(its_options.seed),
      accounts({.max_engines = its_options.max_engines,
                .max_requests = its_options.max_requests,
                .max_routers = its_options.max_routers}),
      turns(its_options.max_routers),
      engines(its_options.max_engines),
      nodes(its_options.max_nodes),
      links(std::size_t{its_options.max_nodes} * its_options.max_nodes) {
  candidates.reserve(options.max_engines);
  partners.reserve(options.max_engines);
}

Placement::Placement(std::unique_ptr<PlacementState> state) : state_(std::move(state)) {}
Placement::~Placement() = default;

Result<std::unique_ptr<Placement>> Placement::create(const Options& options) {
  PEGA_TRY(in_range("max_engines", options.max_engines, 1, kMostEngines));
  PEGA_TRY(in_range("max_nodes", options.max_nodes, 1, kMostEngines));
  PEGA_TRY(in_range("max_requests", options.max_requests, 1, 1U << 24U));
  PEGA_TRY(in_range("max_routers", options.max_routers, 1, 256));
  PEGA_TRY(at_least_zero("bytes_per_token", options.bytes_per_token));
  PEGA_TRY(at_least_zero("band_seconds", options.band_seconds));
  PEGA_TRY(at_least_zero("band_share", options.band_share));
  PEGA_TRY(at_least_zero("decode_weight", options.decode_weight));
  PEGA_TRY(at_least_zero("delay_weight", options.delay_weight));
  PEGA_TRY(at_least_zero("space_weight", options.space_weight));
  if (!(options.room_from >= 0 && options.room_from < 1)) {
    return fail(Errc::kInvalidArgument, "placement: room_from is {}, not in [0, 1)",
                options.room_from);
  }
  return std::unique_ptr<Placement>(new Placement(std::make_unique<PlacementState>(options)));
}

// ---- the fleet

Result<EngineId> Placement::add_engine(const EngineSetup& setup) {
  if (setup.node != kNoNode && !state_->has_node(setup.node)) {
    return fail(Errc::kInvalidArgument, "placement: an engine has the unknown node {}", setup.node);
  }
  for (EngineId id = 0; id < state_->engines.size(); ++id) {
    if (state_->engines[id].used) continue;
    state_->engines[id] = {};
    state_->engines[id].used = true;
    state_->engines[id].setup = setup;
    state_->engines[id].rate = PrefillRate(setup.rate);
    ++state_->engine_count;
    return id;
  }
  return fail(Errc::kOutOfCapacity, "placement: there are {} engines, the limit",
              state_->engine_count);
}

void Placement::remove_engine(EngineId engine) {
  if (!state_->has_engine(engine)) return;
  state_->accounts.forget_engine(engine);
  state_->engines[engine] = {};
  --state_->engine_count;
}

Result<NodeId> Placement::add_node() {
  for (NodeId id = 0; id < state_->nodes.size(); ++id) {
    if (state_->nodes[id].used) continue;
    state_->nodes[id] = {.used = true, .pool = state_->options.pool};
    return id;
  }
  return fail(Errc::kOutOfCapacity, "placement: there are {} nodes, the limit",
              state_->nodes.size());
}

void Placement::set_node(EngineId engine, NodeId node) {
  if (!state_->has_engine(engine) || (node != kNoNode && !state_->has_node(node))) return;
  state_->engines[engine].setup.node = node;
}

void Placement::remove_node(NodeId node) {
  if (!state_->has_node(node)) return;
  state_->nodes[node] = {};
  for (PlacementState::Engine& engine : state_->engines) {
    if (engine.setup.node == node) engine.setup.node = kNoNode;
  }
  for (NodeId other = 0; other < state_->options.max_nodes; ++other) {
    state_->links[std::size_t{node} * state_->options.max_nodes + other] = {};
    state_->links[std::size_t{other} * state_->options.max_nodes + node] = {};
  }
}

void Placement::set_link(NodeId from, NodeId to, LinkRate rate) {
  if (!state_->has_node(from) || !state_->has_node(to) || !is_usable(rate)) return;
  state_->links[std::size_t{from} * state_->options.max_nodes + to] = {
      .latency_seconds = static_cast<float>(rate.latency_seconds),
      .bytes_per_second = static_cast<float>(rate.bytes_per_second)};
}

void Placement::set_pool(NodeId node, LinkRate rate) {
  if (state_->has_node(node) && is_usable(rate)) state_->nodes[node].pool = rate;
}

void Placement::set_bytes_per_token(double bytes) {
  if (std::isfinite(bytes) && bytes >= 0) state_->options.bytes_per_token = bytes;
}

void Placement::set_load(EngineId engine, const EngineLoad& load, TimePoint now) {
  if (!state_->has_engine(engine) || !std::isfinite(load.kv_use)) return;
  state_->engines[engine].load = load;
  state_->engines[engine].load.kv_use = std::clamp(load.kv_use, 0.0, 1.0);
  state_->engines[engine].load_at = seconds_of(now);
  const std::uint32_t known = state_->accounts.prefills(engine);
  state_->engines[engine].strangers = load.waiting - std::min(load.waiting, known);
}

// ---- decisions

Result<void> PlacementState::check(const PlacementRequest& request) const {
  if (request.prompt_tokens == 0 || request.block_tokens == 0) {
    return fail(Errc::kInvalidArgument, "placement: a prompt of {} tokens in blocks of {}",
                request.prompt_tokens, request.block_tokens);
  }
  for (const Candidate& candidate : request.candidates) {
    if (has_engine(candidate.engine)) return {};
  }
  return fail(Errc::kInvalidArgument, "placement: none of {} candidates is an engine",
              request.candidates.size());
}

Result<Decision> Placement::choose(const PlacementRequest& request, TimePoint now) {
  PlacementState& state = *state_;
  PEGA_TRY(state.check(request));
  state.price(request, seconds_of(now));
  ++state.counts.decisions;

  const std::vector<Terms>& all = state.candidates;
  double least = all.front().cost;
  for (const Terms& terms : all) least = std::min(least, terms.cost);
  Decision decision;
  decision.terms = all;
  decision.band = std::max(state.options.band_seconds, state.options.band_share * least);
  std::uint64_t fewest = ~std::uint64_t{0};
  std::uint64_t equals = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].cost > least + decision.band) continue;
    ++decision.near_equals;
    if (all[i].pull_bytes > fewest) continue;
    if (all[i].pull_bytes < fewest) equals = 0;
    fewest = all[i].pull_bytes;
    // Each of the equals is kept with the same chance.
    if (state.draw.below(++equals) == 0) decision.chosen = i;
  }

  const Terms& best = decision.best();
  const auto cached = static_cast<double>(best.reach_blocks) * request.block_tokens;
  decision.predicted_cached_tokens =
      static_cast<std::uint32_t>(std::min(cached, request.prompt_tokens - 1.0));
  if (best.source != kNoNode) {
    std::size_t count = 0;
    const NodeId own = state.engines[best.engine].setup.node;
    for (std::size_t i = 0; i < state.shortlisted; ++i) {
      const PullSource& source = state.shortlist[i];
      if (source.node == own || source.blocks <= best.local_blocks) continue;
      // The chosen source comes first, whatever its length.
      if (source.node == best.source) {
        std::copy_backward(state.owners.begin(), state.owners.begin() + 2, state.owners.end());
        state.owners[0] = source;
        count = std::min(count + 1, state.owners.size());
      } else if (count < state.owners.size()) {
        state.owners[count++] = source;
      }
    }
    decision.sources = {state.owners.data(), count};
  }
  return decision;
}

Result<PairDecision> Placement::choose_pair(const PlacementRequest& prefill,
                                            const PlacementRequest& decode, TimePoint now) {
  PlacementState& state = *state_;
  PEGA_TRY(state.check(prefill));
  PEGA_TRY(state.check(decode));
  state.price(decode, seconds_of(now));
  std::swap(state.candidates, state.partners);
  state.price(prefill, seconds_of(now));
  ++state.counts.decisions;
  return state.pair(decode);
}

Result<PairDecision> Placement::choose_decode(EngineId from, const PlacementRequest& decode,
                                              TimePoint now) {
  PlacementState& state = *state_;
  PEGA_TRY(state.check(decode));
  state.price(decode, seconds_of(now));
  std::swap(state.candidates, state.partners);
  const auto made = state.has_engine(from) ? state.partner_of(from, decode) : std::nullopt;
  if (!made) {
    return fail(Errc::kInvalidArgument, "placement: engine {} or all of {} candidates have no node",
                from, decode.candidates.size());
  }
  ++state.counts.decisions;
  return *made;
}

// ---- accounts

Result<void> PlacementState::record(const PlacementRecord& record, std::uint32_t predicted_cached,
                                    double now) {
  Engine& engine = engines[record.engine];
  const double prefill = engine.rate.seconds(record.uncached_tokens);
  const double wait =
      std::max(0.0, accounts.wait(record.engine, now, engine.rate.tokens_per_second()));
  const double ready = std::max(0.0, record.ready_seconds);
  const double first = std::max(wait, ready) + prefill;
  PEGA_TRY(accounts.add(
      {.id = record.request,
       .router = record.router,
       .engine = record.engine,
       .prompt_tokens = record.prompt_tokens,
       .uncached_tokens = record.uncached_tokens,
       .prefill = prefill,
       .placed = now,
       .ready = now + ready,
       .first = now + first,
       .expires =
           now + (record.router == 0 ? kOpenSeconds : kExpiryFactor * first + kExpirySeconds),
       .predicted_cached = predicted_cached}));
  const double fresh = record.uncached_tokens +
                       (options.bytes_per_token > 0
                            ? static_cast<double>(record.pull_bytes) / options.bytes_per_token
                            : 0);
  engine.inflow.add(fresh, now);
  inflow.add(fresh, now);
  arrivals.add(1, now);
  work.add(prefill, now);
  const NodeId to = engine.setup.node;
  if (record.pull_bytes > 0 && has_node(record.source) && has_node(to)) {
    const double starts =
        std::max({now, nodes[record.source].sends_until, nodes[to].receives_until});
    const double ends =
        starts + link(record.source, to).seconds(static_cast<double>(record.pull_bytes));
    nodes[record.source].sends_until = nodes[to].receives_until = ends;
    ++counts.pulls;
  }
  return {};
}

Result<PlacementRecord> Placement::placed(std::uint64_t id, const Terms& terms,
                                          std::uint32_t prompt_tokens, TimePoint now) {
  if (!state_->has_engine(terms.engine)) {
    return fail(Errc::kInvalidArgument, "placement: request {} has the unknown engine {}", id,
                terms.engine);
  }
  const PlacementRecord record{.stage = Stage::kPlaced,
                               .router = 0,
                               .request = id,
                               .engine = terms.engine,
                               .prompt_tokens = prompt_tokens,
                               .uncached_tokens = terms.uncached_tokens,
                               .source = terms.source,
                               .pull_bytes = terms.pull_bytes,
                               .ready_seconds = terms.fetch};
  const std::uint32_t cached = prompt_tokens - std::min(prompt_tokens, terms.uncached_tokens);
  state_->turns.placed(0, seconds_of(now));
  const Result<void> added = state_->record(record, cached, seconds_of(now));
  if (!added) {
    ++state_->counts.uncounted;
    return tl::unexpected<Error>(added.error());
  }
  return record;
}

void PlacementState::lend_rate(const PrefillRate& measured) {
  for (Engine& engine : engines) {
    if (!engine.used || engine.rate.samples() > 0) continue;
    PrefillRate::Options rate = engine.setup.rate;
    rate.start_tokens_per_second = measured.tokens_per_second();
    rate.start_floor_seconds = measured.floor_seconds();
    engine.rate = PrefillRate(rate);
  }
}

bool Placement::first_token(std::uint64_t id, TimePoint now) {
  const Accounts::Request* const request = state_->accounts.find(0, id);
  if (request == nullptr) return false;
  PlacementState::Engine& engine = state_->engines[request->engine];
  const auto served = state_->accounts.first_token(0, id, seconds_of(now));
  if (!served) return false;
  state_->accounts.find(0, id)->expires = seconds_of(now) + kOpenSeconds;
  if (served->in_order) {
    engine.rate.add(served->uncached_tokens, served->seconds);
    engine.rate_at = seconds_of(now);
    state_->lend_rate(engine.rate);
  }
  if (engine.rate.samples() > kLearningSamples) {
    engine.error.add_time(served->predicted, served->measured);
  }
  return true;
}

bool Placement::computed(std::uint64_t id, TimePoint now) {
  if (!state_->accounts.first_token(0, id, seconds_of(now))) return false;
  state_->accounts.find(0, id)->expires = seconds_of(now) + kOpenSeconds;
  return true;
}

void Placement::lost(std::uint64_t id, std::uint32_t tokens) {
  const Accounts::Request* const request = state_->accounts.find(0, id);
  if (request == nullptr) return;
  const std::uint32_t uncached =
      request->uncached_tokens +
      std::min(tokens,
               request->prompt_tokens - std::min(request->prompt_tokens, request->uncached_tokens));
  state_->accounts.set_work(0, id, uncached,
                            state_->engines[request->engine].rate.seconds(uncached));
}

bool Placement::done(std::uint64_t id, TimePoint now) {
  return state_->accounts.end(0, id, seconds_of(now)).has_value();
}

void Placement::reported_cached(std::uint64_t id, std::uint32_t cached_tokens) {
  const Accounts::Request* const request = state_->accounts.find(0, id);
  if (request == nullptr) return;
  state_->engines[request->engine].error.add_cached(request->prompt_tokens,
                                                    request->predicted_cached, cached_tokens);
}

void Placement::apply(const PlacementRecord& record, TimePoint now) {
  if (record.router == 0 || record.router >= state_->options.max_routers) return;
  const double at = seconds_of(now);
  switch (record.stage) {
    case Stage::kPlaced:
      state_->turns.placed(record.router, at);
      // A full account or a repeated record changes nothing: heartbeats carry the sums.
      if (state_->has_engine(record.engine) && !state_->record(record, 0, at)) {
        ++state_->counts.uncounted;
      }
      break;
    case Stage::kFirstToken:
      if (state_->accounts.first_token(record.router, record.request, at)) {
        state_->accounts.find(record.router, record.request)->expires = at + kOpenSeconds;
      }
      break;
    case Stage::kDone:
      state_->accounts.end(record.router, record.request, at);
      break;
  }
}

void Placement::apply(const EngineSums& sums, TimePoint now) {
  if (sums.router == 0 || !state_->has_engine(sums.engine)) return;
  if (state_->accounts.heal(sums, seconds_of(now))) ++state_->counts.healed;
}

void Placement::set_turns(std::span<const RouterId> before, std::span<const RouterId> after) {
  state_->turns.set_others(before, after);
}

bool Placement::is_turn(TimePoint arrived) const {
  return state_->turns.is_next(seconds_of(arrived));
}

Duration Placement::turn_limit(const PlacementRequest& request) const {
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& candidate : request.candidates) {
    if (!state_->has_engine(candidate.engine)) continue;
    const double cached = static_cast<double>(candidate.local_blocks) * request.block_tokens;
    const double uncached = std::max(1.0, request.prompt_tokens - cached);
    least = std::min(least, state_->engines[candidate.engine].rate.seconds(uncached));
  }
  const double seconds = state_->turns.limit(std::isfinite(least) ? least : 0);
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

TimePoint Placement::turn_end(TimePoint arrived, Duration limit) const {
  const double wait =
      state_->turns.end(seconds_of(arrived), std::chrono::duration<double>(limit).count()) -
      seconds_of(arrived);
  return arrived + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait));
}

void Placement::forget_router(RouterId router, TimePoint now) {
  if (router != 0) state_->accounts.forget_router(router, seconds_of(now));
}

EngineSums Placement::sums(EngineId engine) const {
  if (!state_->has_engine(engine)) return {.engine = engine};
  return state_->accounts.sums(0, engine);
}

std::size_t Placement::expire(TimePoint now, std::size_t limit) {
  const std::size_t ended = state_->accounts.expire(seconds_of(now), limit);
  state_->counts.timed_out += ended;
  return ended;
}

// ---- for metrics and /routes

const PrefillRate& Placement::rate(EngineId engine) const {
  return state_->engines.at(engine).rate;
}

PredictionError& Placement::error(EngineId engine) { return state_->engines.at(engine).error; }

double Placement::queue_seconds(EngineId engine, TimePoint now) const {
  return state_->has_engine(engine) ? state_->queue(engine, seconds_of(now)) : 0;
}

LinkRate Placement::link(NodeId from, NodeId to) const {
  if (!state_->has_node(from) || !state_->has_node(to))
    return LinkRate::start(state_->options.lane);
  return state_->link(from, to);
}

Placement::Stats Placement::stats() const {
  Stats stats = state_->counts;
  stats.inflight = state_->accounts.size();
  return stats;
}

}  // namespace pegaflow::index
