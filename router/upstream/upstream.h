#pragma once
/// \file
/// One request to one engine, over connections that are kept.

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

/// Connections to engines that wait for their next request, and where engines' names lead.
/// Thread-bound.
class EngineConnections {
 public:
  struct Options {
    Duration connect_timeout = std::chrono::seconds(1);
    Duration idle_time = std::chrono::seconds(4);
    std::size_t idle_limit = 256;  ///< Of one engine.
  };

  EngineConnections(boost::asio::io_context& io, Deadlines& deadlines, const Options& options);

  /// One for that engine that is still open, if any.
  std::unique_ptr<boost::asio::ip::tcp::socket> take(const Engine& engine);
  /// Keeps it for the next request.
  void give_back(const Engine& engine, std::unique_ptr<boost::asio::ip::tcp::socket> socket);
  /// Closes those that waited too long, and those of engines that are not in `engines`.
  void sweep(const std::vector<std::shared_ptr<Engine>>& engines);
  /// Ends all calls of an engine that is down with kGone, and closes its connections.
  void give_up(const Engine& engine);
  /// Ends all calls, those too that begin later, and closes all connections.
  void close_all();

  /// Looks the engine's host up anew, unless it is an address, and waits until `timer` is canceled,
  /// at most for `limit`. What is known stays while the question is open, and when there is no
  /// answer. Nothing cuts the system's resolver short: a question stays open behind who asked it,
  /// one for each engine, and run() of the io_context returns only after it.
  /// Errors: kTimeout for no answer yet; as fail_socket().
  boost::asio::awaitable<Result<void>> resolve(std::shared_ptr<Engine> engine,
                                               boost::asio::steady_timer& timer, Duration limit);
  /// Addresses of its host, the next one first; an address itself needs no resolve().
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

/// What may be done with a request whose kept connection ends without an answer. The engine may
/// have closed it as unused, or may have been ended by the request.
enum class Resend : unsigned char {
  kNever,       ///< No kept connection is used at all.
  kUnlessSent,  ///< It goes over a new connection unless it was written to its end.
  kAlways,      ///< It asks for something and changes nothing, as a health check.
};

/// One request and its answer. Thread-bound; its calls follow each other.
///
/// When it is destroyed the connection is kept if the answer was read to its end, and closed
/// otherwise: that is how an engine learns that nobody waits any more.
class UpstreamCall {
 public:
  /// `connections` outlives the call.
  UpstreamCall(EngineConnections& connections, std::shared_ptr<Engine> engine);
  ~UpstreamCall();
  UpstreamCall(const UpstreamCall&) = delete;
  UpstreamCall& operator=(const UpstreamCall&) = delete;

  /// Sends the request and reads the answer's head, in `timeout`. `body` stays until then. A kept
  /// connection that the engine has closed is found out before anything is written.
  /// Errors: kRefused (no connection; nothing was sent), kTimeout, kCancelled, kPeerLost, kCorrupt,
  /// kGone (the engine was given up).
  boost::asio::awaitable<Result<void>> open(std::string head, std::string_view body,
                                            Duration timeout, Resend resend);

  /// Whether the engine may have read the request to its end.
  [[nodiscard]] bool was_sent() const noexcept { return was_sent_; }

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const noexcept { return engine_; }
  [[nodiscard]] const ResponseHead& head() const noexcept { return parser_.head(); }
  [[nodiscard]] bool is_complete() const noexcept { return parser_.is_complete(); }

  /// Appends more of the answer's body to `out`, at least a byte unless the answer ended.
  /// Errors: as open().
  boost::asio::awaitable<Result<void>> more(std::string& out, Duration timeout);

  /// Ends whatever is under way with kCancelled. May be called at any time.
  void cancel();
  /// The same with kGone: the engine is down.
  void give_up();

  /// Bytes that fit into what one read takes.
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
  boost::asio::steady_timer* resolving_ = nullptr;  // While its engine's name is looked up.
  ResponseParser parser_;
  std::string unparsed_;    // Of a head that is not whole.
  std::string first_body_;  // What came with the head.
  bool received_ = false;   // Any byte.
  bool was_sent_ = false;
  bool cancelled_ = false;
  bool given_up_ = false;
};

/// GET of a short answer, whole, in `timeout` from the first to the last byte.
/// Errors: as UpstreamCall::open(), and kOutOfCapacity for more than `limit` bytes.
struct ShortAnswer {
  unsigned status = 0;
  std::string body;
};
boost::asio::awaitable<Result<ShortAnswer>> get_from_engine(EngineConnections& connections,
                                                            std::shared_ptr<Engine> engine,
                                                            std::string head, Duration timeout,
                                                            std::size_t limit);

}  // namespace pegaflow::router
