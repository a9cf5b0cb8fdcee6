#pragma once
/// \file
/// Sends each request where its cache is: joins the index, the texts and the cost of a placement.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "index/block_index.h"
#include "index/placement/expected_blocks.h"
#include "index/placement/placement.h"
#include "index/placement/waiting_blocks.h"
#include "index/text_index.h"
#include "router/body/prompt_text.h"
#include "router/kv/kv_fleet.h"
#include "router/kv/kv_keys.h"
#include "router/kv/kv_lessons.h"
#include "router/kv/kv_observer.h"
#include "router/kv/kv_pools.h"
#include "router/kv/kv_prefetch.h"
#include "router/kv/kv_request.h"
#include "router/kv/kv_scores.h"
#include "router/kv/kv_tokens.h"
#include "router/kv/route_log.h"
#include "router/routing/fleet.h"
#include "router/routing/policy.h"

namespace pegaflow::router {

/// Owns what the router knows about caches. All that it knows is a hint: an engine that holds less
/// than expected computes more, and no request fails. Thread-bound.
class KvRouting {
 public:
  struct Options {
    std::size_t index_blocks = std::size_t{16} << 20U;
    std::size_t text_bytes = std::size_t{1} << 30U;
    std::uint64_t seed = 1;
    std::size_t key_bytes = 0;              ///< Memory for full keys; 0: no prefetches.
    std::vector<std::string> hash_seeds{};  ///< For KvTokens.
  };
  /// Errors: kInvalidArgument for an option out of its range; kOutOfCapacity without memory.
  static Result<std::unique_ptr<KvRouting>> create(const Options& options, KvStreams streams);

  [[nodiscard]] KvFleet& fleet() noexcept { return *fleet_; }
  [[nodiscard]] const KvFleet& fleet() const noexcept { return *fleet_; }

  [[nodiscard]] KvPools& pools() noexcept { return *pools_; }
  [[nodiscard]] const KvPools& pools() const noexcept { return *pools_; }

  // ---- several routers

  /// `observer` outlives the object's use; nullptr: none.
  void observe(KvObserver* observer);
  [[nodiscard]] const KvObserver* observer() const noexcept { return observer_; }
  /// The parts to which other routers contribute.
  struct Parts {
    index::Placement& placement;
    index::ExpectedBlocks& expected;
    index::TextIndex& texts;
    index::BlockIndex& blocks;
  };
  [[nodiscard]] Parts parts() noexcept { return {*placement_, expected_, texts_, *blocks_}; }

  /// The load that a rank of an engine reports. Unknown ones are no error.
  void set_load(std::uint64_t engine, std::uint32_t rank, const index::EngineLoad& load,
                TimePoint now);

  // ---- one request

  /// A request with this prompt. `client_session` is the session id that the client has set, which
  /// engines repeat in their events; empty: the router sets one.
  std::unique_ptr<KvRequest> begin(PromptText prompt, std::string_view model,
                                   std::string_view client_session);

  /// A server of --render made these tokens of the request's text, which is learned. Without effect
  /// while no engine of the model has told how it hashes.
  void rendered(KvRequest& request, std::span<const std::uint32_t> tokens);

  /// The index of the candidate with the least cost, and request.choice. nullopt when no candidate
  /// announces its blocks; another policy then has to choose.
  std::optional<std::size_t> choose(std::span<const Candidate> candidates, KvRequest& request,
                                    Role role, TimePoint now);
  /// The least number of tokens of the prompt that one of the candidates would have to compute;
  /// nullopt when none announces its blocks.
  std::optional<std::uint32_t> least_uncached(std::span<const Candidate> candidates,
                                              KvRequest& request, TimePoint now);
  /// Decides about both legs of a request, and sets request.pair. False when nothing is known of
  /// the nodes of the engines, or of their caches: then the legs are decided one by one.
  bool choose_pair(std::span<const Candidate> prefills, std::span<const Candidate> decodes,
                   KvRequest& request, TimePoint now);
  /// The index of the candidate to decode what request.prefilled_by has computed; nullopt when
  /// another policy has to choose.
  std::optional<std::size_t> choose_after_prefill(std::span<const Candidate> candidates,
                                                  KvRequest& request, TimePoint now);
  /// The time for which a choice among the candidates waits at most for the other routers, while
  /// is_turn() is false.
  [[nodiscard]] Duration turn_limit(std::span<const Candidate> candidates, KvRequest& request,
                                    TimePoint now);
  /// Whether it is this router's turn to place a request that arrived at this time.
  [[nodiscard]] bool is_turn(TimePoint arrived) const { return placement_->is_turn(arrived); }
  /// The time at which a choice within this limit no longer waits, if nothing is placed meanwhile.
  [[nodiscard]] TimePoint turn_end(TimePoint arrived, Duration limit) const {
    return placement_->turn_end(arrived, limit);
  }
  /// The work that candidates have.
  struct Outlook {
    bool is_known = false;         ///< One of them has credit, so that requests are placed by cost.
    double least_queue = 0;        ///< Seconds until the first of them begins a new prompt.
    double tokens_per_second = 0;  ///< The sum of their speeds.
  };
  [[nodiscard]] Outlook outlook(std::span<const Candidate> candidates, TimePoint now) const;
  /// Sets request.choice for an engine that another policy has chosen, so that it is accounted for.
  void accept(const Candidate& candidate, std::string_view policy, KvRequest& request, Role role,
              TimePoint now);

