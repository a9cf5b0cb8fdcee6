#include "router/exchange/early_legs.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/exchange/decode_leg.h"
#include "router/http/log.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// The shortest time until the next look at a late engine.
constexpr Duration kShortest = std::chrono::milliseconds(100);
}  // namespace

EarlyLegs::EarlyLegs(ClientRequest& request, EngineNeeds& needs, ClientWait& wait,
                     ClientWait& prefill_wait, AccessRecord& record, ResponseWriter& writer,
                     PrefillLeg& prefill)
    : request_(request),
      shared_(request.shared()),
      needs_(needs),
      prefill_wait_(prefill_wait),
      record_(record),
      writer_(writer),
      prefill_(prefill),
      decode_(std::make_unique<DecodeLeg>(request, needs, wait, record, writer)),
      late_(shared_.deadlines, [this] { decode_is_late(); }),
      ended_(shared_.io, asio::steady_timer::time_point::max()) {}

EarlyLegs::~EarlyLegs() = default;

asio::awaitable<EarlyOutcome> EarlyLegs::run(std::string_view body) {
  record_.handover = Handover::kEarly;
  prefill_.go_early();
  start_prefill();
  EarlyOutcome outcome;
  std::exception_ptr failure;
  try {
    outcome.keeps = co_await decode_->run(body);
  } catch (...) {  // Rethrown below, when nothing uses this object any longer.
    failure = std::current_exception();
  }
  outcome.is_answered = !decode_->is_withdrawn();
  // A client that leaves while the prefill is canceled has its response.
  record_.is_delivered = outcome.is_answered && !request_.client().is_gone();
  late_.clear();
  if (!has_ended_) prefill_wait_.cancel();
  co_await join();
  if (failure || failure_) std::rethrow_exception(failure ? failure : failure_);
  if (outcome.is_answered) {
    prefill_.record(prefilled_);
    co_return outcome;
  }
  outcome.tried = decode_->tried();
  record_.handover = is_late_ ? Handover::kLate : Handover::kWithdrawn;
  outcome.prefilled = co_await prefill_.rest(std::move(prefilled_));
  if (!is_late_ && outcome.prefilled.what == Prefill::kDone) record_.prefilled_at = shared_.now();
  co_return outcome;
}

void EarlyLegs::start_prefill() {
  asio::co_spawn(shared_.io, prefill_.first(),
                 [this](const std::exception_ptr& failure, Prefilled prefilled) {
                   failure_ = failure;
                   prefilled_ = std::move(prefilled);
                   has_ended_ = true;
                   prefill_ended();
                   ended_.cancel();
                 });
}

void EarlyLegs::prefill_ended() {
  const TimePoint now = shared_.now();
  if (prefilled_.what == Prefill::kDone) record_.prefilled_at = now;
  if (writer_.has_begun() || request_.client().is_gone()) return;
  if (prefilled_.what == Prefill::kDone) {
    // A machine that took long for the prefill takes longer for the rest, too.
    patience_ = std::max<Duration>(kLate, record_.prefill_time.value_or(kLate));
    // Beyond its timeout the request has failed.
    const Duration left = shared_.options.answer_timeout - (now - decode_->sent_at().value_or(now));
    patience_ = std::clamp<Duration>(left / 2, kShortest, patience_);
    late_.set(patience_);
  } else {
    decode_->withdraw();
  }
}

void EarlyLegs::decode_is_late() {
  if (writer_.has_begun()) return;
  // The time in which the request waited in the router is not the engine's.
  const TimePoint now = shared_.now();
  const Duration had = now - decode_->sent_at().value_or(now);
  if (had < patience_) return late_.set(patience_ - had);
  if (!has_place()) return late_.set(patience_);
  g_log.warn(
      "a decode engine did not respond within {:.1f} s after the prefill: the request is sent "
      "again, "
      "and the prefill engine's next ones are sent one leg after the other id={} p={} d={}",
      std::chrono::duration<double>(patience_).count(), request_.id(), record_.prefill_engine,
      record_.decode_engine);
  is_late_ = true;
  prefill_.was_late();
  decode_->withdraw();
}

bool EarlyLegs::has_place() const {
  if (needs_.pinned) return true;
  return shared_.metrics.queued == 0 &&
         !shared_.fleet.candidates(Role::kDecode, needs_.fleet_request({})).empty();
}

asio::awaitable<void> EarlyLegs::join() {
  while (!has_ended_) {
    boost::system::error_code ignored;
    co_await ended_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

}  // namespace pegaflow::router
