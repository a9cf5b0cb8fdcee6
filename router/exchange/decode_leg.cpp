#include "router/exchange/decode_leg.h"

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "router/exchange/relay.h"
#include "router/kv/kv_routing.h"
#include "router/request/queue_share.h"
#include "router/watch/model_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr std::string_view kNoResponse = "no engine could be reached, or none responded";
constexpr std::string_view kRetryAfter = "Retry-After: 1\r\n";
constexpr std::string_view kQueueIsFull = "all engines are busy, and the queue is full";

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
                     AccessRecord& record, ResponseWriter& writer, std::vector<const Engine*> tried)
    : request_(request),
      shared_(request.shared()),
      needs_(needs),
      wait_(wait),
      record_(record),
      writer_(writer),
      attempts_(request, needs, wait, record),
      may_repeat_(may_repeat(request.route())),
      tried_(std::move(tried)) {}

std::string DecodeLeg::refusal_for(Fleet::Why why) {
  if (why == Fleet::Why::kNone && needs_.has_crashed_any()) {
    return request_.error(502, kNoResponse, kRetryAfter);
  }
  ++shared_.metrics.no_engine;
  return request_.error(503, "no engine is up", kRetryAfter);
}

void DecodeLeg::occupy(Admitted& result, const std::shared_ptr<Engine>& engine) {
  result.permit.emplace(shared_, engine);
  // The next choice has to count it.
  if (needs_.view.kv != nullptr) shared_.kv->sent(*needs_.view.kv, *engine, shared_.now());
}

std::string DecodeLeg::refuse_busy(unsigned status, std::string_view text, const Share& share,
                                   std::uint64_t& counter) {
  ++counter;
  return request_.error(
      status, text,
      retry_after(predicted_wait(shared_, needs_.fleet_request(tried_), share.key, share.tokens)));
}

asio::awaitable<DecodeLeg::Admitted> DecodeLeg::admit(std::size_t body_bytes) {
  Admitted result;
  if (needs_.pinned) {
    result.permit.emplace(shared_, needs_.pinned);
    co_return result;
  }
  // Afterwards no request in the line could use an engine that is found here.
  if (shared_.kv != nullptr) shared_.line.serve_all(shared_.fleet, shared_.now());
  const Fleet::Choice choice = shared_.fleet.choose(Role::kDecode, needs_.fleet_request(tried_));
  if (choice.why == Fleet::Why::kBusy) co_return co_await wait_in_line(body_bytes);
  if (choice.why == Fleet::Why::kFound) {
    occupy(result, choice.engine);
  } else {
    result.refusal = refusal_for(choice.why);
  }
  co_return result;
}

asio::awaitable<DecodeLeg::Admitted> DecodeLeg::wait_in_line(std::size_t body_bytes) {
  Admitted result;
  const TimePoint began = shared_.now();
  const Share share{queue_key(request_), queue_tokens(needs_.view, body_bytes)};
  std::optional<Fleet::Why> why;
  WaitingLine::Place place{.request = needs_.fleet_request(tried_),
                           .called =
                               [&](const Fleet::Choice& choice) {
                                 why = choice.why;
                                 if (choice.engine) occupy(result, choice.engine);
                                 wait_.wake();
                               },
                           .key = share.key,
                           .tokens = share.tokens};
  const bool is_for_time = !shared_.fleet.candidates(Role::kDecode, place.request).empty();
  if (!shared_.line.join(place, static_cast<std::size_t>(shared_.options.queue), began)) {
    result.refusal = refuse_busy(429, kQueueIsFull, share, shared_.metrics.queue_refused);
    co_return result;
  }
  ++(is_for_time ? shared_.metrics.queue_waits_for_time : shared_.metrics.queue_waits_for_room);
  ++shared_.metrics.queued;
  co_await wait_.wait(shared_.options.queue_timeout);
  --shared_.metrics.queued;
  shared_.line.leave(place);
  if (!why && !request_.client().is_gone() && !is_withdrawn_) {
    // An engine with room takes it, however much it has to compute.
    needs_.view.has_waited = true;
    const Fleet::Choice late = shared_.fleet.choose(Role::kDecode, needs_.fleet_request(tried_));
    if (late.engine) occupy(result, late.engine);
  }
  if (request_.client().is_gone() || is_withdrawn_) {
    result.permit.reset();  // The next request in the line receives it.
  } else if (result.permit) {
    shared_.metrics.queue_wait.record(shared_.now() - began);
  } else if (!why) {
    result.refusal =
        refuse_busy(503, "no engine had room in time", share, shared_.metrics.queue_timeouts);
  } else if (why == Fleet::Why::kBusy) {
    result.refusal = refuse_busy(429, kQueueIsFull, share, shared_.metrics.queue_refused);
  } else {
    result.refusal = refusal_for(*why);
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

void DecodeLeg::withdraw() {
  if (is_refusing_) return;
  is_withdrawn_ = true;
  wait_.cancel();
}

asio::awaitable<bool> DecodeLeg::run(std::string_view body) {
  for (std::int64_t number = 0;; ++number) {
    Admitted admitted = co_await admit(body.size());
    if (is_withdrawn_) co_return true;
    if (!admitted.permit) {
      if (admitted.refusal.empty()) co_return false;
      is_refusing_ = true;
      co_return co_await request_.send(std::move(admitted.refusal));
    }
    if (number > 0) record_.count_retry(shared_.metrics, Role::kDecode);
    const std::shared_ptr<Engine> engine = admitted.permit->engine();
    const bool is_last = number >= shared_.options.retries;
    sent_at_ = shared_.now();
    const DecodeResult got = co_await attempt(*admitted.permit, body, is_last);
    sent_at_.reset();
    if (got.how == Relayed::kGone) co_return false;
    if (is_withdrawn_ && got.how == Relayed::kNothingSent) co_return true;
    is_withdrawn_ = false;  // It was too late.
    // An adapter may have been unloaded.
    if (got.status == 404 && !needs_.model.empty()) {
      refresh_model_list(shared_, engine, kModelsPause);
    }
    if (needs_.is_suspect() && got.how == Relayed::kNothingSent) needs_.report_suspect();
    if (got.how == Relayed::kWhole || got.how == Relayed::kErrorFrame) co_return true;
    if (got.how == Relayed::kBroken) co_return false;
    if (needs_.is_suspect()) {
      is_refusing_ = true;
      co_return co_await needs_.refuse_suspect();
    }
    if (is_last || !may_try_again(got.error)) {
      is_refusing_ = true;
      const bool late = got.error.code == Errc::kTimeout;
      co_return co_await request_.send_error(
          late ? 504 : 502,
          late ? std::string_view("the engine did not respond in time") : kNoResponse, kRetryAfter);
    }
    tried_.push_back(engine.get());
    admitted.permit.reset();
    if (!co_await wait_.wait_before_retry(number)) co_return false;
    if (is_withdrawn_) co_return true;
  }
}

}  // namespace pegaflow::router
