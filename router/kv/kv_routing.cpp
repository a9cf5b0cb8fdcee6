#include "router/kv/kv_routing.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::router {

namespace {

constexpr std::uint32_t kMaxHolders = 1024;
constexpr std::uint32_t kMaxEngines = 1024;
constexpr std::size_t kSweptCells = 65'536;
/// The ratio of JSON text in most languages, until a model's own is known.
constexpr double kBytesPerToken = 4;
constexpr std::size_t kMaxModels = 1024;
/// Clients choose the name where engines take any. What is kept of it is bounded.
constexpr std::size_t kMaxModelBytes = 256;
/// Requests with longer session ids teach nothing.
constexpr std::size_t kMaxSession = 256;
/// Events about a prompt arrive earlier, unless it waits in a long queue.
constexpr Duration kExpected = std::chrono::seconds(10);
/// Until an event names the size.
constexpr std::uint32_t kBlockTokens = 16;

}  // namespace

Result<std::unique_ptr<KvRouting>> KvRouting::create(const Options& options, KvStreams streams) {
  PEGA_TRY_LET(auto blocks, index::BlockIndex::create(
                                {.max_blocks = options.index_blocks, .max_holders = kMaxHolders}));
  PEGA_TRY_LET(auto placement,
               index::Placement::create({.max_engines = kMaxEngines, .seed = options.seed}));
  PEGA_TRY_LET(auto expected, index::ExpectedBlocks::create({.stride = 4, .lifetime = kExpected}));
  return std::unique_ptr<KvRouting>(new KvRouting(options, std::move(blocks), std::move(placement),
                                                  std::move(expected), std::move(streams)));
}

KvRouting::KvRouting(const Options& options, std::unique_ptr<index::BlockIndex> blocks,
                     std::unique_ptr<index::Placement> placement, index::ExpectedBlocks expected,
                     KvStreams streams)
    : blocks_(std::move(blocks)),
      placement_(std::move(placement)),
      expected_(std::move(expected)),
      texts_({.bytes = options.text_bytes}),
      lessons_(texts_),
      fleet_(std::make_unique<KvFleet>(*blocks_, *placement_, expected_, lessons_,
                                       std::move(streams))),
      pools_(std::make_unique<KvPools>(*blocks_, *placement_, *fleet_)),
      session_salt_(options.seed),
      match_(kMaxHolders),
      expected_chunks_(kMaxEngines) {}

double KvRouting::bytes_per_token(const std::string& model) const {
  const auto found = bytes_per_token_.find(model);
  return found == bytes_per_token_.end() ? kBytesPerToken : found->second;
}

std::unique_ptr<KvRequest> KvRouting::begin(PromptText prompt, std::string_view model,
                                            std::string_view client_session) {
  auto request = std::make_unique<KvRequest>();
  request->model = model.substr(0, kMaxModelBytes);
  request->text_bytes = std::move(prompt.text);
  request->text_size = request->text_bytes.size();
  request->token_count = prompt.tokens.size();
  index::hash_text(prompt.root, request->text_bytes, request->text);
  texts_.look_up(request->text, request->known);
  ++(request->known.keys.empty() ? stats_.unknown_texts : stats_.known_texts);
  request->adds_session = client_session.empty();
  if (request->adds_session) {
    request->session =
        fmt::format("pf1:{:016x}", next_leg_++ * 0x9E3779B97F4A7C15U ^ session_salt_);
  } else if (client_session.size() <= kMaxSession) {
    request->session = client_session;
  }
  // Engines announce blocks that they reuse only when they are asked to.
  request->wants_full_report =
      fleet_->has_streams() && request->known.text_bytes * 2 < request->text_size;
  estimate(*request);
  return request;
}

double KvRouting::bytes_per_block(const KvRequest& request, std::uint32_t block_tokens) const {
  // The text itself tells it best.
  if (!request.known.keys.empty() && request.known.text_bytes > 0) {
    return static_cast<double>(request.known.text_bytes) /
           static_cast<double>(request.known.keys.size());
  }
  const double tokens = request.token_count == 0 ? bytes_per_token(request.model)
                                                 : static_cast<double>(request.text_size) /
                                                       static_cast<double>(request.token_count);
  return tokens * block_tokens;
}

