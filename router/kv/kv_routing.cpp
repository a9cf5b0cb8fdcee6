#include "router/kv/kv_routing.h"

#include <algorithm>
#include <limits>
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
/// Chunks of prompts whose requests were announced, four in a cell.
constexpr std::size_t kAnnouncedBlocks = std::size_t{1} << 14U;
/// A full report is asked for when more than this part of a text is unknown. An engine then
/// announces at most so many known blocks for each new one.
constexpr std::size_t kUnknownShare = 16;
/// Until an event names the size.
constexpr std::uint32_t kBlockTokens = 16;

}  // namespace

Result<std::unique_ptr<KvRouting>> KvRouting::create(const Options& options, KvStreams streams) {
  PEGA_TRY_LET(auto blocks, index::BlockIndex::create(
                                {.max_blocks = options.index_blocks, .max_holders = kMaxHolders}));
  PEGA_TRY_LET(auto placement,
               index::Placement::create({.max_engines = kMaxEngines, .seed = options.seed}));
  PEGA_TRY_LET(auto expected, index::ExpectedBlocks::create({.stride = 4, .lifetime = kExpected}));
  PEGA_TRY_LET(auto announced,
               index::ExpectedBlocks::create(
                   {.max_blocks = kAnnouncedBlocks, .stride = 4, .lifetime = kAnnounced}));
  std::optional<KvKeys> keys;
  if (options.key_bytes > 0) {
    PEGA_TRY_LET(keys, KvKeys::create(options.key_bytes));
  }
  PEGA_TRY_LET(KvTokens tokens, KvTokens::create(options.hash_seeds));
  return std::unique_ptr<KvRouting>(
      new KvRouting(options, std::move(blocks), std::move(placement), std::move(expected),
                    std::move(announced), std::move(keys), std::move(tokens), std::move(streams)));
}

KvRouting::KvRouting(const Options& options, std::unique_ptr<index::BlockIndex> blocks,
                     std::unique_ptr<index::Placement> placement, index::ExpectedBlocks expected,
                     index::ExpectedBlocks announced, std::optional<KvKeys> keys, KvTokens tokens,
                     KvStreams streams)
    : blocks_(std::move(blocks)),
      placement_(std::move(placement)),
      expected_(std::move(expected)),
      announced_(std::move(announced)),
      texts_({.bytes = options.text_bytes}),
      lessons_(texts_),
      keys_(std::move(keys)),
      tokens_(std::move(tokens)),
      waiting_(*blocks_, kMaxHolders),
      fleet_(std::make_unique<KvFleet>(*blocks_, *placement_, expected_, lessons_, tokens_,
                                       std::move(streams))),
      pools_(std::make_unique<KvPools>(*blocks_, *placement_, *fleet_, lessons_,
                                       keys_ ? &*keys_ : nullptr)),
      session_salt_(options.seed),
      match_(kMaxHolders),
      expected_chunks_(kMaxEngines),
      announced_chunks_(kMaxEngines) {
  fleet_->watch({.removed =
                     [this](const KvFleet::Rank& rank) {
                       for (const index::WaitingBlocks::Loss& each :
                            waiting_.removed(rank.holder)) {
                         placement_->lost(each.request, each.lost * rank.source.block_size());
                       }
                     },
                 .forgotten = [this](const KvFleet::Rank& rank) { waiting_.forget(rank.holder); },
                 // A gap in the events of an engine does not empty its node's pool.
                 .gone = [this](const KvFleet::Rank& rank) { announced_.forget(rank.place); }});
}

void KvRouting::observe(KvObserver* observer) {
  observer_ = observer;
  lessons_.on_learned(observer == nullptr
                          ? KvLessons::OnLearned()
                          : [observer](const index::Text& text, std::span<const index::Key> keys) {
                              observer->learned(text, keys);
                            });
}

double KvRouting::bytes_per_token(const std::string& model) const {
  const auto found = bytes_per_token_.find(model);
  return found == bytes_per_token_.end() ? kBytesPerToken : found->second;
}

void KvRouting::hash_tokens(const PromptText& prompt, KvRequest& request) {
  if (prompt.tokens.empty()) return;
  const KvFleet::Rank* const rank =
      prompt.is_exact ? fleet_->hashing_rank(request.model, !prompt.cache_salt.empty()) : nullptr;
  if (rank != nullptr && tokens_.keys(rank->hashes, prompt.tokens, prompt.cache_salt,
                                      request.known.keys, request.hash_mode)) {
    request.known.sure = request.known.keys.size();
    request.known.text_bytes = request.text_size;
  }
}

