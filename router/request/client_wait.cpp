#include "router/request/client_wait.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

struct ClientWait::Timer : asio::steady_timer {
  using asio::steady_timer::steady_timer;
};

ClientWait::ClientWait(ClientRequest& request)
    : request_(request), timer_(std::make_unique<Timer>(request.shared().io)) {}
ClientWait::~ClientWait() = default;

void ClientWait::wake() { timer_->cancel(); }

void ClientWait::interrupt() {
  if (call_ != nullptr) {
    ++request_.shared().metrics.cancelled_legs;
    call_->cancel();
  }
  timer_->cancel();
}

void ClientWait::cancel() {
  if (call_ != nullptr) call_->cancel();
  timer_->cancel();
}

asio::awaitable<bool> ClientWait::wait_until(TimePoint end) {
  boost::system::error_code ignored;
  timer_->expires_at(end);
  co_await timer_->async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  co_return !request_.client().is_gone();
}

asio::awaitable<bool> ClientWait::wait(Duration time) {
  return wait_until(std::chrono::steady_clock::now() + time);
}

asio::awaitable<bool> ClientWait::wait_for_wake() { return wait_until(TimePoint::max()); }

asio::awaitable<bool> ClientWait::wait_before_retry(std::int64_t attempt) {
  Shared& shared = request_.shared();
  std::uniform_real_distribution<double> jitter(0.5, 1.5);
  const std::chrono::duration<double> delay =
      std::chrono::duration<double>(shared.options.retry_delay) *
      (std::ldexp(1.0, static_cast<int>(std::min<std::int64_t>(attempt, 16))) *
       jitter(shared.random));
  return wait(std::chrono::duration_cast<Duration>(delay));
}

}  // namespace pegaflow::router