void KvRouting::estimate(KvRequest& request) const {
  if (request.token_count != 0) {
    request.prompt_tokens = static_cast<std::uint32_t>(request.token_count);
    return;
  }
  const double tokens = static_cast<double>(request.text_size) / bytes_per_token(request.model);
  request.prompt_tokens = static_cast<std::uint32_t>(std::clamp(tokens, 1.0, 4e9));
}

std::uint32_t KvRouting::collect(std::span<const Candidate> candidates, KvRequest& request,
                                 TimePoint now) {
  options_.clear();
  candidates_.clear();
  sources_.clear();
  std::uint32_t block_tokens = 0;
  const KvPools::Pool* any_pool = nullptr;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const KvFleet::Entry* const entry = fleet_->find(candidates[i].id);
    if (entry == nullptr) continue;
    const KvPools::Pool* const pool = trusted_pool(candidates[i].id);
    if (pool != nullptr) any_pool = pool;
    for (const auto& rank : entry->ranks) {
      options_.push_back({i, rank.get(), pool});
      if (block_tokens == 0 && rank->gives_credit()) block_tokens = rank->source.block_size();
    }
  }
  if (block_tokens == 0 && any_pool != nullptr) block_tokens = any_pool->block_tokens;
  if (block_tokens == 0) return 0;
  blocks_->match(request.known.keys, match_);
  std::fill(expected_chunks_.begin(), expected_chunks_.end(), 0);
  expected_.match(request.text.chunks, now, expected_chunks_);
  // The last token is always computed.
  const std::uint32_t most = (request.prompt_tokens - 1) / block_tokens;
  const double blocks_per_chunk = index::Text::kChunkBytes / bytes_per_block(request, block_tokens);
  for (const Option& option : options_) {
    const KvFleet::Rank& rank = *option.rank;
    index::Candidate candidate{.engine = rank.place};
    const bool has_events = rank.gives_credit() && rank.source.block_size() == block_tokens;
    if (has_events) {
      const auto expected = static_cast<std::uint32_t>(std::min<double>(
          most, static_cast<double>(expected_chunks_[rank.place]) * blocks_per_chunk));
      candidate.gpu_blocks = std::min(most, std::max(match_.gpu(rank.holder), expected));
    }
    candidate.local_blocks = candidate.gpu_blocks;
    if (option.pool != nullptr && option.pool->block_tokens == block_tokens) {
      const std::uint32_t local =
          has_events ? match_.local(rank.holder) : match_.pool(option.pool->holder);
      candidate.local_blocks = std::max(candidate.gpu_blocks, std::min(most, local));
    }
    candidates_.push_back(candidate);
  }
  if (any_pool != nullptr) pools_->add_sources(any_pool->space, match_, sources_);
  for (index::PullSource& source : sources_) source.blocks = std::min(most, source.blocks);
  return block_tokens;
}

const KvPools::Pool* KvRouting::trusted_pool(std::uint64_t engine) const {
  const KvPools::Pool* const pool = pools_->pool_of(engine);
  return pool != nullptr && pool->is_trusted ? pool : nullptr;
}

std::optional<std::size_t> KvRouting::choose(std::span<const Candidate> candidates,
                                             KvRequest& request, Role role, TimePoint now) {
  request.choice.reset();
  const std::uint32_t block_tokens = collect(candidates, request, now);
  if (block_tokens == 0) return std::nullopt;
  const auto decision = placement_->choose({.prompt_tokens = request.prompt_tokens,
                                            .block_tokens = block_tokens,
                                            .candidates = candidates_,
                                            .sources = sources_},
                                           now);
  if (!decision) return std::nullopt;
  ++stats_.chosen;
  record(*decision, block_tokens, "kv-aware", request, role, now);
  request.choice->is_by_cost = true;
  return options_[decision->chosen].candidate;
}

std::optional<std::uint32_t> KvRouting::least_uncached(std::span<const Candidate> candidates,
                                                       KvRequest& request, TimePoint now) {
  const std::uint32_t block_tokens = collect(candidates, request, now);
  if (block_tokens == 0) return std::nullopt;
  std::uint32_t most = 0;
  for (const index::Candidate& each : candidates_) most = std::max(most, each.gpu_blocks);
  return request.prompt_tokens - std::min(request.prompt_tokens, most * block_tokens);
}