  /// The request is sent to request.choice, if that is `engine`. Has no effect on one that was
  /// already placed there and has no new choice.
  void sent(KvRequest& request, const Engine& engine, TimePoint now);
  /// The answer has begun: the request is not sent again, so its text is no longer needed.
  static void release_text(KvRequest& request);
  /// The first byte of the engine's answer came.
  void first_token(KvRequest& request, TimePoint now);
  /// The engine has answered at once, some time after its first token: it has computed the prompt,
  /// and what it computes now is another one. Has no effect after first_token().
  void computed(KvRequest& request, TimePoint now);
  void computed(const KvLegAccount& leg, TimePoint now);
  /// The engine has reported the tokens of the prompt, and how many of them were cached.
  void reported(KvRequest& request, std::uint32_t prompt_tokens,
                std::optional<std::uint32_t> cached_tokens, TimePoint now);
  /// The request to the engine ended, in whatever way.
  void leg_ended(KvRequest& request, TimePoint now);
  /// Keeps the account of the leg in flight beside that of another leg, until leg_ended(it).
  [[nodiscard]] static std::optional<KvLegAccount> take_leg(KvRequest& request);
  void leg_ended(const KvLegAccount& leg, TimePoint now);
  /// The client's request ended.
  void finished(KvRequest& request, TimePoint now);

  // ---- prefetches

  /// The blocks that the engine's server shall fetch for a request that was sent; nullopt: none.
  std::optional<PrefetchOrder> prefetch_for(const KvRequest& request);
  /// The blocks that the server of the best engine shall fetch for a request that will come;
  /// nullopt: none. Changes no account.
  std::optional<PrefetchOrder> announce(std::span<const Candidate> candidates, KvRequest& request,
                                        TimePoint now);
  /// The blocks of an announcement are about to be fetched: the engine is expected to have them for
  /// one to two times kAnnounced, so that the request goes there, unless prefetch_became() tells
  /// that they are not fetched.
  void expect(const PrefetchOrder& announced, TimePoint now);
  /// A server ends a prefetch after this time.
  static constexpr Duration kAnnounced = std::chrono::seconds(8);
  /// Records an outcome; kSent is none.
  void prefetch_became(const PrefetchOrder& order, PrefetchState state);
  void prefetch_was_cancelled(const PrefetchOrder& order);
  [[nodiscard]] const PrefetchCounts& prefetch_counts() const noexcept { return prefetch_counts_; }
  /// nullptr: there are no prefetches.
  [[nodiscard]] const KvKeys* keys() const noexcept { return keys_ ? &*keys_ : nullptr; }
  // ---- for those who place requests themselves

  /// A request with this prompt that is not sent: for score().
  std::unique_ptr<KvRequest> peek(PromptText prompt, std::string_view model);
  /// The blocks that each candidate has of the prompt, and the cost of the request there. Changes
  /// no account.
  KvScores score(std::span<const Candidate> candidates, KvRequest& request, TimePoint now);
  /// The text becomes blocks with these keys, as a caller knows.
  void learn(const index::Text& text, std::span<const index::Key> keys);

  // ---- time

  /// Timeouts, and a slice of the index' work. Call it several times a second. Returns whether
  /// the index has more to do.
  bool tick(TimePoint now);
  /// Another slice of that work.
  bool work();

  // ---- for pages

  struct Stats {
    std::uint64_t chosen = 0;            ///< Decisions by cost.
    std::uint64_t fallbacks = 0;         ///< Decisions of the other policy.
    std::uint64_t pairs = 0;             ///< Decisions for a prefill and a decode engine.
    std::uint64_t skipped_prefills = 0;  ///< Decisions for a decode engine alone.
    std::uint64_t known_texts = 0;       ///< Requests of whose prompt a block or more was known.
    std::uint64_t unknown_texts = 0;
    std::uint64_t full_reports = 0;      ///< Requests that asked for reused blocks, too.
    std::uint64_t predicted_tokens = 0;  ///< Cached tokens predicted for requests with a report.
    std::uint64_t reported_tokens = 0;
    std::uint64_t prompt_tokens = 0;
    std::uint64_t close_reports = 0;  ///< Reports within a block of their prediction.
    /// Reports of fewer tokens, because the engine had evicted the rest by the time it began.
    std::uint64_t evicted_reports = 0;
    std::uint64_t reports = 0;  ///< All of them.
  };
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] index::BlockIndex::Stats block_stats() const { return blocks_->stats(); }
  [[nodiscard]] index::TextIndex::Stats text_stats() const { return texts_.stats(); }
  [[nodiscard]] index::Placement::Stats placement_stats() const { return placement_->stats(); }
  [[nodiscard]] const KvTokens& tokens() const { return tokens_; }
  [[nodiscard]] const KvLessons::Stats& lesson_stats() const { return lessons_.stats(); }
  [[nodiscard]] const index::WaitingBlocks& waiting() const { return waiting_; }
  [[nodiscard]] const RouteLog& log() const noexcept { return log_; }
  [[nodiscard]] std::uint64_t blocks_of(const KvPools::Pool& pool) const {
    return blocks_->blocks_of(pool.holder);
  }
  [[nodiscard]] std::uint64_t blocks_of(const KvFleet::Rank& rank) const {
    return blocks_->blocks_of(rank.holder);
  }
  /// Appends the hashes of a holder's blocks in the next part of the index; see BlockIndex::list().
  std::uint32_t list(index::HolderId holder, std::uint32_t cursor, std::size_t cells,
                     std::vector<std::uint64_t>& hashes) const;
  [[nodiscard]] double queue_seconds(const KvFleet::Rank& rank, TimePoint now) const {
    return placement_->queue_seconds(rank.place, now);
  }
  [[nodiscard]] double tokens_per_second(const KvFleet::Rank& rank) const {
    return placement_->rate(rank.place).tokens_per_second();
  }

