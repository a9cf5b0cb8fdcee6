// Pairs of KvRouting: a prefill and a decode engine for one request.

#include <algorithm>

#include "router/kv/kv_routing.h"

namespace pegaflow::router {

bool KvRouting::choose_pair(std::span<const Candidate> prefills, std::span<const Candidate> decodes,
                            KvRequest& request, TimePoint now) {
  request.pair.reset();
  // Without a node the way from one engine to the other has no price.
  const auto has_pool = [](const Option& option) { return option.pool != nullptr; };
  const std::uint32_t block_tokens = collect(prefills, request, now);
  if (block_tokens == 0 || std::none_of(options_.begin(), options_.end(), has_pool)) return false;
  prefill_options_.swap(options_);
  prefill_candidates_.swap(candidates_);
  const std::uint32_t other_tokens = collect(decodes, request, now);
  if (other_tokens != block_tokens) return false;
  if (std::none_of(options_.begin(), options_.end(), has_pool)) return false;
  const index::PlacementRequest answer = placement_request(request, block_tokens);
  index::PlacementRequest prompt = answer;
  prompt.candidates = prefill_candidates_;
  const auto made = placement_->choose_pair(prompt, answer, now);
  if (!made) return false;
  ++(made->skips_prefill ? stats_.skipped_prefills : stats_.pairs);
  KvPair pair{.skips_prefill = made->skips_prefill,
              .transfer = made->transfer,
              .cost = made->cost,
              .alone_cost = made->alone_cost};
  for (const Option& option : prefill_options_) {
    if (pair.skips_prefill || option.rank->place != made->prefill.engine) continue;
    pair.prefill = option.rank->engine;
    pair.rank = option.rank->number;
  }
  request.pair = pair;
  return true;
}

void KvRouting::keep_pair_only(const KvPair& pair) {
  for (std::size_t i = 0; i < options_.size(); ++i) {
    const KvFleet::Rank& rank = *options_[i].rank;
    if (rank.engine != pair.prefill || rank.number != pair.rank) continue;
    options_ = {options_[i]};
    candidates_ = {candidates_[i]};
    return;
  }
}

std::optional<std::size_t> KvRouting::choose_after_prefill(std::span<const Candidate> candidates,
                                                           KvRequest& request, TimePoint now) {
  const KvFleet::Entry* const from = fleet_->find(request.prefilled_by);
  if (from == nullptr || from->ranks.empty()) return std::nullopt;
  const std::uint32_t block_tokens = collect(candidates, request, now);
  if (block_tokens == 0) return std::nullopt;
  const auto made = placement_->choose_decode(from->ranks.front()->place,
                                              {.prompt_tokens = request.prompt_tokens,
                                               .block_tokens = block_tokens,
                                               .candidates = candidates_,
                                               .sources = {}},
                                              now);
  if (!made) return std::nullopt;
  for (const Option& option : options_) {
    if (option.rank->place != made->decode.engine) continue;
    const std::size_t chosen = option.candidate;
    // Its blocks come from the prefill engine's node, so it is not accounted for as a prefill.
    accept(candidates[chosen], kKvAware, request, Role::kDecode, now);
    return chosen;
  }
  return std::nullopt;
}

}  // namespace pegaflow::router
