#pragma once
/// \file
/// One request to one engine, over pooled connections.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "router/http/deadlines.h"
#include "router/http/http_message.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

class UpstreamCall;

/// The idle connections to engines, and the resolved addresses of engines. Thread-bound.
class EngineConnections {
 public:
  struct Options {
    Duration connect_timeout = std::chrono::seconds(1);
    Duration idle_time = std::chrono::seconds(4);
    std::size_t idle_limit = 256;  ///< Per engine.
  };

  EngineConnections(boost::asio::io_context& io, Deadlines& deadlines, const Options& options);

  /// An idle connection to the engine that is still open; nullptr when there is none.
  std::unique_ptr<boost::asio::ip::tcp::socket> take(const Engine& engine);
  /// Keeps a connection for the next request.
  void give_back(const Engine& engine, std::unique_ptr<boost::asio::ip::tcp::socket> socket);
  /// Closes connections that were idle for too long, and those to engines outside `engines`.
  void sweep(const std::vector<std::shared_ptr<Engine>>& engines);
  /// Ends all calls of an engine that is down with kGone, and closes its connections.
  void give_up(const Engine& engine);
  /// Ends all calls, also those that begin later, and closes all connections.
  void close_all();

  /// Resolves the engine's host again, unless it is an address, and waits until `timer` is
  /// canceled, at most for `limit`. The former addresses stay valid during a lookup and after a
  /// failed one. The system's resolver cannot be interrupted: a lookup outlives its caller (one per
  /// engine), and run() of the io_context returns only after it. Errors: kTimeout when the lookup
  /// has not ended; as fail_socket().
  boost::asio::awaitable<Result<void>> resolve(std::shared_ptr<Engine> engine,
                                               boost::asio::steady_timer& timer, Duration limit);
  /// Addresses of its host, rotated with each call; an address itself needs no resolve().
  [[nodiscard]] std::vector<boost::asio::ip::tcp::endpoint> endpoints(const Engine& engine);

  [[nodiscard]] boost::asio::io_context& io() { return io_; }
  [[nodiscard]] Deadlines& deadlines() { return deadlines_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  struct Idle {
    std::unique_ptr<boost::asio::ip::tcp::socket> socket;
    TimePoint since;
  };
  struct Known {
    std::vector<boost::asio::ip::tcp::endpoint> endpoints;
    std::size_t next = 0;
  };

  struct Lookup {
    explicit Lookup(boost::asio::io_context& io) : resolver(io) {}
    boost::asio::ip::tcp::resolver resolver;
    std::vector<boost::asio::steady_timer*> waiting;
    std::optional<Result<void>> result;
  };
  boost::asio::awaitable<void> look_up(std::shared_ptr<Engine> engine,
                                       std::shared_ptr<Lookup> lookup);

  boost::asio::io_context& io_;
  Deadlines& deadlines_;
  Options options_;
  std::unordered_map<std::string, std::vector<Idle>> idle_;           // By the engine's URL.
  std::unordered_map<std::string, Known> known_;                      // By the engine's URL.
  std::unordered_map<std::string, std::shared_ptr<Lookup>> lookups_;  // By the engine's URL.
  std::unordered_set<UpstreamCall*> calls_;
  bool is_closed_ = false;
  friend class UpstreamCall;
};

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
class UpstreamCall {
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

  /// Ends the pending operation with kCancelled. May be called at any time.
  void cancel();
  /// Ends it with kGone: the engine is down.
  void give_up();

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
  std::unique_ptr<boost::asio::ip::tcp::socket> socket_;
  Deadline deadline_;
  boost::asio::steady_timer* resolving_ = nullptr;  // Set while the engine's name is resolved.
  ResponseParser parser_;
  std::string unparsed_;    // The bytes of an incomplete head or chunk line.
  std::string first_body_;  // Body bytes that arrived with the head.
  bool received_ = false;   // At least one byte has arrived.
  bool was_sent_ = false;
  bool cancelled_ = false;
  bool given_up_ = false;
};

/// Sends a GET and reads the whole response, within `timeout` for everything.
/// Errors: as UpstreamCall::open(), and kOutOfCapacity for more than `limit` bytes.
struct ShortResponse {
  unsigned status = 0;
  std::string body;
};
boost::asio::awaitable<Result<ShortResponse>> get_from_engine(EngineConnections& connections,
                                                              std::shared_ptr<Engine> engine,
                                                              std::string head, Duration timeout,
                                                              std::size_t limit);

}  // namespace pegaflow::router
