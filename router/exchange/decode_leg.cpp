#include "router/exchange/decode_leg.h"

#include <cstddef>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "router/exchange/relay.h"
#include "router/watch/model_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr std::string_view kNoResponse = "no engine could be reached, or none responded";
constexpr std::string_view kRetryAfter = "Retry-After: 1\r\n";

bool is_worth_another_engine(unsigned status) {
  return status == 500 || status == 502 || status == 503 || status == 504;
}

/// A response that an engine stores must not be created twice; other requests may be repeated.
bool may_repeat(const Route& route) {
  return route.kind == RouteKind::kSplit ||
         (route.kind == RouteKind::kOne && route.name != "passed");
}

}  // namespace

DecodeLeg::DecodeLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait,
                     AccessRecord& record, ResponseWriter& writer)
    : request_(request),
      shared_(request.shared()),
      needs_(needs),
      wait_(wait),
      record_(record),
      writer_(writer),
      attempts_(request, needs, wait, record),
      may_repeat_(may_repeat(request.route())) {}

std::string DecodeLeg::refusal_for(Fleet::Why why) {
  if (why == Fleet::Why::kNone && needs_.has_crashed_any()) {
    return request_.error(502, kNoResponse, kRetryAfter);
  }
  ++shared_.metrics.no_engine;
  return request_.error(503, "no engine is up", kRetryAfter);
}

asio::awaitable<DecodeLeg::Admitted> DecodeLeg::admit() {
  Admitted result;
  if (needs_.pinned) {
    result.permit.emplace(shared_, needs_.pinned);
    co_return result;
  }
  // No request in the line could use an engine that is found here: it would have taken it.
  const Fleet::Choice choice = shared_.fleet.choose(Role::kDecode, needs_.fleet_request(tried_));
  if (choice.why == Fleet::Why::kBusy) co_return co_await wait_in_line();
  if (choice.why == Fleet::Why::kFound) {
    result.permit.emplace(shared_, choice.engine);
  } else {
    result.refusal = refusal_for(choice.why);
  }
  co_return result;
}

asio::awaitable<DecodeLeg::Admitted> DecodeLeg::wait_in_line() {
  Admitted result;
  const TimePoint began = shared_.now();
  if (shared_.line.size() >= static_cast<std::size_t>(shared_.options.queue)) {
    ++shared_.metrics.queue_refused;
    result.refusal =
        request_.error(429, "all engines are busy, and the queue is full", kRetryAfter);
    co_return result;
  }
  Fleet::Why why = Fleet::Why::kBusy;
  WaitingLine::Place place{needs_.fleet_request(tried_), [&](const Fleet::Choice& choice) {
                             why = choice.why;
                             if (choice.engine) result.permit.emplace(shared_, choice.engine);
                             wait_.wake();
                           }};
  shared_.line.join(place);
  ++shared_.metrics.queued;
  co_await wait_.wait(shared_.options.queue_timeout);
  --shared_.metrics.queued;
  shared_.line.leave(place);
  if (request_.client().is_gone()) {
    result.permit.reset();  // The next request in the line receives it.
  } else if (result.permit) {
    shared_.metrics.queue_wait.record(shared_.now() - began);
  } else if (why == Fleet::Why::kBusy) {
    ++shared_.metrics.queue_timeouts;
    result.refusal = request_.error(503, "no engine had room in time", kRetryAfter);
  } else {
    result.refusal = refusal_for(why);
  }
  co_return result;
}

asio::awaitable<DecodeResult> DecodeLeg::attempt(EnginePermit& permit, std::string_view body,
                                                 bool is_last) {
  const DecodeAttempts::OnHead on_head = [this, is_last](UpstreamCall& call,
                                                         Error& error) -> asio::awaitable<Relayed> {
    const unsigned status = call.head().status;
    if (is_worth_another_engine(status) && may_repeat_ && !is_last) {
      error = {Errc::kBusy, fmt::format("{} returned {}", call.engine()->url.text, status)};
      co_return Relayed::kNothingSent;
    }
    co_return co_await relay_response(writer_, call, error);
  };
  co_return co_await attempts_.send(permit, body,
                                    may_repeat_ ? Resend::kUnlessSent : Resend::kNever, on_head);
}

bool DecodeLeg::may_try_again(const Error& error) const {
  return (may_repeat_ && error.code != Errc::kTimeout) ||
         (error.code == Errc::kRefused && !needs_.pinned);
}

asio::awaitable<bool> DecodeLeg::run(std::string_view body) {
  for (std::int64_t number = 0;; ++number) {
    Admitted admitted = co_await admit();
    if (!admitted.permit) {
      if (admitted.refusal.empty()) co_return false;
      co_return co_await request_.send(std::move(admitted.refusal));
    }
    if (number > 0) record_.count_retry(shared_.metrics, Role::kDecode);
    const std::shared_ptr<Engine> engine = admitted.permit->engine();
    const bool is_last = number >= shared_.options.retries;
    const DecodeResult got = co_await attempt(*admitted.permit, body, is_last);
    if (got.how == Relayed::kGone) co_return false;
    // An adapter may have been unloaded.
    if (got.status == 404 && !needs_.model.empty()) {
      refresh_model_list(shared_, engine, kModelsPause);
    }
    if (needs_.is_suspect()) needs_.report_suspect();
    if (got.how == Relayed::kWhole || got.how == Relayed::kErrorFrame) co_return true;
    if (got.how == Relayed::kBroken) co_return false;
    if (needs_.is_suspect()) co_return co_await needs_.refuse_suspect();
    if (is_last || !may_try_again(got.error)) {
      const bool late = got.error.code == Errc::kTimeout;
      co_return co_await request_.send_error(
          late ? 504 : 502,
          late ? std::string_view("the engine did not respond in time") : kNoResponse, kRetryAfter);
    }
    tried_.push_back(engine.get());
    admitted.permit.reset();
    if (!co_await wait_.wait_before_retry(number)) co_return false;
  }
}

}  // namespace pegaflow::router
