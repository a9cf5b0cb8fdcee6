#include "router/exchange/prefill_leg.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "base/log.h"
#include "router/body/first_token.h"
#include "router/body/full_report.h"
#include "router/exchange/decode_attempt.h"
#include "router/kv/kv_routing.h"
#include "router/state/kv_leg.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr Log kLog{"router"};

/// Enough for the token ids of the longest prompt whose token is requested.
constexpr std::size_t kPrefillResponseBytes = 8 * kFirstTokenBodyBytes;

/// Adds bytes to a sum for its lifetime.
class CountedBytes {
 public:
  CountedBytes(std::uint64_t& sum, std::uint64_t bytes) : sum_(sum), bytes_(bytes) {
    sum_ += bytes_;
  }
  ~CountedBytes() { sum_ -= bytes_; }
  CountedBytes(const CountedBytes&) = delete;
  CountedBytes& operator=(const CountedBytes&) = delete;

 private:
  std::uint64_t& sum_;
  std::uint64_t bytes_;
};

Prefill reason_of(Fleet::Why why) {
  switch (why) {
    case Fleet::Why::kBusy:
      return Prefill::kBusy;
    case Fleet::Why::kSuspended:
      return Prefill::kSuspended;
    case Fleet::Why::kNone:
      return Prefill::kNoEngine;
    case Fleet::Why::kFound:
    case Fleet::Why::kDown:
      break;
  }
  return Prefill::kDown;
}

}  // namespace

PrefillLeg::PrefillLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait,
                       AccessRecord& record)
    : request_(request), shared_(request.shared()), needs_(needs), wait_(wait), record_(record) {}

asio::awaitable<Prefilled> PrefillLeg::run(const std::vector<JsonMember>& members,
                                           bool wants_token) {
  Prefilled prefilled{.what = Prefill::kNoEngine};
  const bool is_anthropic = request_.route().is_anthropic;
  if (shared_.fleet.has(Role::kPrefill)) {
    prefilled.what =
        decide(members, is_anthropic, static_cast<std::size_t>(shared_.options.min_prefill_tokens));
  }
  if (prefilled.what == Prefill::kDone && is_cached()) prefilled.what = Prefill::kCached;
  if (prefilled.what == Prefill::kDone) {
    const TimePoint began = shared_.now();
    std::string body = prefill_body(members, is_anthropic, shared_.flow, wants_token);
    if (needs_.view.kv != nullptr && needs_.view.kv->wants_full_report) {
      body = with_full_report(body);
    }
    const CountedBytes counted(shared_.metrics.body_bytes, body.size());
    prefilled = co_await try_engines(body);
    record_.prefill_time = shared_.now() - began;
  }
  record_.prefill = prefilled.what;
  if (!request_.client().is_gone()) {
    ++shared_.metrics.prefill[static_cast<std::size_t>(prefilled.what)];
  }
  if (!wants_token) std::string().swap(prefilled.response);
  co_return prefilled;
}

bool PrefillLeg::is_cached() const {
  KvRequest* const kv = needs_.view.kv;
  if (kv == nullptr || shared_.flow != Flow::kStore) return false;
  const std::vector<Candidate> engines =
      shared_.fleet.candidates(Role::kDecode, needs_.fleet_request({}));
  const auto uncached = shared_.kv->least_uncached(engines, *kv, shared_.now());
  return uncached && *uncached < static_cast<std::uint64_t>(shared_.options.min_prefill_tokens);
}

asio::awaitable<Prefilled> PrefillLeg::try_engines(const std::string& body) {
  Prefilled prefilled;
  const std::size_t attempts = shared_.options.retries > 0 ? 2 : 1;
  for (std::size_t attempt = 0; attempt < attempts; ++attempt) {
    const Fleet::Choice choice = shared_.fleet.choose(Role::kPrefill, needs_.fleet_request(tried_));
    if (choice.why != Fleet::Why::kFound) {
      if (attempt == 0) prefilled.what = reason_of(choice.why);
      break;
    }
    // No second attempt at the same engine: the decode engine can prefill, too.
    if (!tried_.empty() && choice.engine.get() == tried_.front()) break;
    if (attempt > 0) record_.count_retry(shared_.metrics, Role::kPrefill);
    tried_.push_back(choice.engine.get());
    EnginePermit permit(shared_, choice.engine);
    record_.prefill_engine = choice.engine->url.text;
    prefilled = co_await send(permit, body);
    const bool is_over = request_.client().is_gone() || needs_.is_suspect();
    if (is_over || !prefilled.is_worth_another) break;
  }
  co_return prefilled;
}

