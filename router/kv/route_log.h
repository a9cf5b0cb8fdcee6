#pragma once
/// \file
/// The last decisions of the policy kv-aware, for the page /routes.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "index/placement/placement.h"
#include "router/kv/kv_prefetch.h"
#include "router/kv/kv_request.h"

namespace pegaflow::router {

/// Keeps the last kEntries decisions with everything that explains them. It has no text of prompts
/// and no session. Thread-bound.
class RouteLog {
 public:
  static constexpr std::size_t kEntries = 64;
  /// The cheapest candidates of a decision, which are kept.
  static constexpr std::size_t kCandidates = 16;

  struct Candidate {
    std::string engine;  ///< URL.
    std::uint32_t rank = 0;
    std::string trust;  ///< The state of its events.
    index::Terms terms;
    bool is_chosen = false;
  };
  struct Entry {
    std::uint64_t number = 0;  ///< From 1.
    TimePoint time{};
    std::string model;
    std::string_view role;    ///< "prefill" or "decode".
    std::string_view policy;  ///< "kv-aware", or that of the fallback.
    std::uint32_t prompt_tokens = 0;
    std::uint32_t known_blocks = 0;  ///< Blocks of the prompt that the text index knows.
    std::uint32_t block_tokens = 0;
    double band = 0;                ///< Seconds.
    std::uint32_t near_equals = 0;  ///< Candidates in the band.
    std::uint32_t candidates = 0;   ///< All of them.
    std::vector<Candidate> terms;
    std::uint32_t predicted_cached = 0;  ///< Tokens.
    std::optional<std::uint32_t> reported_cached{};
    std::optional<std::uint32_t> reported_prompt{};
    std::optional<Duration> first_token{};  ///< From the request to the engine's first byte.
    bool has_ended = false;
    std::optional<KvPair> pair{};  ///< The decision about both legs, if it was made before this.
    std::optional<PrefetchState> prefetch{};  ///< Not set: none would have paid.
    std::uint32_t prefetch_blocks = 0;        ///< Keys of it.
    bool is_prefetch_cancelled = false;
  };

  /// Keeps the entry and returns its number.
  std::uint64_t add(Entry entry);
  /// The entry, if it is still kept.
  [[nodiscard]] Entry* find(std::uint64_t number);
  /// All entries as JSON, the newest first.
  [[nodiscard]] std::string json(TimePoint now) const;

 private:
  std::deque<Entry> entries_;
  std::uint64_t next_ = 1;
};

}  // namespace pegaflow::router
