// Prefetches of KvRouting: the blocks that the server of a chosen engine can fetch.

#include <algorithm>
#include <optional>

#include "router/kv/kv_routing.h"

namespace pegaflow::router {

std::optional<KvPull> KvRouting::pull_for(const index::Decision& decision,
                                          std::uint32_t block_tokens, const Option& option,
                                          const KvRequest& request) const {
  if (!keys_ || option.pool == nullptr || block_tokens == 0) return std::nullopt;
  // A pool whose engines did not tell the tokens of a block has 0.
  const std::uint32_t own = option.pool->block_tokens;
  if (own != 0 && own != block_tokens) return std::nullopt;
  const index::Terms& terms = decision.best();
  std::uint32_t end = terms.pull_bytes > 0 ? terms.reach_blocks : 0;
  const auto known = static_cast<std::uint32_t>(request.known.keys.size());
  const std::uint32_t most = (request.prompt_tokens - 1) / block_tokens;
  // Disks tell no keys. What the prompt has and no pool is known to hold may be there.
  if (request.choice->hint != kComputeHint && pools_->has_disks(option.pool->space)) {
    end = std::max(end, std::min(most, known));
  }
  if (end <= terms.local_blocks) return std::nullopt;
  // The engine computes its prompt's last token, and loads that token's block all the same: without
  // it a prompt that ends with a block waits for another pull.
  if (end == most) end = std::max(end, std::min(request.prompt_tokens / block_tokens, known));
  const auto [server, space] = pools_->place_of(option.rank->engine);
  return KvPull{.server = std::string(server),
                .space = std::string(space),
                .first = terms.gpu_blocks,
                .end = end};
}

std::optional<PrefetchOrder> KvRouting::prefetch_for(const KvRequest& request) {
  if (!request.placed || !request.placed->pull || !keys_) return std::nullopt;
  const KvPull& pull = *request.placed->pull;
  PrefetchOrder order{
      .server = pull.server, .space = pull.space, .log_entry = request.placed->log_entry};
  const std::size_t end =
      std::min<std::size_t>({pull.end, pull.first + kMostPrefetchKeys, request.known.keys.size()});
  for (std::size_t i = pull.first; i < end; ++i) {
    const auto key = keys_->find(request.known.keys[i]);
    if (!key) break;
    order.keys.push_back(*key);
  }
  if (pull.first + order.keys.size() <= request.placed->terms.local_blocks) {
    prefetch_became(order, PrefetchState::kUnknownKeys);
    return std::nullopt;
  }
  if (request.placed->hint.starts_with('[')) order.sources = request.placed->hint;
  return order;
}

std::optional<PrefetchOrder> KvRouting::announce(std::span<const Candidate> candidates,
                                                 KvRequest& request, TimePoint now) {
  const std::uint32_t block_tokens = collect(candidates, request, now);
  if (block_tokens == 0) return std::nullopt;
  const auto decision = placement_->choose(placement_request(request, block_tokens), now);
  if (!decision) return std::nullopt;
  const Option& option = options_[decision->chosen];
  request.choice.emplace(KvChoice{.engine = option.rank->engine,
                                  .rank = option.rank->number,
                                  .terms = decision->best(),
                                  .hint = hint_for(*decision, block_tokens, request)});
  request.choice->pull = pull_for(*decision, block_tokens, option, request);
  request.placed = std::move(request.choice);
  request.choice.reset();
  auto order = prefetch_for(request);
  const std::uint32_t end = request.placed->pull ? request.placed->pull->first : 0;
  request.placed.reset();
  if (!order) return std::nullopt;
  const double covered = static_cast<double>(end + order->keys.size()) *
                         bytes_per_block(request, block_tokens) / index::Text::kChunkBytes;
  const std::span<const std::uint64_t> chunks(request.text.chunks);
  const auto fetched = chunks.first(std::min(chunks.size(), static_cast<std::size_t>(covered)));
  order->engine = option.rank->place;
  order->chunks.assign(fetched.begin(), fetched.end());
  return order;
}

void KvRouting::expect(const PrefetchOrder& announced, TimePoint now) {
  announced_.placed(announced.engine, announced.chunks, now);
}

void KvRouting::prefetch_became(const PrefetchOrder& order, PrefetchState state) {
  ++prefetch_counts_.of(state);
  if (state == PrefetchState::kAccepted) prefetch_counts_.blocks += order.keys.size();
  if (state != PrefetchState::kSent && state != PrefetchState::kAccepted) {
    announced_.erased(order.engine, order.chunks);
  }
  RouteLog::Entry* const row = log_.find(order.log_entry);
  if (row == nullptr) return;
  row->prefetch = state;
  row->prefetch_blocks = static_cast<std::uint32_t>(order.keys.size());
}

void KvRouting::prefetch_was_cancelled(const PrefetchOrder& order) {
  ++prefetch_counts_.cancelled;
  if (RouteLog::Entry* const row = log_.find(order.log_entry)) row->is_prefetch_cancelled = true;
}

}  // namespace pegaflow::router
