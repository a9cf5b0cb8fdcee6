// The terms of the cost. docs/routing.md describes each of them.

#include <algorithm>
#include <cmath>

#include "index/placement/state.h"

namespace pegaflow::index {

namespace {

/// A report of an engine older than this corrects nothing.
constexpr double kReportLifetime = 10;
/// `delay` assumes at least so much idle time: its formula has a pole at a full fleet.
constexpr double kLeastIdle = 0.2;
/// Seconds that `room` reaches when the KV memory is full, as a multiple of the prefill: a
/// preempted request is computed again, and so is the one that it displaced.
constexpr double kFullRoom = 4;
/// A learned rate counts fully for so many seconds, and then fades with this time constant.
constexpr double kRateFresh = 10;
constexpr double kRateFades = 30;
/// Samples without which a rate is not compared with others.
constexpr std::uint64_t kRateSamples = 4;

bool is_fresh(const PlacementState::Engine& engine, double now) {
  return engine.load_at >= 0 && now - engine.load_at < kReportLifetime;
}

}  // namespace

LinkRate PlacementState::link(NodeId from, NodeId to) const noexcept {
  const Link& measured = links[std::size_t{from} * options.max_nodes + to];
  if (measured.bytes_per_second > 0) {
    return {.latency_seconds = measured.latency_seconds,
            .bytes_per_second = measured.bytes_per_second};
  }
  return LinkRate::start(options.lane);
}

PlacementState::Shared PlacementState::shared(const PlacementRequest& request,
                                              double now) const noexcept {
  const double count = std::max(1U, engine_count);
  Shared made{.tokens = static_cast<double>(request.prompt_tokens),
              .block_tokens = static_cast<double>(request.block_tokens),
              .block_bytes = request.block_tokens * options.bytes_per_token,
              .inflow = inflow.per_second(now) / count,
              .arrivals = arrivals.per_second(now) / count,
              .idle = std::max(kLeastIdle, 1 - work.per_second(now) / count)};
  for (const Candidate& candidate : request.candidates) {
    if (!has_engine(candidate.engine)) continue;
    const Engine& engine = engines[candidate.engine];
    if (engine.rate.samples() < kRateSamples || now - engine.rate_at > kRateFresh) continue;
    ++made.busy;
    made.busy_floor += engine.rate.floor_seconds();
    made.busy_slope += 1 / engine.rate.tokens_per_second();
  }
  if (made.busy > 0) {
    made.busy_floor /= made.busy;
    made.busy_slope /= made.busy;
  }
  return made;
}

double PlacementState::prefill_seconds(EngineId id, double tokens, const Shared& request,
                                       double now) const noexcept {
  const Engine& engine = engines[id];
  const double own = engine.rate.seconds(tokens);
  const double age = now - engine.rate_at;
  if (request.busy == 0 || engine.rate.samples() == 0 || age <= kRateFresh || tokens <= 0 ||
      accounts.prefills(id) > 0) {
    return own;
  }
  const double others = request.busy_floor + request.busy_slope * tokens;
  if (others >= own) return own;
  return others + (own - others) * std::exp((kRateFresh - age) / kRateFades);
}

void PlacementState::shorten(std::span<const PullSource> sources, double now) {
  shortlisted = 0;
  // Longest first; among equals the owner that can send first. Insertion into a short sorted list.
  const auto before = [&](const PullSource& a, const PullSource& b) {
    if (a.blocks != b.blocks) return a.blocks > b.blocks;
    return std::max(now, nodes[a.node].sends_until) < std::max(now, nodes[b.node].sends_until);
  };
  for (const PullSource& source : sources) {
    if (source.blocks == 0 || !has_node(source.node)) continue;
    std::size_t at = shortlisted;
    if (at == kMaxSources) {
      if (!before(source, shortlist[at - 1])) continue;
      --at;
    } else {
      ++shortlisted;
    }
    for (; at > 0 && before(source, shortlist[at - 1]); --at) shortlist[at] = shortlist[at - 1];
    shortlist[at] = source;
  }
}

double PlacementState::queue(EngineId id, double now) const noexcept {
  const Engine& engine = engines[id];
  double wait = accounts.wait(id, now, engine.rate.tokens_per_second());
  // Requests that no router of ours placed: the engine reported more in its queue than the account
  // had then. It has computed since.
  if (engine.strangers > 0 && is_fresh(engine, now)) {
    const double mean =
        accounts.prefills(id) > 0 ? accounts.mean_prefill(id) : engine.rate.seconds(1024);
    wait += std::max(0.0, engine.strangers * mean - (now - engine.load_at));
  }
  return std::max(0.0, wait);
}

double PlacementState::decode_share(EngineId id) const noexcept {
  const Engine& engine = engines[id];
  if (!engine.setup.decodes || engine.setup.max_num_seqs == 0) return 0;
  const double share = static_cast<double>(accounts.decodes(id)) / engine.setup.max_num_seqs;
  return std::min(1.0, share);
}

double PlacementState::room(EngineId id, double prefill, double now) const noexcept {
  const Engine& engine = engines[id];
  if (!is_fresh(engine, now) || engine.load.kv_use <= options.room_from) return 0;
  const double over = (engine.load.kv_use - options.room_from) / (1 - options.room_from);
  return kFullRoom * over * over * std::max(prefill, engine.rate.seconds(1024));
}

Terms PlacementState::terms(const Candidate& candidate, const Shared& request, double now) const {
  const Engine& engine = engines[candidate.engine];
  const NodeId node = engine.setup.node;
  const bool has_pool = has_node(node);
  const std::uint32_t gpu = candidate.gpu_blocks;
  const std::uint32_t local = std::max(gpu, has_pool ? candidate.local_blocks : gpu);

  Terms base{.engine = candidate.engine, .gpu_blocks = gpu, .local_blocks = local};
  base.queue = queue(candidate.engine, now);
  const double share = decode_share(candidate.engine);
  const double load = has_pool ? nodes[node].pool.seconds((local - gpu) * request.block_bytes) : 0;
  // New blocks evict old ones, wherever they come from; a node that takes many evicts younger ones.
  if (request.inflow > 0) {
    const double fresh = std::max(0.0, request.tokens - local * request.block_tokens);
    base.space = options.space_weight * fresh / engine.rate.tokens_per_second() *
                 engine.inflow.per_second(now) / request.inflow;
  }

  const auto with = [&](NodeId source, std::uint32_t reach, double pull_bytes, double fetch) {
    Terms terms = base;
    terms.source = source;
    terms.reach_blocks = reach;
    // An engine computes at least one token to have something to sample from.
    const double uncached = std::max(1.0, request.tokens - reach * request.block_tokens);
    terms.uncached_tokens = static_cast<std::uint32_t>(uncached);
    terms.pull_bytes = static_cast<std::uint64_t>(pull_bytes);
    terms.fetch = fetch;
    terms.prefill = prefill_seconds(candidate.engine, uncached, request, now);
    // While this prefill is in the queue, `arrivals` requests a second come to wait for it; the
    // queue lasts longer than its work, because it grows meanwhile.
    terms.delay = options.delay_weight * request.arrivals * terms.prefill *
                  (terms.queue + terms.prefill / 2) / request.idle;
    terms.decode = options.decode_weight * share * terms.prefill;
    terms.room = room(candidate.engine, terms.prefill, now);
    terms.cost = terms.first_token() + terms.delay + terms.decode + terms.space + terms.room;
    return terms;
  };

  Terms best = with(kNoNode, local, 0, load);
  if (!has_pool) return best;
  for (std::size_t i = 0; i < shortlisted; ++i) {
    const PullSource& source = shortlist[i];
    if (source.node == node || source.blocks <= local) continue;
    const double bytes = (source.blocks - local) * request.block_bytes;
    const double starts =
        std::max({now, nodes[source.node].sends_until, nodes[node].receives_until});
    const double pull = (starts - now) + link(source.node, node).seconds(bytes);
    const Terms other = with(source.node, source.blocks, bytes, load + pull);
    if (other.cost < best.cost) best = other;
  }
  return best;
}

void PlacementState::price(const PlacementRequest& request, double now) {
  shorten(request.sources, now);
  const Shared of_request = shared(request, now);
  candidates.clear();
  for (const Candidate& candidate : request.candidates) {
    if (!has_engine(candidate.engine) || candidates.size() == options.max_engines) continue;
    candidates.push_back(terms(candidate, of_request, now));
  }
}

}  // namespace pegaflow::index
