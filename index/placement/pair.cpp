// The choice of two engines: one for the prompt, one for the answer.

#include <algorithm>
#include <limits>

#include "index/placement/state.h"

namespace pegaflow::index {

namespace {

constexpr std::size_t kBest = 4;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Moves the `kBest` least by `cost` to the front; returns their number.
template <typename Cost>
std::size_t keep_best(std::vector<Terms>& all, const Cost& cost) {
  const std::size_t count = std::min(kBest, all.size());
  std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), all.end(),
                    [&](const Terms& a, const Terms& b) { return cost(a) < cost(b); });
  return count;
}

}  // namespace

// Other decodes slow down an answer as a prefill slows them down.
double PlacementState::decode_load(const Terms& terms) const {
  return options.decode_weight * decode_share(terms.engine) + terms.room;
}

PairDecision PlacementState::cost_of_pair(const Terms& from, const Terms& to,
                                          const PlacementRequest& decode) const {
  PairDecision made;
  made.cost = kInfinity;
  const NodeId source = engines[from.engine].setup.node;
  const NodeId target = engines[to.engine].setup.node;
  if (!has_node(source) || !has_node(target)) return made;
  // The blocks that the decode engine's node lacks come over the link, the rest from its pool.
  const double block_bytes = decode.block_tokens * options.bytes_per_token;
  const double blocks = static_cast<double>(decode.prompt_tokens) / decode.block_tokens;
  const double pulled = source == target ? 0 : std::max(0.0, blocks - to.local_blocks);
  const double loaded = std::max(0.0, blocks - to.gpu_blocks) - pulled;
  made.transfer = (pulled > 0 ? link(source, target).seconds(pulled * block_bytes) : 0) +
                  nodes[target].pool.seconds(loaded * block_bytes);
  made.prefill = from;
  made.decode = to;
  made.decode.prefill = engines[to.engine].rate.seconds(1);
  made.decode.uncached_tokens = 1;
  made.decode.source = kNoNode;
  made.decode.pull_bytes = 0;
  made.cost = from.cost + made.transfer + made.decode.prefill + decode_load(to);
  return made;
}

std::optional<PairDecision> PlacementState::partner_of(EngineId from,
                                                       const PlacementRequest& decode) {
  Terms source;
  source.engine = from;
  PairDecision best;
  best.cost = kInfinity;
  for (const Terms& terms : partners) {
    best.cost = std::min(best.cost, cost_of_pair(source, terms, decode).cost);
  }
  if (best.cost == kInfinity) return std::nullopt;
  const double band = std::max(options.band_seconds, options.band_share * best.cost);
  const double most = best.cost + band;
  std::uint64_t equals = 0;
  for (const Terms& terms : partners) {
    const PairDecision made = cost_of_pair(source, terms, decode);
    // Each of the near-equals is kept with the same chance.
    if (made.cost <= most && draw.below(++equals) == 0) best = made;
  }
  best.alone_cost = kInfinity;
  best.pairs = static_cast<std::uint32_t>(partners.size());
  return best;
}

PairDecision PlacementState::pair(const PlacementRequest& decode) {
  double alone_cost = kInfinity;
  Terms alone;
  for (const Terms& terms : partners) {
    const double cost = terms.cost + options.decode_weight * decode_share(terms.engine);
    if (cost >= alone_cost) continue;
    alone_cost = cost;
    alone = terms;
  }
  const std::size_t prefills = keep_best(candidates, [](const Terms& its) { return its.cost; });
  // The decode engine that is best for a pair need not be the one that is best alone: what it lacks
  // of the prompt is transferred, not computed.
  const double block_seconds = decode.block_tokens * options.bytes_per_token /
                               LinkRate::start(options.lane).bytes_per_second;
  const std::size_t decodes = keep_best(partners, [&](const Terms& its) {
    return decode_load(its) - its.local_blocks * block_seconds;
  });
  PairDecision best;
  best.cost = kInfinity;
  std::uint32_t pairs = 0;
  for (std::size_t p = 0; p < prefills; ++p) {
    for (std::size_t d = 0; d < decodes; ++d, ++pairs) {
      const PairDecision made = cost_of_pair(candidates[p], partners[d], decode);
      if (made.cost < best.cost) best = made;
    }
  }
  best.pairs = pairs;
  best.alone_cost = alone_cost;
  if (alone_cost <= best.cost) {
    best.skips_prefill = true;
    best.prefill = {};
    best.decode = alone;
    best.transfer = 0;
    best.cost = alone_cost;
  }
  return best;
}

}  // namespace pegaflow::index