 private:
  static constexpr std::string_view kComputeHint = R"("compute")";

  /// One (engine, rank) that may receive a request.
  struct Option {
    std::size_t candidate = 0;  // Index into the candidates.
    KvFleet::Rank* rank = nullptr;
    const KvPools::Pool* pool = nullptr;  // nullptr: none, or its blocks are not known.
    bool is_announced = false;            // Some of its blocks are only expected in the pool.
  };

  KvRouting(const Options& options, std::unique_ptr<index::BlockIndex> blocks,
            std::unique_ptr<index::Placement> placement, index::ExpectedBlocks expected,
            index::ExpectedBlocks announced, std::optional<KvKeys> keys, KvTokens tokens,
            KvStreams streams);

  void set_prompt(PromptText prompt, std::string_view model, KvRequest& request);
  /// Sets the keys of a prompt of token ids, if an engine of its model told how it hashes.
  void hash_tokens(const PromptText& prompt, KvRequest& request);

  void estimate(KvRequest& request) const;
  [[nodiscard]] double bytes_per_token(const std::string& model) const;
  /// Bytes of the text that become one block.
  [[nodiscard]] double bytes_per_block(const KvRequest& request, std::uint32_t block_tokens) const;
  /// Fills match_, expected_chunks_ and announced_chunks_.
  void match_prompt(const KvRequest& request, TimePoint now);
  /// Fills options_ and candidates_; returns the tokens of a block, 0 when no source gives credit.
  std::uint32_t collect(std::span<const Candidate> candidates, KvRequest& request, TimePoint now);
  /// The request, with what collect() has found.
  [[nodiscard]] index::PlacementRequest placement_request(const KvRequest& request,
                                                          std::uint32_t block_tokens) const;
  /// Removes all but the prefill engine of the pair from options_ and candidates_, if it is there.
  void keep_pair_only(const KvPair& pair);
  /// Follows the blocks that the engine has announced of a request that was sent to it.
  void follow(const KvRequest& request, const KvFleet::Rank& rank);
  /// The pool that an engine loads from, if its blocks are known.
  [[nodiscard]] const KvPools::Pool* trusted_pool(std::uint64_t engine) const;
  /// The hint for the connector of the chosen engine; empty: it asks as it does without a router.
  [[nodiscard]] std::string hint_for(const index::Decision& decision, std::uint32_t block_tokens,
                                     const KvRequest& request) const;
  /// The blocks that the server of the chosen engine could fetch beforehand.
  [[nodiscard]] std::optional<KvPull> pull_for(const index::Decision& decision,
                                               std::uint32_t block_tokens, const Option& option,
                                               const KvRequest& request) const;
  void record(const index::Decision& decision, std::uint32_t block_tokens, std::string_view policy,
              KvRequest& request, Role role, TimePoint now);

  std::unique_ptr<index::BlockIndex> blocks_;
  std::unique_ptr<index::Placement> placement_;
  index::ExpectedBlocks expected_;
  index::ExpectedBlocks announced_;  // In the pools of nodes, by the engine.
  index::TextIndex texts_;
  KvLessons lessons_;
  std::optional<KvKeys> keys_;
  KvTokens tokens_;
  index::WaitingBlocks waiting_;
  std::unique_ptr<KvFleet> fleet_;
  std::unique_ptr<KvPools> pools_;
  RouteLog log_;
  std::uint64_t next_leg_ = 1;
  std::uint64_t session_salt_;
  std::unordered_map<std::string, double> bytes_per_token_;  // By model, as learned.
  KvObserver* observer_ = nullptr;
  Stats stats_;
  PrefetchCounts prefetch_counts_;
  // Kept between decisions.
  index::Match match_;
  std::vector<std::uint32_t> expected_chunks_;   // By index::EngineId.
  std::vector<std::uint32_t> announced_chunks_;  // The same.
  std::vector<Option> options_;
  std::vector<index::Candidate> candidates_;
  std::vector<index::PullSource> sources_;
  std::vector<Option> prefill_options_;
  std::vector<index::Candidate> prefill_candidates_;
};

}  // namespace pegaflow::router