void KvRouting::set_prompt(PromptText prompt, std::string_view model, KvRequest& request) {
  request.model = model.substr(0, kMaxModelBytes);
  request.text_bytes = std::move(prompt.text);
  request.text_size = request.text_bytes.size();
  request.token_count = prompt.tokens.size();
  request.cache_salt = prompt.cache_salt;
  request.is_truncated = prompt.is_truncated;
  index::hash_text(prompt.root, request.text_bytes, request.text);
  hash_tokens(prompt, request);
  if (request.hash_mode == 0) texts_.look_up(request.text, request.known);
  estimate(request);
}

std::unique_ptr<KvRequest> KvRouting::begin(PromptText prompt, std::string_view model,
                                            std::string_view client_session) {
  auto request = std::make_unique<KvRequest>();
  set_prompt(std::move(prompt), model, *request);
  if (request->token_count != 0) {
    ++(request->hash_mode != 0 ? tokens_.stats.hashed : tokens_.stats.learned);
  }
  ++(request->known.keys.empty() ? stats_.unknown_texts : stats_.known_texts);
  request->adds_session = client_session.empty();
  if (request->adds_session) {
    request->session =
        fmt::format("pf1:{:016x}", next_leg_++ * 0x9E3779B97F4A7C15U ^ session_salt_);
  } else if (client_session.size() <= kMaxSession) {
    request->session = client_session;
  }
  // Engines announce blocks that they reuse only when they are asked to.
  const std::size_t unknown =
      request->text_size - std::min(request->text_size, request->known.text_bytes);
  request->wants_full_report = request->hash_mode == 0 &&
                               unknown > request->text_size / kUnknownShare &&
                               fleet_->takes_full_reports(request->model);
  return request;
}

void KvRouting::set_load(std::uint64_t engine, std::uint32_t rank, const index::EngineLoad& load,
                         TimePoint now) {
  const KvFleet::Rank* const found = fleet_->find_rank(engine, rank);
  if (found != nullptr) placement_->set_load(found->place, load, now);
}

