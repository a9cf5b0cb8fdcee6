#pragma once
/// \file
/// One request to one engine, over pooled connections.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "router/http/deadlines.h"
#include "router/http/http_message.h"
#include "router/routing/fleet.h"
#include "router/upstream/pending_call.h"

namespace pegaflow::router {

class EngineConnections;
struct EngineSocket;

/// Whether a request may be sent again when its pooled connection ends without a response. The
/// engine may have closed the idle connection, or the request may have crashed the engine.
enum class Resend : unsigned char {
  kNever,       ///< The request uses no pooled connection at all.
  kUnlessSent,  ///< Sent again over a new connection unless it was written completely.
  kAlways,      ///< Sent again in any case: it changes nothing, like a health check.
};

/// One request and its response. Thread-bound; its calls do not overlap.
///
/// The destructor keeps the connection if the response was read to its end, and closes it
/// otherwise: an engine detects by this that its client has left.
class UpstreamCall final : public PendingCall {
 public:
  /// `connections` outlives the call.
  UpstreamCall(EngineConnections& connections, std::shared_ptr<Engine> engine);
  ~UpstreamCall();
  UpstreamCall(const UpstreamCall&) = delete;
  UpstreamCall& operator=(const UpstreamCall&) = delete;

  /// Sends the request and reads the response's head within `timeout`; `body` outlives this. Checks
  /// a pooled connection before writing to it, so that one that the engine has closed is not used.
  /// Errors: kRefused (no connection; nothing was sent), kTimeout, kCancelled, kPeerLost, kCorrupt,
  /// kGone (the engine was given up).
  boost::asio::awaitable<Result<void>> open(std::string head, std::string_view body,
                                            Duration timeout, Resend resend);

  /// Whether the engine may have read the request to its end.
  [[nodiscard]] bool was_sent() const noexcept { return was_sent_; }

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const noexcept { return engine_; }
  [[nodiscard]] const ResponseHead& head() const noexcept { return parser_.head(); }
  [[nodiscard]] bool is_complete() const noexcept { return parser_.is_complete(); }

  /// Appends more of the response's body to `out`: at least a byte, unless the response ended.
  /// Errors: as open().
  boost::asio::awaitable<Result<void>> more(std::string& out, Duration timeout);

  [[nodiscard]] const Engine& callee() const noexcept override { return *engine_; }
  void cancel() override;
  void give_up() override;

  /// The size of the receive buffer.
  static constexpr std::size_t kReadBytes = std::size_t{64} * 1024;

 private:
  boost::asio::awaitable<Result<void>> connect(TimePoint end);
  boost::asio::awaitable<Result<void>> send_and_read_head(const std::string& head,
                                                          std::string_view body);
  boost::asio::awaitable<Result<void>> receive(std::string& out);
  [[nodiscard]] Error failure(Error error) const;

  EngineConnections& connections_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<EngineSocket> socket_;
  Deadline deadline_;
  std::function<void()> stop_resolving_;  // Set while the engine's name is resolved.
  ResponseParser parser_;
  std::string unparsed_;    // The bytes of an incomplete head or chunk line.
  std::string first_body_;  // Body bytes that arrived with the head.
  bool received_ = false;   // At least one byte has arrived.
  bool was_sent_ = false;
  bool cancelled_ = false;
  bool given_up_ = false;
};

/// The head of a request of the router's own; with `bearer` it has that token or key.
std::string request_head(const Engine& engine, std::string_view method, std::string_view target,
                         std::string_view bearer, std::size_t body_bytes);
/// The same of a GET.
std::string get_head(const Engine& engine, std::string_view target, std::string_view bearer = {});

/// Sends a request that may be repeated, and reads the whole response, within `timeout` for
/// everything. `body` outlives the coroutine.
/// Errors: as UpstreamCall::open(), and kOutOfCapacity for more than `limit` bytes.
struct ShortResponse {
  unsigned status = 0;
  std::string body;
};
boost::asio::awaitable<Result<ShortResponse>> ask_engine(EngineConnections& connections,
                                                         std::shared_ptr<Engine> engine,
                                                         std::string head, std::string_view body,
                                                         Duration timeout, std::size_t limit);
/// The same over a call that has not been opened yet.
boost::asio::awaitable<Result<ShortResponse>> ask_engine(UpstreamCall& call, std::string head,
                                                         std::string_view body, Duration timeout,
                                                         std::size_t limit);
/// The same for a GET.
boost::asio::awaitable<Result<ShortResponse>> get_from_engine(EngineConnections& connections,
                                                              std::shared_ptr<Engine> engine,
                                                              std::string head, Duration timeout,
                                                              std::size_t limit);

}  // namespace pegaflow::router