void KvRouting::accept(const Candidate& candidate, std::string_view policy, KvRequest& request,
                       Role role, TimePoint now) {
  request.choice.reset();
  const KvFleet::Entry* const entry = fleet_->find(candidate.id);
  if (entry == nullptr || entry->ranks.empty()) return;
  options_.assign(1, {0, entry->ranks.front().get(), nullptr});
  // After a prefill elsewhere the blocks are loaded, not computed.
  const std::uint32_t blocks = request.is_prefilled ? request.prompt_tokens / kBlockTokens : 0;
  candidates_.assign(
      1, {.engine = entry->ranks.front()->place, .gpu_blocks = blocks, .local_blocks = blocks});
  const auto decision = placement_->choose({.prompt_tokens = request.prompt_tokens,
                                            .block_tokens = kBlockTokens,
                                            .candidates = candidates_,
                                            .sources = {}},
                                           now);
  if (!decision) return;
  ++stats_.fallbacks;
  record(*decision, kBlockTokens, policy, request, role, now);
  request.choice->names_rank = false;  // The engine balances its ranks by itself.
}

std::string KvRouting::hint_for(const index::Decision& decision, std::uint32_t block_tokens,
                                const KvRequest& request) const {
  if (options_[decision.chosen].pool == nullptr || pools_->nodes().size() < 2) return {};
  std::string nodes;
  for (const index::PullSource& source : decision.sources) {
    const std::string_view id = pools_->id_of(source.node);
    if (id.empty()) continue;
    nodes += fmt::format(R"({}{{"node":"{}","blocks":{}}})", nodes.empty() ? "" : ",", id,
                         source.blocks);
  }
  if (!nodes.empty()) return fmt::format("[{}]", nodes);
  // What the router does not know, a node may still have.
  const std::uint64_t known = request.known.keys.size() * block_tokens;
  return decision.best().source == index::kNoNode &&
                 known + 2 * block_tokens >= request.prompt_tokens
             ? R"("compute")"
             : "";
}

void KvRouting::record(const index::Decision& decision, std::uint32_t block_tokens,
                       std::string_view policy, KvRequest& request, Role role, TimePoint now) {
  const KvFleet::Rank& chosen = *options_[decision.chosen].rank;
  const KvFleet::Entry* const entry = fleet_->find(chosen.engine);
  request.choice.emplace(KvChoice{
      .engine = chosen.engine,
      .rank = chosen.number,
      .names_rank = entry->ranks.size() > 1,
      .terms = decision.best(),
      .predicted_cached = decision.predicted_cached_tokens,
      .hint = hint_for(decision, block_tokens, request),
  });
  RouteLog::Entry row{.time = now,
                      .model = request.model,
                      .role = to_string(role),
                      .policy = policy,
                      .prompt_tokens = request.prompt_tokens,
                      .known_blocks = static_cast<std::uint32_t>(request.known.keys.size()),
                      .block_tokens = block_tokens,
                      .band = decision.band,
                      .near_equals = decision.near_equals,
                      .candidates = static_cast<std::uint32_t>(decision.terms.size()),
                      .terms = {},
                      .predicted_cached = decision.predicted_cached_tokens};
  std::vector<std::size_t> order(decision.terms.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  const std::size_t kept = std::min(order.size(), RouteLog::kCandidates);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    [&](std::size_t a, std::size_t b) {
                      return decision.terms[a].cost < decision.terms[b].cost;
                    });
  for (std::size_t i = 0; i < kept; ++i) {
    const KvFleet::Rank& rank = *options_[order[i]].rank;
    row.terms.push_back(
        {.engine = rank.url,
         .rank = rank.number,
         .trust = std::string(rank.stream == 0 ? std::string_view("no_events")
                                               : index::to_string(rank.source.trust())),
         .terms = decision.terms[order[i]],
         .is_chosen = order[i] == decision.chosen});
  }
  request.choice->log_entry = log_.add(std::move(row));
}

