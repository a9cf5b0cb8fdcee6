#pragma once
/// \file
/// The directory of a large cluster, on Redis or Valkey: tells a node which nodes to ask for
/// blocks.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/event_fd.h"
#include "base/os/mailbox.h"
#include "directory/messages.h"
#include "directory/redis/redis_server.h"
#include "directory/stats.h"

namespace pegaflow::directory {

class Agent;
struct AgentOptions;

/// The messages to the directory's thread.
using Command = std::variant<std::monostate, Question, Announcement, KnownEpochs, Keys>;

/// The state of the directory, twice a second.
struct Report {
  Stats stats;
  bool is_usable = false;
  bool knows_epochs = false;
};
/// The messages from it.
using News = std::variant<std::monostate, Found, KnownEpochs, Report>;

/// Owns one thread, `pega-directory`, and the connections to all servers.
///
/// Whatever the servers do, no caller waits: commands and news cross through bounded mailboxes. The
/// answer to a question may be missing, if the thread is behind; its asker has a deadline of its
/// own. All functions belong to the owner's thread.
class Directory {
 public:
  struct Options {
    std::vector<RedisServer::Options> servers;  ///< 1 to kMostServers.
    Keys keys;
    std::shared_ptr<const AgentOptions> agent;  ///< See agent.h.
  };
  /// Errors: kInternal when the system refuses the thread.
  static Result<std::unique_ptr<Directory>> start(Options options);
  /// Joins the thread. The lease of this node runs out at the servers.
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  /// False when too many commands wait; `command` is then untouched.
  [[nodiscard]] bool try_send(Command&& command) { return inbox_.try_send(std::move(command)); }
  /// For the owner's event loop.
  [[nodiscard]] Mailbox<News>& news() noexcept { return news_; }

 private:
  explicit Directory(Options options);
  void run();
  void wait(TimePoint until);
  void take(Command&& command);
  void report();

  static constexpr std::size_t kCommands = 4096;

  SteadyClock clock_;
  std::vector<std::unique_ptr<RedisServer>> servers_;
  Mailbox<Command> inbox_{kCommands};
  Mailbox<News> news_{kCommands};
  EventFd stop_event_;
  std::atomic<bool> is_stopping_{false};
  std::unique_ptr<Agent> agent_;  ///< The thread's, with `servers_`.
  TimePoint next_report_{};
  bool was_usable_ = false;
  std::thread thread_;
};

}  // namespace pegaflow::directory
