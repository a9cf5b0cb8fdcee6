#pragma once
/// \file
/// Which blocks the prompts of requests have, as engines' schedulers report it for routers.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace pegaflow::server {

/// The blocks of one prompt.
struct PromptChain {
  std::uint64_t session = 0;       ///< session_name() of the request's session id.
  std::uint32_t block_tokens = 0;  ///< Tokens of each block.
  /// The low 64 bits of the engine's hashes, from the beginning of the prompt on.
  std::vector<std::uint64_t> keys{};
};

/// Keeps the newest chains until routers have read them. Bounded: the oldest make room. A router
/// that comes too late misses them, which costs nothing but knowledge. While no router reads,
/// nothing is kept. Thread-bound: the RPC thread.
class PromptChains {
 public:
  struct Options {
    std::size_t most_chains = 4096;
    std::size_t most_bytes = std::size_t{16} << 20U;
    /// Chains are wanted for so long after a router has read.
    Duration interest = std::chrono::seconds(60);
  };
  static constexpr std::uint64_t kEnd = ~std::uint64_t{0};

  /// `clock` outlives it.
  PromptChains(const Options& options, const Clock& clock) : options_(options), clock_(clock) {}

  /// Keeps a chain of the namespace `space`, a hash, and calls the hook of on_next(). Returns
  /// whether routers want chains; if not, it is dropped.
  bool add(std::string_view space, PromptChain chain);

  struct Part {
    std::uint64_t position = 0;  ///< Where to continue.
    bool has_more = false;
    std::vector<PromptChain> chains{};
  };
  /// A router reads the chains of `space` from `position` on, an earlier Part's; from kEnd only the
  /// present position. At most about `most_bytes` of them, and at least one.
  Part read(std::string_view space, std::uint64_t position, std::size_t most_bytes);
  /// Whether a router has read within `Options::interest`.
  [[nodiscard]] bool are_wanted() const;

  /// Calls `hook` with the next chain, once; null: none.
  void on_next(std::function<void()> hook) { on_next_ = std::move(hook); }

  struct Stats {
    std::uint64_t kept = 0;      ///< Since the start.
    std::uint64_t unwanted = 0;  ///< Dropped because no router read.
    std::uint64_t lost = 0;      ///< Dropped for newer ones; they may have been read.
    std::size_t chains = 0;      ///< Now.
    std::size_t bytes = 0;
  };
  [[nodiscard]] Stats stats() const;

 private:
  struct Row {
    std::string space;
    PromptChain chain;
  };
  static std::size_t bytes_of(const Row& row);

  const Options options_;
  const Clock& clock_;
  std::deque<Row> rows_;
  std::uint64_t first_ = 0;  ///< The position of rows_.front().
  std::size_t bytes_ = 0;
  std::optional<TimePoint> read_at_;
  std::function<void()> on_next_;
  Stats counted_;
};

}  // namespace pegaflow::server
