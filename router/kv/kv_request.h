#pragma once
/// \file
/// One request as the policy kv-aware sees it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "index/placement/placement.h"
#include "index/text.h"
#include "index/text_index.h"
#include "router/kv/kv_prefetch.h"
#include "router/kv/kv_tokens.h"

namespace pegaflow::router {

/// The name of the policy in options.
inline constexpr std::string_view kKvAware = "kv-aware";

/// The place that was chosen for one leg of a request.
struct KvChoice {
  std::uint64_t engine = 0;            ///< Engine::id.
  std::uint32_t rank = 0;              ///< Data-parallel rank.
  bool is_by_cost = false;             ///< Not chosen by the other policy.
  bool is_announced = false;           ///< Some of the blocks are only expected in the pool.
  bool names_rank = false;             ///< The engine has several ranks: the request names one.
  index::Terms terms{};                ///< The cost of the engine, and what it has.
  std::uint32_t predicted_cached = 0;  ///< Tokens that the engine should report as cached.
  std::uint64_t log_entry = 0;         ///< Number in the RouteLog; 0: none.
  std::string hint{};  ///< JSON for the engine's connector: the nodes to ask first, or "compute".
  std::optional<KvPull> pull{};  ///< Blocks that its server could fetch before the engine asks.
};

/// The account of one leg that is in flight beside another one of the same request.
struct KvLegAccount {
  std::uint64_t id = 0;         ///< KvRequest::id at the time.
  std::uint64_t log_entry = 0;  ///< Number in the RouteLog; 0: none.
};

/// The decision about the two legs of a request, before the first of them.
struct KvPair {
  bool skips_prefill = false;  ///< A decode engine alone costs no more.
  std::uint64_t prefill = 0;   ///< Engine::id of the prefill engine; unset when it is skipped.
  std::uint32_t rank = 0;      ///< Its data-parallel rank.
  double transfer = 0;         ///< Seconds from its node to the decode engine's.
  double cost = 0;             ///< Seconds, of the pair or of the engine alone.
  double alone_cost = 0;       ///< Seconds, of the best decode engine alone.
};

/// The prompt of one request, the blocks that it is known to have, and where it was placed. Created
/// by KvRouting::begin(), which also ends it. Thread-bound.
struct KvRequest {
  std::uint64_t id = 0;  ///< Unique among the requests of this router.
  std::string model{};
  std::string text_bytes{};          ///< Owns the text until the answer begins.
  std::size_t text_size = 0;         ///< Bytes of the text, also after that.
  index::Text text{};                ///< Views `text_bytes`.
  std::size_t token_count = 0;       ///< Tokens of a prompt of token ids; 0: it is text.
  index::TextIndex::Known known{};   ///< The blocks of the text.
  std::string cache_salt{};          ///< Empty: none.
  bool is_truncated = false;         ///< The engine keeps the end of the prompt only.
  std::string session{};             ///< The session id by which the engine names it; empty: none.
  HashMode hash_mode = 0;            ///< `known` was computed of token ids in this mode; 0: not.
  bool adds_session = false;         ///< The router has to send it; otherwise the client does.
  bool wants_full_report = false;    ///< The engine has to report reused blocks, too.
  std::uint32_t prompt_tokens = 0;   ///< Known or estimated.
  std::optional<KvChoice> choice{};  ///< The last Policy::choose().
  std::optional<KvChoice> placed{};  ///< The leg that is in flight.
  std::optional<KvPair> pair{};      ///< For the next Policy::choose(), which uses it up.
  std::uint64_t prefilled_by = 0;    ///< Engine::id of the prefill engine that did.
  bool is_prefilled = false;         ///< A prefill engine has computed and saved the prompt.
  bool has_first_token = false;      ///< That leg has sent its first byte.
  bool has_answer = false;           ///< That leg's answer has begun.
  bool has_lesson = false;           ///< Engines' events about it are collected.
};

}  // namespace pegaflow::router
