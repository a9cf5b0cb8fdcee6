#pragma once
/// \file
/// Blocks that a server fetches for a request while its engine still parses it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "index/placement/record.h"

namespace pegaflow::router {

/// The limit of keys in one prefetch (docs/router_api.md).
inline constexpr std::size_t kMostPrefetchKeys = 8192;

/// The blocks that an engine will load, as its choice knows them.
struct KvPull {
  std::string server;       ///< URL of the server of the engine's node.
  std::string space;        ///< The namespace's hash.
  std::uint32_t first = 0;  ///< The first block that the engine's own cache lacks.
  std::uint32_t end = 0;
};

/// One prefetch that may be requested.
struct PrefetchOrder {
  std::string server;            ///< URL.
  std::string space;             ///< The namespace's hash.
  std::vector<BlockKey> keys{};  ///< Consecutive blocks of a prompt.
  std::string sources{};         ///< JSON: the nodes to ask first; empty: none is known.
  std::string tenant{};          ///< Letters and digits; empty: none, with the limit of all.
  std::uint64_t log_entry = 0;   ///< Number in the RouteLog.
  /// Of an announcement: where its request is expected while the blocks are fetched.
  index::EngineId engine = index::kNoEngine;
  std::vector<std::uint64_t> chunks{};  ///< The part of index::Text::chunks that is fetched.

  /// The body of POST /prefetch. `id` has letters, digits and '-'.
  [[nodiscard]] std::string body(std::string_view id) const;
};

/// The outcome of a prefetch that would have paid.
enum class PrefetchState : unsigned char {
  kSent,         ///< The server has not answered yet.
  kAccepted,     ///< The server answered 202, and does not tell what it found.
  kRefused,      ///< Another status.
  kFailed,       ///< No answer in time.
  kBusy,         ///< Not requested: too many requests to the server are in flight.
  kSuspended,    ///< Not requested: the server has failed repeatedly.
  kUnknownKeys,  ///< Not requested: the router does not have the full keys.
};
inline constexpr std::size_t kPrefetchStateCount =
    static_cast<std::size_t>(PrefetchState::kUnknownKeys) + 1;
/// The name in metrics and in /routes.
std::string_view to_string(PrefetchState state) noexcept;

/// Counts of prefetches, for metrics.
struct PrefetchCounts {
  std::array<std::uint64_t, kPrefetchStateCount> by_state{};  ///< kSent: in flight now.
  std::uint64_t blocks = 0;                                   ///< Keys of the accepted ones.
  std::uint64_t cancelled = 0;  ///< Accepted or sent, and cancelled before the engine answered.

  [[nodiscard]] std::uint64_t& of(PrefetchState state) {
    return by_state[static_cast<std::size_t>(state)];
  }
};

}  // namespace pegaflow::router
