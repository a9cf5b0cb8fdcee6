#include "transport/tcp/holder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>

#include "base/log.h"
#include "transport/tcp/socket.h"

namespace pegaflow::tcp {
namespace {

constexpr Log kLog{"tcp"};

/// The pause without descriptors, in which a watched listener would wake the thread again and
/// again.
constexpr Duration kPause = std::chrono::milliseconds(100);

/// Limits log lines and accepts per iteration: a client that connects again and again may neither
/// starve connected readers nor flood the log.
constexpr int kAcceptsPerIteration = 64;
constexpr Duration kLogPeriod = std::chrono::seconds(10);

}  // namespace

Result<Holder> Holder::open(const SocketAddress& address, const Options& options, Poller& poller,
                            const RegionTable& regions, const Id128& self, const Clock& clock) {
  PEGA_TRY_LET(UniqueFd listener, listen_at(address));
  Holder holder(std::move(listener), options, poller, regions, self, clock);
  holder.listener_key_ = poller.new_key();
  PEGA_TRY(poller.add(holder.listener_.get(), holder.listener_key_, EPOLLIN));
  return holder;
}

bool Holder::on_event(Poller::Key key, std::uint32_t events_now) {
  if (key == listener_key_) {
    accept_some();
    return true;
  }
  const auto found = connections_.find(key);
  if (found == connections_.end()) return false;
  Connection& connection = *found->second;
  // Everything but room to send is found by reading: bytes, an end, an error.
  Result<void> served = connection.responder.serve(events_now != EPOLLOUT);
  if (served) {
    const std::uint32_t events = (connection.responder.wants_to_read() ? EPOLLIN : 0U) |
                                 (connection.responder.wants_to_send() ? EPOLLOUT : 0U);
    if (events != connection.events) {
      connection.events = events;
      served = poller_->change(connection.responder.fd(), key, events);
    }
  }
  if (!served) {
    if (served.error().code == Errc::kPeerLost) {
      kLog.debug("a reader's connection ended reason={}", served.error().detail);
    } else {
      reject(to_string(served.error()));
    }
    poller_->remove(connection.responder.fd());
    connections_.erase(found);
  }
  return true;
}

void Holder::accept_some() {
  // The rest wakes the thread again.
  for (int i = 0; i < kAcceptsPerIteration; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      take(std::move(socket));
      continue;
    }
    // An error of one connection before it was accepted does not affect the others.
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
    if (errno != EAGAIN) {
      kLog.warn("cannot accept readers now reason=\"{}\"", std::strerror(errno));
      paused_ = static_cast<bool>(poller_->change(listener_.get(), listener_key_, 0));
      check_by(clock_->now() + kPause);
    }
    return;
  }
}

void Holder::take(UniqueFd socket) {
  if (connections_.size() >= options_.connections && !make_room()) {
    reject(fmt::format("{} readers are connected", connections_.size()));
    return;
  }
  const Poller::Key key = poller_->new_key();
  const int fd = socket.get();
  Result<void> ready = prepare(fd, options_.user_timeout);
  if (ready) ready = poller_->add(fd, key, EPOLLIN);
  if (!ready) {
    reject(to_string(ready.error()));
    return;
  }
  const TimePoint now = clock_->now();
  connections_.emplace(
      key, std::unique_ptr<Connection>(
               new Connection{.responder = Responder(std::move(socket), *regions_, self_, *clock_),
                              .accepted = now,
                              .events = EPOLLIN}));
  check_by(now + options_.greeting_timeout);
}

/// A silent stranger may not occupy a reader's place.
bool Holder::make_room() {
  auto oldest = connections_.end();
  for (auto at = connections_.begin(); at != connections_.end(); ++at) {
    if (at->second->responder.greeted()) continue;
    if (oldest == connections_.end() || at->second->accepted < oldest->second->accepted) {
      oldest = at;
    }
  }
  if (oldest == connections_.end()) return false;
  poller_->remove(oldest->second->responder.fd());
  connections_.erase(oldest);
  reject("connections without a greeting made room for others");
  return true;
}

void Holder::reject(const std::string& reason) {
  ++rejected_;
  const TimePoint now = clock_->now();
  if (now < next_log_) return;
  next_log_ = now + kLogPeriod;
  kLog.warn("readers were rejected count={} reason=\"{}\"", std::exchange(rejected_, 0), reason);
}

void Holder::on_time(TimePoint now) {
  if (now < next_check_) return;
  next_check_ = TimePoint::max();
  if (paused_) {
    paused_ = !poller_->change(listener_.get(), listener_key_, EPOLLIN);
    if (paused_) check_by(now + kPause);
  }
  std::erase_if(connections_, [&](const auto& entry) {
    const Connection& connection = *entry.second;
    if (connection.responder.greeted()) return false;
    const TimePoint last = connection.accepted + options_.greeting_timeout;
    if (last <= now) {
      poller_->remove(connection.responder.fd());
      return true;
    }
    check_by(last);
    return false;
  });
}

}  // namespace pegaflow::tcp
