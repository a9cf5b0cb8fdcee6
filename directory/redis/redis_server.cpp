#include "directory/redis/redis_server.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"

namespace pegaflow::directory {
namespace {

constexpr Log kLog{"directory"};

constexpr Duration kLogInterval = std::chrono::minutes(1);

void append_text(std::string& output, std::string_view text) {
  output += fmt::format("${}\r\n", text.size());
  output += text;
  output += "\r\n";
}

}  // namespace

std::string_view to_string(RedisServer::State state) noexcept {
  switch (state) {
    case RedisServer::State::kWaiting:
      return "down";
    case RedisServer::State::kConnecting:
      return "connecting";
    case RedisServer::State::kLogin:
      return "login";
    case RedisServer::State::kUp:
      return "up";
  }
  return "down";
}

RedisServer::RedisServer(Options options, const Clock& clock)
    : options_(std::move(options)),
      name_(options_.url.name()),
      clock_(clock),
      lookup_(options_.url.host, options_.url.port),
      deadline_(clock.now()),
      pause_(options_.first_pause) {}

RedisServer::~RedisServer() = default;

bool RedisServer::is_late() const noexcept {
  return !sent_.empty() && clock_.now() - sent_.front().at > options_.deadline;
}

bool RedisServer::wants_write() const noexcept {
  if (stream_ == nullptr) return false;
  return stream_->wants_write() || output_begin_ != output_.size();
}

void RedisServer::send(std::span<const std::string_view> arguments, Answer answer) {
  if (!is_up()) return answer(fail(Errc::kPeerLost, "{} is not connected", name_));
  if (sent_.size() >= options_.most_commands || output_.size() >= options_.most_bytes) {
    return answer(fail(Errc::kBusy, "{} has {} commands to answer", name_, sent_.size()));
  }
  append(arguments, std::move(answer));
}

void RedisServer::append(std::span<const std::string_view> arguments, Answer answer) {
  output_ += fmt::format("*{}\r\n", arguments.size());
  for (const std::string_view each : arguments) append_text(output_, each);
  sent_.push_back({.answer = std::move(answer), .at = clock_.now()});
  ++stats_.commands;
}

// ---- the connection

void RedisServer::dial(TimePoint now) {
  reader_ = ReplyReader();
  output_.clear();
  output_begin_ = 0;
  refused_.clear();
  stats_.state = State::kConnecting;
  deadline_ = now + options_.connect_deadline;
  if (auto begun = lookup_.begin(); !begun) lose(begun.error());
}

/// Begins to connect when the addresses of the host are known.
Result<void> RedisServer::resolve(TimePoint now) {
  auto found = lookup_.take();
  if (!found) {
    if (now < deadline_) return {};
    return fail(Errc::kTimeout, "look up {}: no answer within the deadline", options_.url.host);
  }
  PEGA_TRY_LET(const HostLookup::Addresses addresses, std::move(*found));
  Result<std::unique_ptr<RedisStream>> stream;
  for (std::size_t tried = 0; tried < addresses.size(); ++tried) {
    const HostAddress& address = addresses[next_address_ % addresses.size()];
    stream = RedisStream::connect(options_.url, address, options_.tls);
    if (stream) break;
    ++next_address_;
  }
  PEGA_TRY_LET(stream_, std::move(stream));
  return {};
}

Result<void> RedisServer::establish(TimePoint now) {
  PEGA_TRY_LET(const bool is_established, stream_->establish());
  if (is_established) {
    stats_.state = State::kLogin;
    log_in();
    return {};
  }
  if (now >= deadline_) return fail(Errc::kTimeout, "no connection within the deadline");
  return {};
}

void RedisServer::log_in() {
  const RedisUrl& url = options_.url;
  if (!url.password.empty()) {
    std::vector<std::string_view> auth{"AUTH"};
    if (!url.user.empty()) auth.push_back(url.user);
    auth.push_back(url.password);
    append(auth, [this](Result<Reply>&& reply) { login_answered("AUTH", reply, false); });
  }
  if (url.database != 0) {
    const std::string number = std::to_string(url.database);
    append(std::array<std::string_view, 2>{"SELECT", number},
           [this](Result<Reply>&& reply) { login_answered("SELECT", reply, false); });
  }
  // A server that takes no client answers once, to the first command.
  append(std::array<std::string_view, 1>{"PING"},
         [this](Result<Reply>&& reply) { login_answered("PING", reply, false); });
  stats_.info = {};
  ask_info("server");
}

/// For people; a user without the right to ask is no error.
void RedisServer::ask_info(std::string_view section) {
  append(std::array<std::string_view, 2>{"INFO", section}, [this](Result<Reply>&& reply) {
    if (!reply || !refused_.empty()) return;
    if (reply->is(Reply::Kind::kText)) stats_.info.read(reply->text);
    const std::string& mode = stats_.info.mode;
    if (mode == "cluster" || mode == "sentinel") {
      refused_ = fmt::format("it runs in {} mode; the directory needs plain servers", mode);
      return;
    }
    // Whether it is allowed or not, this was the last command of the login.
    if (stats_.state == State::kLogin) {
      login_answered("INFO", Reply{.kind = Reply::Kind::kStatus, .text = {}, .items = {}}, true);
    }
  });
}

void RedisServer::login_answered(const char* command, const Result<Reply>& reply, bool is_last) {
  if (!reply || !refused_.empty()) return;
  if (!reply->is(Reply::Kind::kStatus)) {
    refused_ = fmt::format("{} is answered with \"{}\"", command, reply->text.substr(0, 200));
    return;
  }
  if (!is_last) return;
  stats_.state = State::kUp;
  stats_.why.clear();
  ++stats_.connects;
  pause_ = options_.first_pause;
  next_info_ = clock_.now();
  if (!std::exchange(is_lost_logged_, false) && stats_.connects > 1) return;
  kLog.info("directory server connected server={}", name_);
}

void RedisServer::lose(const Error& why) {
  const bool was_up = is_up();
  ++(was_up ? stats_.losses : stats_.failures);
  if (why.code == Errc::kCorrupt) ++stats_.corrupt;
  stats_.why = why.detail;
  // A server that comes and goes has one line a minute.
  const TimePoint now = clock_.now();
  if (logged_ != why.detail || now >= next_log_) {
    logged_ = why.detail;
    next_log_ = now + kLogInterval;
    is_lost_logged_ = true;
    kLog.warn("directory server {}, dialing again server={} reason=\"{}\"",
              was_up ? "lost" : "not connected", name_, why.detail);
  }
  // Also a server that takes connections and then refuses may be better at another address.
  next_address_ += was_up ? 0 : 1;
  stream_ = nullptr;
  stats_.state = State::kWaiting;
  deadline_ = clock_.now() + pause_;
  pause_ = std::min(2 * pause_, options_.longest_pause);
  output_.clear();
  output_begin_ = 0;
  was_late_ = false;
  has_more_ = false;
  for (Sent& each : std::exchange(sent_, {})) {
    each.answer(fail(Errc::kPeerLost, "the connection to {} is lost", name_));
  }
}

// ---- bytes

Result<void> RedisServer::receive() {
  std::array<char, std::size_t{32} << 10> bytes;
  has_more_ = false;
  // Bounded, so that one server cannot hold the thread.
  for (unsigned round = 0; round < 16; ++round) {
    PEGA_TRY_LET(const std::size_t count, stream_->receive(bytes));
    if (count == 0) return {};
    reader_.feed(std::span(bytes).first(count));
    for (;;) {
      PEGA_TRY_LET(std::optional<Reply> reply, reader_.next());
      if (!reply) break;
      if (sent_.empty()) return fail(Errc::kCorrupt, "a reply without a command");
      Sent sent = std::move(sent_.front());
      sent_.pop_front();
      stats_.round_trip = clock_.now() - sent.at;
      sent.answer(std::move(*reply));
      if (!refused_.empty()) return fail(Errc::kRefused, "{}", refused_);
    }
    if (count < bytes.size() && !options_.url.is_tls) return {};
  }
  // TLS may hold bytes for which the descriptor does not become readable again.
  has_more_ = true;
  return {};
}

Result<void> RedisServer::flush() {
  while (output_begin_ != output_.size()) {
    PEGA_TRY_LET(const std::size_t count,
                 stream_->send(std::span<const char>(output_).subspan(output_begin_)));
    if (count == 0) break;
    output_begin_ += count;
  }
  if (output_begin_ == output_.size()) {
    output_.clear();
    output_begin_ = 0;
  } else if (output_begin_ > options_.most_bytes / 4) {
    output_.erase(0, output_begin_);
    output_begin_ = 0;
  }
  return {};
}

Result<void> RedisServer::check_overdue(TimePoint now) {
  if (stats_.state == State::kLogin && now >= deadline_) {
    return fail(Errc::kTimeout, "the login is not answered");
  }
  const bool late = is_late();
  if (late && !was_late_) ++stats_.late;
  was_late_ = late;
  if (late && now - sent_.front().at > options_.silence) {
    return fail(Errc::kTimeout, "no answer within half a second");
  }
  return {};
}

void RedisServer::step() {
  const TimePoint now = clock_.now();
  if (stats_.state == State::kWaiting) {
    if (now < deadline_) return;
    dial(now);
    if (stats_.state == State::kWaiting) return;
  }
  Result<void> done;
  if (stream_ == nullptr) done = resolve(now);
  if (done && stream_ != nullptr && stats_.state == State::kConnecting) done = establish(now);
  if (done && stats_.state >= State::kLogin) done = receive();
  if (is_up() && now >= next_info_) {
    next_info_ = now + options_.info;
    ask_info("memory");
  }
  if (done && stats_.state >= State::kLogin) done = flush();
  if (done && stats_.state >= State::kLogin) done = check_overdue(now);
  if (!done) lose(done.error());
}

TimePoint RedisServer::next_step() const {
  if (stats_.state != State::kUp) return deadline_;
  if (has_more_) return TimePoint::min();
  if (sent_.empty()) return TimePoint::max();
  const TimePoint since = sent_.front().at;
  return since + (was_late_ ? options_.silence : options_.deadline) + std::chrono::milliseconds(1);
}

}  // namespace pegaflow::directory
