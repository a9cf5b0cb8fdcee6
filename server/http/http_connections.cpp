#include "server/http/http_connections.h"

#include <utility>

namespace pegaflow::server {
namespace {

/// A connection without a request for this long is idle.
constexpr kj::Duration kIdle = 1 * kj::SECONDS;

}  // namespace

kj::Own<HttpConnection> HttpConnections::add(kj::Own<kj::AsyncIoStream> stream, bool is_socket) {
  if (open_.size() >= options_.places) {
    ++counters_.displaced;
    displaced()->close();
  }
  return kj::heap<HttpConnection>(*this, kj::mv(stream), is_socket);
}

HttpConnection* HttpConnections::displaced() const {
  for (HttpConnection* const each : open_) {
    if (each->writing_ != 0) return each;
  }
  const kj::TimePoint now = timer_.now();
  for (HttpConnection* const each : open_) {
    if (!each->is_pending_ && now - each->idle_since_ >= kIdle) return each;
  }
  for (HttpConnection* const each : open_) {
    if (each->was_answered_) return each;
  }
  return open_.front();
}

HttpConnection::HttpConnection(HttpConnections& all, kj::Own<kj::AsyncIoStream> stream,
                               bool is_socket)
    : all_(all),
      stream_(kj::mv(stream)),
      end_(kj::newPromiseAndFulfiller<void>()),
      place_(all.open_.insert(all.open_.end(), this)),
      idle_since_(all.timer_.now()),
      is_socket_(is_socket) {
  all_.counters_.open = all_.open_.size();
}

HttpConnection::~HttpConnection() noexcept(false) {
  if (!is_closing_) all_.open_.erase(place_);
  all_.counters_.open = all_.open_.size();
}

void HttpConnection::begin_request() {
  is_pending_ = true;
  due_ = all_.timer_.now() + all_.options_.take_timeout.count() * kj::NANOSECONDS;
}

void HttpConnection::end_request() noexcept {
  is_pending_ = false;
  was_answered_ = true;
  idle_since_ = all_.timer_.now();
}

kj::Promise<void> HttpConnection::in_time(kj::Promise<void> writing) {
  ++writing_;
  // The response to an invalid request has its time from now on.
  if (!is_pending_) due_ = all_.timer_.now() + all_.options_.take_timeout.count() * kj::NANOSECONDS;
  auto late = all_.timer_.atTime(due_).then([this]() -> kj::Promise<void> {
    ++all_.counters_.unread;
    close();
    return kj::NEVER_DONE;
  });
  return writing.exclusiveJoin(kj::mv(late)).attach(kj::defer([this]() { --writing_; }));
}

void HttpConnection::close() {
  if (std::exchange(is_closing_, true)) return;
  all_.open_.erase(place_);
  all_.counters_.open = all_.open_.size();
  end_.fulfiller->fulfill();
}

}  // namespace pegaflow::server
