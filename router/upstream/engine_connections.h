#pragma once
/// \file
/// The pooled connections to engines, and their addresses.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
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
#include "router/routing/fleet.h"
#include "router/upstream/pending_call.h"

namespace pegaflow::router {

/// A connection to an engine. A type of its own, so that upstream.h needs no socket.
struct EngineSocket : boost::asio::ip::tcp::socket {
  using boost::asio::ip::tcp::socket::socket;
};

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
  std::unique_ptr<EngineSocket> take(const Engine& engine);
  /// Keeps a connection for the next request.
  void give_back(const Engine& engine, std::unique_ptr<EngineSocket> socket);
  /// Closes connections that were idle for too long, and those to engines outside `engines`.
  void sweep(const std::vector<std::shared_ptr<Engine>>& engines);
  /// Registers a call, which must be removed before it ends. Returns false when all calls end, see
  /// close_all().
  [[nodiscard]] bool add(PendingCall& call);
  void remove(PendingCall& call);
  /// Ends all calls of an engine that is down with kGone, and closes its connections.
  void give_up(const Engine& engine);
  /// Ends all calls and closes all connections. A call that begins later ends at once.
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
    std::unique_ptr<EngineSocket> socket;
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
  std::unordered_set<PendingCall*> calls_;
  bool is_closed_ = false;
};

}  // namespace pegaflow::router
