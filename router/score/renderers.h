#pragma once
/// \file
/// Servers that make token ids of texts.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "index/text.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

class ClientWait;
class EngineConnections;

/// Texts that a server was asked about, so that a conversation costs one call and not one for each
/// of its turns. Remembers the ends of the last kTexts texts. Immutable memory of 64 KiB;
/// thread-bound.
class AskedTexts {
 public:
  static constexpr std::size_t kTexts = 8192;

  AskedTexts() : ends_(kTexts) {}
  /// Whether `text` begins with a text that was added. Texts of less than a chunk are not known.
  [[nodiscard]] bool continues_one(const index::Text& text) const;
  void add(const index::Text& text);

 private:
  std::vector<std::uint64_t> ends_;  // The hash of the last chunk of a text, at its remainder.
};

/// Asks vLLM's POST /v1/.../render, which engines with --enable-scale-out and `vllm launch render`
/// serve, and at others POST /tokenize. Never more than `inflight` requests at one server, and none
/// while its breaker is open: then the answer is "not known" at once. Thread-bound.
class Renderers {
 public:
  struct Options {
    Duration timeout = std::chrono::milliseconds(200);  ///< For one text, whatever happens.
    std::size_t inflight = 2;                           ///< Per server.
  };
  /// The maximum size of an answer: some million tokens.
  static constexpr std::size_t kAnswerBytes = std::size_t{16} << 20U;
  /// Bytes of a body that a server renders in a millisecond. A longer body than the timeout allows
  /// says nothing about the server when it is late.
  static constexpr std::int64_t kBytesPerMs = 2'400;
  /// The time for which a server without /render is asked for /tokenize directly.
  static constexpr Duration kTokenizeTime = std::chrono::minutes(1);

  struct Stats {
    std::uint64_t rendered = 0;
    std::uint64_t failed = 0;
    std::uint64_t late = 0;  ///< Texts without an answer at the end of the timeout.
    std::uint64_t busy = 0;  ///< Texts that no server had room for.
  };

  /// `connections` and `key` outlive the object; `key` is the servers' API key, and may change.
  /// Empty: none.
  Renderers(EngineConnections& connections, const std::vector<EngineUrl>& servers,
            const std::string& key, const Options& options);

  /// The tokens of the prompt in `body`, a request to the route `route` ("chat", "completions",
  /// "messages" or "responses") as to an engine; nullopt: not known. The end of `wait` ends the
  /// call; nullptr: no client waits. `body` and `wait` outlive the coroutine.
  boost::asio::awaitable<std::optional<std::vector<std::uint32_t>>> tokens(std::string_view route,
                                                                           std::string_view body,
                                                                           ClientWait* wait);

  /// Whether a server would be asked now.
  [[nodiscard]] bool has_room() { return choose() != nullptr; }
  [[nodiscard]] AskedTexts& asked() noexcept { return asked_; }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  /// The metrics about them; their names begin with `prefix`.
  [[nodiscard]] std::string metrics(std::string_view prefix) const;

 private:
  struct Server {
    std::shared_ptr<Engine> engine;  ///< Outside of the fleet.
    TimePoint tokenizes_until{};     ///< Until then it is taken to have no /render.
  };

  /// The server with the fewest requests that may receive another one; nullptr: none.
  [[nodiscard]] Server* choose();
  /// Whether a server that works renders such a body in time.
  [[nodiscard]] bool may_render(std::size_t body_bytes) const;
  /// Asks the server, and for /tokenize if it has no /render.
  boost::asio::awaitable<Result<std::vector<std::uint32_t>>> ask(Server& server,
                                                                 std::string_view route,
                                                                 std::string_view body,
                                                                 ClientWait* wait);

  EngineConnections& connections_;
  const std::string& key_;
  const Options options_;
  std::vector<Server> servers_;  // Never changes after the constructor.
  AskedTexts asked_;
  Stats stats_;
};

/// The token ids in an answer of /render or /tokenize. Empty for anything else: several prompts,
/// and a prompt with images, whose blocks depend on more than its tokens.
std::vector<std::uint32_t> read_rendered(std::string_view answer);

}  // namespace pegaflow::router