Duration PrefillLeg::time_limit(std::size_t body_bytes) const {
  const RouterOptions& options = shared_.options;
  const Duration limit = options.prefill_timeout;
  if (options.min_prefill_rate == 0) return limit;
  const std::chrono::duration<double> earned(static_cast<double>(body_bytes) / 4 /
                                             static_cast<double>(options.min_prefill_rate));
  return std::min(limit + std::chrono::duration_cast<Duration>(earned),
                  std::max(limit, options.answer_timeout));
}

asio::awaitable<Result<void>> PrefillLeg::read(UpstreamCall& call, const std::string& body,
                                               Duration limit, std::string& response) {
  const TimePoint end = shared_.now() + limit;
  std::string head = request_.engine_head(*call.engine(), body.size(), true, needs_.view.kv);
  Result<void> done = co_await call.open(std::move(head), body, limit, Resend::kUnlessSent);
  while (done) {
    const Duration left = std::max<Duration>(end - shared_.now(), std::chrono::milliseconds(1));
    done = co_await call.more(response, left);
    if (call.is_complete()) break;
    if (response.size() > kPrefillResponseBytes) {
      done = fail(Errc::kCorrupt, "the response is too long");
    }
  }
  co_return done;
}

asio::awaitable<Prefilled> PrefillLeg::send(EnginePermit& permit, const std::string& body) {
  Engine& engine = *permit.engine();
  const TimePoint began = shared_.now();
  engine.handover.started(began);
  const KvLeg kv(shared_, needs_.view.kv, engine);
  UpstreamCall call(shared_.engine_connections, permit.engine());
  std::string response;
  Result<void> done;
  {
    const ClientWait::CallScope scope(wait_, call);
    done = co_await read(call, body, time_limit(body.size()), response);
  }
  if (request_.client().is_gone()) co_return Prefilled{};
  shared_.metrics.leg[static_cast<std::size_t>(Role::kPrefill)].record(shared_.now() - began);
  if (!done) co_return failed(permit, call, done.error());
  const unsigned status = call.head().status;
  if (is_engine_failure(status)) {
    permit.failed();
  } else {
    permit.succeeded();
  }
  if (status != 200) {
    // After a 4xx every engine would reject the body.
    co_return Prefilled{.what = Prefill::kStatus, .is_worth_another = status >= 500};
  }
  co_return handed_over(engine, std::move(response));
}

Prefilled PrefillLeg::failed(EnginePermit& permit, const UpstreamCall& call, const Error& error) {
  permit.failed();
  needs_.note_end(call, error);
  if (error.code == Errc::kGone) return {.what = Prefill::kDown};
  // A second attempt would take as long again.
  if (error.code == Errc::kTimeout) return {.what = Prefill::kTimeout};
  const bool is_refused = error.code == Errc::kRefused;
  return {.what = is_refused ? Prefill::kRefused : Prefill::kLost, .is_worth_another = true};
}

Prefilled PrefillLeg::handed_over(Engine& engine, std::string response) {
  std::string kv_params = kv_params_of(response);
  const Prefill what = kv_params.empty() ? Prefill::kNoParams : Prefill::kDone;
  if (what == Prefill::kNoParams && engine.handover.missed(shared_.now())) {
    kLog.warn(
        "a prefill engine is suspended: {} responses in a row announce no blocks, so each prompt "
        "is computed twice; check that its connector is on and serves its model engine={}",
        HandoverWatch::kMisses, engine.url.text);
  } else if (what == Prefill::kDone && engine.handover.worked()) {
    kLog.info("a prefill engine announces blocks again engine={}", engine.url.text);
  }
  return {.what = what, .kv_params = std::move(kv_params), .response = std::move(response)};
}

}  // namespace pegaflow::router
