// The part of KvRouting for those who place requests themselves.
#include <algorithm>
#include <memory>
#include <utility>

#include "router/kv/kv_routing.h"

namespace pegaflow::router {

namespace {

/// For costs, while no engine has named the size.
constexpr std::uint32_t kBlockTokens = 16;

}  // namespace

std::unique_ptr<KvRequest> KvRouting::peek(PromptText prompt, std::string_view model) {
  auto request = std::make_unique<KvRequest>();
  set_prompt(std::move(prompt), model, *request);
  return request;
}

KvScores KvRouting::score(std::span<const Candidate> candidates, KvRequest& request,
                          TimePoint now) {
  KvScores scores{.block_tokens = collect(candidates, request, now)};
  if (scores.block_tokens == 0) {
    for (const Option& option : options_) candidates_.push_back({.engine = option.rank->place});
  }
  const std::uint32_t block_tokens = scores.block_tokens == 0 ? kBlockTokens : scores.block_tokens;
  const auto decision = placement_->choose(placement_request(request, block_tokens), now);
  if (!decision) return scores;  // No candidate is an engine.
  for (std::size_t i = 0; i < options_.size() && i < decision->terms.size(); ++i) {
    scores.ranks.push_back(
        {.rank = options_[i].rank, .pool = options_[i].pool, .terms = decision->terms[i]});
  }
  std::stable_sort(scores.ranks.begin(), scores.ranks.end(),
                   [](const KvScore& a, const KvScore& b) { return a.terms.cost < b.terms.cost; });
  return scores;
}

void KvRouting::learn(const index::Text& text, std::span<const index::Key> keys) {
  texts_.learn(text, keys);
}

std::uint32_t KvRouting::list(index::HolderId holder, std::uint32_t cursor, std::size_t cells,
                              std::vector<std::uint64_t>& hashes) const {
  const std::size_t before = hashes.size();
  const std::size_t next = blocks_->list(holder, std::max<std::size_t>(cursor, 1), cells, hashes);
  for (std::size_t i = before; i < hashes.size(); ++i) hashes[i] = index::hash_of(0, hashes[i]);
  return static_cast<std::uint32_t>(next);
}

}  // namespace pegaflow::router
