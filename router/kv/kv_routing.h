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
#include "index/text_index.h"
#include "router/body/prompt_text.h"
#include "router/kv/kv_fleet.h"
#include "router/kv/kv_lessons.h"
#include "router/kv/kv_pools.h"
#include "router/kv/kv_request.h"
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
  };
  /// Errors: kInvalidArgument for an option out of its range; kOutOfCapacity without memory.
  static Result<std::unique_ptr<KvRouting>> create(const Options& options, KvStreams streams);

  [[nodiscard]] KvFleet& fleet() noexcept { return *fleet_; }
  [[nodiscard]] const KvFleet& fleet() const noexcept { return *fleet_; }

  [[nodiscard]] KvPools& pools() noexcept { return *pools_; }
  [[nodiscard]] const KvPools& pools() const noexcept { return *pools_; }

  // ---- one request

  /// A request with this prompt. `client_session` is the session id that the client has set, which
  /// engines repeat in their events; empty: the router sets one.
  std::unique_ptr<KvRequest> begin(PromptText prompt, std::string_view model,
                                   std::string_view client_session);

  /// The index of the candidate with the least cost, and request.choice. nullopt when no candidate
  /// announces its blocks; another policy then has to choose.
  std::optional<std::size_t> choose(std::span<const Candidate> candidates, KvRequest& request,
                                    Role role, TimePoint now);
  /// The least number of tokens of the prompt that one of the candidates would have to compute;
  /// nullopt when none announces its blocks.
  std::optional<std::uint32_t> least_uncached(std::span<const Candidate> candidates,
                                              KvRequest& request, TimePoint now);
  /// Sets request.choice for an engine that another policy has chosen, so that it is accounted for.
  void accept(const Candidate& candidate, std::string_view policy, KvRequest& request, Role role,
              TimePoint now);

  /// The request was sent to request.choice, if that is `engine`.
  void sent(KvRequest& request, const Engine& engine, TimePoint now);
  /// The answer has begun: the request is not sent again, so its text is no longer needed.
  static void release_text(KvRequest& request);
  /// The first byte of the engine's answer came.
  void first_token(KvRequest& request, TimePoint now);
  /// The engine has reported the tokens of the prompt, and how many of them were cached.
  void reported(KvRequest& request, std::uint32_t prompt_tokens,
                std::optional<std::uint32_t> cached_tokens, TimePoint now);
  /// The request to the engine ended, in whatever way.
  void leg_ended(KvRequest& request, TimePoint now);
  /// The client's request ended.
  void finished(KvRequest& request, TimePoint now);

  // ---- time

  /// Timeouts, and a slice of the index' work. Call it several times a second. Returns whether
  /// the index has more to do.
  bool tick(TimePoint now);
  /// Another slice of that work.
  bool work();

  // ---- for pages

  struct Stats {
    std::uint64_t chosen = 0;       ///< Decisions by cost.
    std::uint64_t fallbacks = 0;    ///< Decisions of the other policy.
    std::uint64_t known_texts = 0;  ///< Requests of whose prompt a block or more was known.
    std::uint64_t unknown_texts = 0;
    std::uint64_t full_reports = 0;      ///< Requests that asked for reused blocks, too.
    std::uint64_t predicted_tokens = 0;  ///< Cached tokens predicted for requests with a report.
    std::uint64_t reported_tokens = 0;
    std::uint64_t prompt_tokens = 0;
    std::uint64_t close_reports = 0;  ///< Reports within a block of their prediction.
    std::uint64_t reports = 0;
  };
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] index::BlockIndex::Stats block_stats() const { return blocks_->stats(); }
  [[nodiscard]] index::TextIndex::Stats text_stats() const { return texts_.stats(); }
  [[nodiscard]] index::Placement::Stats placement_stats() const { return placement_->stats(); }
  [[nodiscard]] const KvLessons::Stats& lesson_stats() const { return lessons_.stats(); }
  [[nodiscard]] const RouteLog& log() const noexcept { return log_; }
  [[nodiscard]] std::uint64_t blocks_of(const KvPools::Pool& pool) const {
    return blocks_->blocks_of(pool.holder);
  }
  [[nodiscard]] std::uint64_t blocks_of(const KvFleet::Rank& rank) const {
    return blocks_->blocks_of(rank.holder);
  }
  [[nodiscard]] double queue_seconds(const KvFleet::Rank& rank, TimePoint now) const {
    return placement_->queue_seconds(rank.place, now);
  }
  [[nodiscard]] double tokens_per_second(const KvFleet::Rank& rank) const {
    return placement_->rate(rank.place).tokens_per_second();
  }

 private:
  /// One (engine, rank) that may receive a request.
  struct Option {
    std::size_t candidate = 0;  // Index into the candidates.
    KvFleet::Rank* rank = nullptr;
    const KvPools::Pool* pool = nullptr;  // nullptr: none, or its blocks are not known.
  };

  KvRouting(const Options& options, std::unique_ptr<index::BlockIndex> blocks,
            std::unique_ptr<index::Placement> placement, index::ExpectedBlocks expected,
            KvStreams streams);

  void estimate(KvRequest& request) const;
  [[nodiscard]] double bytes_per_token(const std::string& model) const;
  /// Bytes of the text that become one block.
  [[nodiscard]] double bytes_per_block(const KvRequest& request, std::uint32_t block_tokens) const;
  /// Fills options_ and candidates_; returns the tokens of a block, 0 when no source gives credit.
  std::uint32_t collect(std::span<const Candidate> candidates, KvRequest& request, TimePoint now);
  /// The pool that an engine loads from, if its blocks are known.
  [[nodiscard]] const KvPools::Pool* trusted_pool(std::uint64_t engine) const;
  /// The hint for the connector of the chosen engine; empty: it asks as it does without a router.
  [[nodiscard]] std::string hint_for(const index::Decision& decision, std::uint32_t block_tokens,
                                     const KvRequest& request) const;
  void record(const index::Decision& decision, std::uint32_t block_tokens, std::string_view policy,
              KvRequest& request, Role role, TimePoint now);

  std::unique_ptr<index::BlockIndex> blocks_;
  std::unique_ptr<index::Placement> placement_;
  index::ExpectedBlocks expected_;
  index::TextIndex texts_;
  KvLessons lessons_;
  std::unique_ptr<KvFleet> fleet_;
  std::unique_ptr<KvPools> pools_;
  RouteLog log_;
  std::uint64_t next_leg_ = 1;
  std::uint64_t session_salt_;
  std::unordered_map<std::string, double> bytes_per_token_;  // By model, as learned.
  Stats stats_;
  // Kept between decisions.
  index::Match match_;
  std::vector<std::uint32_t> expected_chunks_;  // By index::EngineId.
  std::vector<Option> options_;
  std::vector<index::Candidate> candidates_;
  std::vector<index::PullSource> sources_;
};

}  // namespace pegaflow::router
