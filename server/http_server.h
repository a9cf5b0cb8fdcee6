#pragma once
/// \file
/// /health, /metrics, /instances and POST /cache/memory/cleanup, on a thread of its own.

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/mailbox.h"
#include "server/listener.h"
#include "server/snapshot.h"

namespace pegaflow {

/// Serves HTTP with kj-http on one thread, so that a scrape never delays a lookup.
///
/// It knows nothing itself: it puts a question into the RPC thread's mailbox and answers with what
/// comes back. POST from beyond loopback needs the token.
///
/// Constructor and destructor belong to one thread; publish() is thread-safe.
class HttpServer {
 public:
  struct Options {
    std::string token;  ///< Of POST beyond loopback; empty: refused.
    bool test_hooks = false;
    Health health;  ///< Until the first publish(): requests may come before it.
    Duration answer_timeout = std::chrono::seconds(5);  ///< Then 503: the RPC thread hangs.
  };

  /// Questions under way at once; more is 503. The place for each answer is reserved so.
  static constexpr std::size_t kQuestions = 32;

  /// Starts the thread. `questions` outlives it.
  /// Errors: kInternal when no thread can start.
  static Result<std::unique_ptr<HttpServer>> start(TcpListener listener, Options options,
                                                   Mailbox<AdminQuestion>& questions);
  /// Ends requests under way and joins the thread.
  ~HttpServer();

  /// An answer, or new health. False when the mailbox is full, which takes more progress reports
  /// than anybody sends.
  bool publish(HttpNews news);

 private:
  class Loop;
  HttpServer(TcpListener listener, Options options, Mailbox<AdminQuestion>& questions);
  void run();

  TcpListener listener_;
  Options options_;
  Mailbox<AdminQuestion>& questions_;
  Mailbox<HttpNews> news_;
  std::thread thread_;
};

/// The token in `path`, without the line's end.
/// Errors: kRefused when it cannot be read or has less than 16 characters.
Result<std::string> read_token(const std::string& path);

}  // namespace pegaflow