void KvRouting::rendered(KvRequest& request, std::span<const std::uint32_t> tokens) {
  const KvFleet::Rank* const rank =
      fleet_->hashing_rank(request.model, !request.cache_salt.empty());
  if (rank == nullptr || !tokens_.keys(rank->hashes, tokens, request.cache_salt, request.known.keys,
                                       request.hash_mode)) {
    return;
  }
  request.known.sure = request.known.keys.size();
  request.known.text_bytes = request.text_size;
  request.token_count = tokens.size();
  request.wants_full_report = false;
  estimate(request);
  learn(request.text, request.known.keys);
  if (observer_ != nullptr) observer_->learned(request.text, request.known.keys);
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

void KvRouting::match_prompt(const KvRequest& request, TimePoint now) {
  blocks_->match(request.known.keys, match_);
  std::fill(expected_chunks_.begin(), expected_chunks_.end(), 0);
  expected_.match(request.text.chunks, now, expected_chunks_);
  std::fill(announced_chunks_.begin(), announced_chunks_.end(), 0);
  announced_.match(request.text.chunks, now, announced_chunks_);
}

std::uint32_t KvRouting::collect(std::span<const Candidate> candidates, KvRequest& request,
                                 TimePoint now) {
  options_.clear();
  candidates_.clear();
  sources_.clear();
  std::uint32_t block_tokens = 0;
  bool knows_size = false;
  const KvPools::Pool* any_pool = nullptr;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const KvFleet::Entry* const entry = fleet_->find(candidates[i].id);
    if (entry == nullptr) continue;
    const KvPools::Pool* const pool = trusted_pool(candidates[i].id);
    if (pool != nullptr) any_pool = pool;
    for (const auto& rank : entry->ranks) {
      options_.push_back({i, rank.get(), pool});
      if (!rank->gives_credit() || (block_tokens != 0 && knows_size)) continue;
      // Until an event names the size it is assumed.
      knows_size = blocks_of(*rank) > 0;
      if (block_tokens == 0 || knows_size) block_tokens = rank->source.block_size();
    }
  }
  if (block_tokens == 0 && any_pool != nullptr) block_tokens = any_pool->block_tokens;
  if (block_tokens == 0) return 0;
  match_prompt(request, now);
  // The last token is always computed.
  const std::uint32_t most = (request.prompt_tokens - 1) / block_tokens;
  const double blocks_per_chunk = index::Text::kChunkBytes / bytes_per_block(request, block_tokens);
  const auto blocks_of_chunks = [&](std::uint32_t chunks) {
    return static_cast<std::uint32_t>(std::min<double>(most, chunks * blocks_per_chunk));
  };
  for (Option& option : options_) {
    const KvFleet::Rank& rank = *option.rank;
    index::Candidate candidate{.engine = rank.place};
    const bool has_events =
        rank.gives_credit() && (rank.source.block_size() == block_tokens || blocks_of(rank) == 0);
    // Of an engine without events, only what was sent to it just now is taken to be in its GPU.
    if (has_events || (rank.stream == 0 && option.pool != nullptr)) {
      const std::uint32_t expected = blocks_of_chunks(expected_chunks_[rank.place]);
      const std::uint32_t announced = has_events ? match_.gpu(rank.holder) : 0;
      candidate.gpu_blocks = std::min(most, std::max(announced, expected));
    }
    candidate.local_blocks = candidate.gpu_blocks;
    // A pool that does not tell the tokens of a block has the blocks that its engine announces.
    if (option.pool != nullptr && (option.pool->block_tokens == block_tokens ||
                                   (option.pool->block_tokens == 0 && has_events))) {
      const std::uint32_t local =
          has_events ? match_.local(rank.holder) : match_.pool(option.pool->holder);
      const std::uint32_t fetched = blocks_of_chunks(announced_chunks_[rank.place]);
      candidate.local_blocks = std::max({candidate.gpu_blocks, std::min(most, local), fetched});
      option.is_announced = fetched > std::max(candidate.gpu_blocks, local);
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
  if (role == Role::kPrefill && request.pair) keep_pair_only(*request.pair);
  const auto decision = placement_->choose(placement_request(request, block_tokens), now);
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

index::PlacementRequest KvRouting::placement_request(const KvRequest& request,
                                                     std::uint32_t block_tokens) const {
  return {.prompt_tokens = request.prompt_tokens,
          .block_tokens = block_tokens,
          .candidates = candidates_,
          .sources = sources_};
}

Duration KvRouting::turn_limit(std::span<const Candidate> candidates, KvRequest& request,
                               TimePoint now) {
  const std::uint32_t block_tokens = collect(candidates, request, now);
  if (block_tokens == 0) return Duration::zero();
  return placement_->turn_limit(placement_request(request, block_tokens));
}

KvRouting::Outlook KvRouting::outlook(std::span<const Candidate> candidates, TimePoint now) const {
  Outlook outlook{.least_queue = std::numeric_limits<double>::infinity()};
  for (const Candidate& candidate : candidates) {
    const KvFleet::Entry* const entry = fleet_->find(candidate.id);
    // Nothing is known about a new engine: it has room.
    if (entry == nullptr || entry->ranks.empty()) return {};
    outlook.is_known |= trusted_pool(candidate.id) != nullptr;
    for (const auto& rank : entry->ranks) {
      outlook.is_known |= rank->gives_credit();
      outlook.least_queue = std::min(outlook.least_queue, queue_seconds(*rank, now));
      outlook.tokens_per_second += tokens_per_second(*rank);
    }
  }
  return outlook;
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
  ++(policy == kKvAware ? stats_.chosen : stats_.fallbacks);
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
  return decision.best().source == index::kNoNode && !options_[decision.chosen].is_announced &&
                 known + 2 * block_tokens >= request.prompt_tokens
             ? std::string(kComputeHint)
             : "";
}

void KvRouting::record(const index::Decision& decision, std::uint32_t block_tokens,
                       std::string_view policy, KvRequest& request, Role role, TimePoint now) {
  const KvFleet::Rank& chosen = *options_[decision.chosen].rank;
  const KvFleet::Entry* const entry = fleet_->find(chosen.engine);
  request.choice.emplace(KvChoice{
      .engine = chosen.engine,
      .rank = chosen.number,
      .is_announced = options_[decision.chosen].is_announced,
      .names_rank = entry->ranks.size() > 1,
      .terms = decision.best(),
      .predicted_cached = decision.predicted_cached_tokens,
      .hint = hint_for(decision, block_tokens, request),
  });
  request.choice->pull = pull_for(decision, block_tokens, options_[decision.chosen], request);
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
                      .predicted_cached = decision.predicted_cached_tokens,
                      .pair = std::exchange(request.pair, std::nullopt)};
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
  if (!request.choice && request.placed && request.placed->engine == engine.id) return;
  leg_ended(request, now);
  if (!request.choice || request.choice->engine != engine.id) return;
  KvFleet::Rank* const rank = fleet_->find_rank(engine.id, request.choice->rank);
  if (rank == nullptr) return;
  request.placed = std::move(request.choice);
  request.choice.reset();
  request.has_first_token = request.has_answer = false;
  request.id = next_leg_++;
  // A full account only means that this request is not counted in later decisions.
  const auto record =
      placement_->placed(request.id, request.placed->terms, request.prompt_tokens, now);
  if (record && observer_ != nullptr) observer_->placed(*record, *rank, request.text.chunks);
  if (rank->gives_credit()) follow(request, *rank);
  expected_.placed(rank->place, request.text.chunks, now);
  const bool has_events = rank->stream != 0;
  if (!has_events && !pools_->offers_chains(rank->engine)) return;
  if (has_events && request.wants_full_report) {
    ++stats_.full_reports;
    (void)rank->source.take_full_report();
  }
  // There is nothing to learn of an engine whose keys were computed.
  if (request.hash_mode != 0 &&
      (request.hash_mode == rank->hashes.mode || request.hash_mode == rank->hashes.salted)) {
    return;
  }
  if (!request.has_lesson && !request.session.empty()) {
    request.has_lesson = true;
    lessons_.begin(request.session, request.text, request.known.keys,
                   has_events ? KvLessons::By::kEvents : KvLessons::By::kChain);
  }
}

void KvRouting::follow(const KvRequest& request, const KvFleet::Rank& rank) {
  const std::span<const index::Key> keys(request.known.keys);
  blocks_->match(keys, match_);
  // What is only expected there was not announced.
  waiting_.add(request.id, rank.holder,
               keys.first(std::min(match_.gpu(rank.holder), request.placed->terms.gpu_blocks)));
}

void KvRouting::first_token(KvRequest& request, TimePoint now) {
  if (!request.placed || request.has_first_token) return;
  request.has_first_token = true;
  waiting_.begun(request.id);
  const bool is_counted = placement_->first_token(request.id, now);
  if (is_counted && observer_ != nullptr) observer_->first_token(request.id);
  if (request.has_lesson) lessons_.first_token(request.session);
  if (RouteLog::Entry* const row = log_.find(request.placed->log_entry)) {
    row->first_token = now - row->time;
  }
}

void KvRouting::computed(KvRequest& request, TimePoint now) {
  if (!request.placed || request.has_first_token) return;
  request.has_first_token = true;
  computed(KvLegAccount{.id = request.id, .log_entry = request.placed->log_entry}, now);
}

void KvRouting::computed(const KvLegAccount& leg, TimePoint now) {
  waiting_.begun(leg.id);
  // Other routers need not know whether the token was the first one.
  if (placement_->computed(leg.id, now) && observer_ != nullptr) observer_->first_token(leg.id);
}

void KvRouting::release_text(KvRequest& request) {
  request.has_answer = true;
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
  if (rank == nullptr || !request.placed->is_by_cost) return;
  // Without events a prediction is made of the pool, and there is no source to judge by it.
  const KvPools::Pool* const pool = rank->stream == 0 ? trusted_pool(rank->engine) : nullptr;
  if (!rank->gives_credit() && pool == nullptr) return;
  const std::uint32_t predicted = request.placed->predicted_cached;
  const std::uint32_t block = pool == nullptr ? rank->source.block_size() : pool->block_tokens;
  // The events told in time what was evicted after the prediction: they are right.
  const std::uint32_t evicted = std::min(predicted, waiting_.lost(request.id) * block);
  // The blocks of a text remain unknown where events name no sessions, cached or not.
  const bool is_told =
      request.hash_mode != 0 || rank->names_sessions || *cached_tokens <= predicted;
  // Nor does an engine's answer tell whether its server found what a client has announced.
  if (pool == nullptr && is_told && !request.placed->is_announced) {
    rank->source.answered(prompt_tokens, predicted - evicted, *cached_tokens, now);
  }
  ++stats_.reports;
  stats_.predicted_tokens += predicted;
  stats_.reported_tokens += *cached_tokens;
  stats_.prompt_tokens += prompt_tokens;
  const auto is_close = [&](std::uint32_t tokens) {
    return std::max(tokens, *cached_tokens) - std::min(tokens, *cached_tokens) <= block;
  };
  if (is_close(predicted)) {
    ++stats_.close_reports;
  } else if (is_close(predicted - evicted)) {
    ++stats_.evicted_reports;
  }
}

void KvRouting::leg_ended(KvRequest& request, TimePoint now) {
  if (const auto leg = take_leg(request)) leg_ended(*leg, now);
}

std::optional<KvLegAccount> KvRouting::take_leg(KvRequest& request) {
  if (!request.placed) return std::nullopt;
  const KvLegAccount leg{.id = request.id, .log_entry = request.placed->log_entry};
  request.placed.reset();
  return leg;
}

void KvRouting::leg_ended(const KvLegAccount& leg, TimePoint now) {
  waiting_.remove(leg.id);
  const bool is_counted = placement_->done(leg.id, now);
  if (is_counted && observer_ != nullptr) observer_->ended(leg.id);
  if (RouteLog::Entry* const row = log_.find(leg.log_entry)) row->has_ended = true;
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

bool KvRouting::work() {
  const bool has_more = fleet_->adopt_more();
  return blocks_->sweep(kSweptCells) || has_more;
}

}  // namespace pegaflow::router
