#pragma once
/// \file
/// /health, /metrics, /instances and POST /cache/memory/cleanup, on a thread of its own.

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/os/mailbox.h"
#include "server/http/admin_messages.h"
#include "server/http/http_connections.h"
#include "server/http/router_guard.h"
#include "server/rpc/listener.h"

namespace pegaflow::server {

/// Serves HTTP with kj-http on one thread, so that a scrape never delays a lookup.
///
/// It holds only the health: for anything else it puts a question into the RPC thread's mailbox and
/// responds with the answer, one request after the other (http_turns.h). /health is served at once,
/// so that clients that request many pages, or never read them, do not delay it. POST needs the
/// token, from every address, or the Unix socket: http_guard.h.
///
/// Constructor and destructor belong to one thread; publish() is thread-safe.
class HttpServer {
 public:
  struct Options {
    std::string token;                     ///< For POST over TCP; empty: refused there.
    std::optional<RouterGuard> routers{};  ///< Over TCP; no value: they are refused there.
    std::vector<std::uint32_t>
        allowed_uids{};  ///< At the Unix socket, beside root and the own user.
    HttpConnections::Options connections{};
    bool test_hooks = false;
    Health health;                                      ///< Until the first publish_health().
    Duration answer_timeout = std::chrono::seconds(5);  ///< Then 503: the RPC thread hangs.
  };

  /// The limit of unanswered questions, all but one of which have timed out; beyond it the response
  /// is 503. This reserves a place for each answer.
  static constexpr std::size_t kQuestions = 32;
  /// The same for requests of the journal, which wait for a change.
  static constexpr std::size_t kReaders = 64;

  /// Starts the thread. The same is served at `socket`, where POST needs no token. `questions`
  /// outlives it.
  /// Errors: kInternal when no thread can start.
  static Result<std::unique_ptr<HttpServer>> start(TcpListener listener,
                                                   std::optional<Listener> socket, Options options,
                                                   Mailbox<AdminQuestion>& questions);
  /// Ends the requests in flight and joins the thread.
  ~HttpServer();

  /// Sends an answer, whose place was reserved with its question. False when the mailbox is full.
  bool publish(HttpNews news);
  /// Sets the response of /health. Only the latest is kept, beside the mailbox, which holds at most
  /// two notes of it: health never takes the place of an answer, however often it changes.
  void publish_health(Health health);

 private:
  class Loop;
  HttpServer(TcpListener listener, std::optional<Listener> socket, Options options,
             Mailbox<AdminQuestion>& questions);
  void run();

  TcpListener listener_;
  std::optional<Listener> socket_;
  Options options_;
  Mailbox<AdminQuestion>& questions_;
  Mailbox<HttpNews> news_;
  std::mutex health_mutex_;
  Health latest_health_;  ///< Under health_mutex_.
  /// A note of new health is in the mailbox. Set by the sender behind the health itself, cleared by
  /// the HTTP thread before it reads that.
  std::atomic<bool> health_noted_{false};
  std::thread thread_;
};

/// The token in `path`, without the line's end.
/// Errors: kRefused when it cannot be read or has less than 16 characters.
Result<std::string> read_token(const std::string& path);

}  // namespace pegaflow::server