void KvRouting::sent(KvRequest& request, const Engine& engine, TimePoint now) {
  leg_ended(request, now);
  if (!request.choice || request.choice->engine != engine.id) return;
  KvFleet::Rank* const rank = fleet_->find_rank(engine.id, request.choice->rank);
  if (rank == nullptr) return;
  request.placed = std::move(request.choice);
  request.choice.reset();
  request.has_first_token = false;
  request.id = next_leg_++;
  // A full account only means that this request is not counted in later decisions.
  (void)placement_->placed(request.id, request.placed->terms, request.prompt_tokens, now);
  expected_.placed(rank->place, request.text.chunks, now);
  if (rank->stream == 0) return;
  if (request.wants_full_report) {
    ++stats_.full_reports;
    (void)rank->source.take_full_report();
  }
  if (!request.has_lesson && !request.session.empty()) {
    request.has_lesson = true;
    lessons_.begin(request.session, request.text, request.known.keys);
  }
}

void KvRouting::first_token(KvRequest& request, TimePoint now) {
  if (!request.placed || request.has_first_token) return;
  request.has_first_token = true;
  placement_->first_token(request.id, now);
  if (request.has_lesson) lessons_.first_token(request.session);
  if (RouteLog::Entry* const row = log_.find(request.placed->log_entry)) {
    row->first_token = now - row->time;
  }
}

void KvRouting::release_text(KvRequest& request) {
  std::string().swap(request.text_bytes);  // An assignment would keep the memory.
  request.text = index::Text();
  request.known = index::TextIndex::Known();
}

void KvRouting::reported(KvRequest& request, std::uint32_t prompt_tokens,
                         std::optional<std::uint32_t> cached_tokens, TimePoint now) {
  if (prompt_tokens == 0) return;
  if (request.token_count == 0 && request.text_size != 0) {
    // The newest prompts count most; a ratio beyond these limits is no text.
    const double ratio = std::clamp(
        static_cast<double>(request.text_size) / static_cast<double>(prompt_tokens), 0.5, 16.0);
    const auto known = bytes_per_token_.find(request.model);
    if (known != bytes_per_token_.end()) {
      known->second += (ratio - known->second) / 8;
    } else if (bytes_per_token_.size() < kMaxModels) {
      bytes_per_token_.emplace(request.model, ratio);
    }
  }
  if (!request.placed) return;
  RouteLog::Entry* const row = log_.find(request.placed->log_entry);
  if (row != nullptr) row->reported_prompt = prompt_tokens;
  if (!cached_tokens) return;
  if (row != nullptr) row->reported_cached = cached_tokens;
  placement_->reported_cached(request.id, *cached_tokens);
  KvFleet::Rank* const rank = fleet_->find_rank(request.placed->engine, request.placed->rank);
  if (rank == nullptr || !rank->gives_credit() || !request.placed->is_by_cost) return;
  const std::uint32_t predicted = request.placed->predicted_cached;
  rank->source.answered(prompt_tokens, predicted, *cached_tokens, now);
  ++stats_.reports;
  stats_.predicted_tokens += predicted;
  stats_.reported_tokens += *cached_tokens;
  stats_.prompt_tokens += prompt_tokens;
  const std::uint32_t apart =
      predicted > *cached_tokens ? predicted - *cached_tokens : *cached_tokens - predicted;
  if (apart <= rank->source.block_size()) ++stats_.close_reports;
}

void KvRouting::leg_ended(KvRequest& request, TimePoint now) {
  if (!request.placed) return;
  placement_->done(request.id, now);
  if (RouteLog::Entry* const row = log_.find(request.placed->log_entry)) row->has_ended = true;
  request.placed.reset();
}

void KvRouting::finished(KvRequest& request, TimePoint now) {
  leg_ended(request, now);
  if (!std::exchange(request.has_lesson, false)) return;
  lessons_.end(request.session, now);
}

bool KvRouting::tick(TimePoint now) {
  fleet_->tick(now);
  lessons_.tick(now);
  placement_->expire(now);
  return work();
}

bool KvRouting::work() { return blocks_->sweep(kSweptCells); }

}  // namespace pegaflow::router
