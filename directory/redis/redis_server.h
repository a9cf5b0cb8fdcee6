#pragma once
/// \file
/// The connection to one Redis server: dials, logs in, sends pipelines, dials again.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "base/clock.h"
#include "directory/redis/commands.h"
#include "directory/redis/host_lookup.h"
#include "directory/redis/redis_stream.h"
#include "directory/redis/redis_url.h"
#include "directory/redis/server_info.h"

namespace pegaflow::directory {

/// Keeps one server connected for as long as it lives.
///
/// A server that does not answer a command within the deadline is *late* until it has; after
/// `silence` without an answer the connection is closed and dialed again, after a pause that
/// doubles while it fails. Each attempt takes the next address of the host until one answers, and
/// neither it nor anything else waits for a name server. A server of a Redis Cluster, and a
/// Sentinel, is not used. Its queues are bounded: beyond them a
/// command is answered with kBusy at once. Thread-bound; the owner calls step() when fd() is ready
/// and at next_step().
class RedisServer final : public Commands {
 public:
  struct Options {
    RedisUrl url;
    std::shared_ptr<TlsContext> tls{};  ///< For an address with TLS.
    Duration deadline = std::chrono::milliseconds(5);
    Duration silence = std::chrono::milliseconds(500);
    Duration connect_deadline = std::chrono::seconds(1);
    Duration first_pause = std::chrono::milliseconds(100);
    Duration longest_pause = std::chrono::seconds(5);
    Duration info = std::chrono::minutes(1);  ///< Between two questions for its settings.
    std::size_t most_commands = 8192;
    std::size_t most_bytes = std::size_t{4} << 20;
  };
  enum class State : std::uint8_t { kWaiting, kConnecting, kLogin, kUp };
  struct Stats {
    State state = State::kWaiting;
    std::string why;  ///< Why it is not up.
    std::uint64_t connects = 0;
    std::uint64_t losses = 0;    ///< Connections that were up.
    std::uint64_t failures = 0;  ///< Attempts that did not reach kUp.
    std::uint64_t commands = 0;
    std::uint64_t late = 0;     ///< Times that a command missed the deadline.
    std::uint64_t corrupt = 0;  ///< Connections that ended because of bytes that are no reply.
    Duration round_trip{};      ///< The time of the last command.
    ServerInfo info{};          ///< As last told; empty where INFO is not allowed.
  };

  /// `clock` outlives it.
  RedisServer(Options options, const Clock& clock);
  ~RedisServer() override;
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] bool is_up() const noexcept override { return stats_.state == State::kUp; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return stats_.connects; }
  [[nodiscard]] bool is_late() const noexcept override;
  [[nodiscard]] std::size_t open() const noexcept override { return sent_.size(); }
  void send(std::span<const std::string_view> arguments, Answer answer) override;

  /// -1 while there is no attempt and no connection.
  [[nodiscard]] int fd() const noexcept {
    if (stream_ != nullptr) return stream_->fd();
    return stats_.state == State::kConnecting ? lookup_.fd() : -1;
  }
  [[nodiscard]] bool wants_write() const noexcept;
  /// Dials, reads, writes and notices what is overdue.
  void step();
  /// When step() has something to do, if fd() is not ready before.
  [[nodiscard]] TimePoint next_step() const;
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }

 private:
  struct Sent {
    Answer answer;
    TimePoint at;
  };
  void dial(TimePoint now);
  Result<void> resolve(TimePoint now);
  Result<void> establish(TimePoint now);
  void log_in();
  void ask_info(std::string_view section);
  void login_answered(const char* command, const Result<Reply>& reply, bool is_last);
  Result<void> receive();
  Result<void> flush();
  Result<void> check_overdue(TimePoint now);
  void append(std::span<const std::string_view> arguments, Answer answer);
  void lose(const Error& why);

  const Options options_;
  const std::string name_;
  const Clock& clock_;
  HostLookup lookup_;
  std::size_t next_address_ = 0;  ///< Among those of the host; grows with each failure.
  std::unique_ptr<RedisStream> stream_;
  ReplyReader reader_;
  std::string output_;
  std::size_t output_begin_ = 0;
  std::deque<Sent> sent_;
  TimePoint deadline_{};  ///< The end of the attempt, or the time of the next one.
  Duration pause_;
  TimePoint next_info_{};
  bool was_late_ = false;
  bool has_more_ = false;
  std::string logged_;  ///< The last reason that was logged.
  TimePoint next_log_{};
  bool is_lost_logged_ = false;
  std::string refused_;  ///< Why the login failed.
  Stats stats_;
};

std::string_view to_string(RedisServer::State state) noexcept;

}  // namespace pegaflow::directory
