#include "router/exchange/prefill_leg.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "router/body/early_params.h"
#include "router/body/first_token.h"
#include "router/body/full_report.h"
#include "router/exchange/decode_attempt.h"
#include "router/http/log.h"
#include "router/kv/kv_routing.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// Enough for the token ids of the longest prompt whose token is requested.
constexpr std::size_t kPrefillResponseBytes = 8 * kFirstTokenBodyBytes;

/// Ends an optional object with its own scope.
template <typename T>
class Ending {
 public:
  explicit Ending(std::optional<T>& what) : what_(what) {}
  ~Ending() { what_.reset(); }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

 private:
  std::optional<T>& what_;
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

Prefill PrefillLeg::decide_for(const std::vector<JsonMember>& members) const {
  if (!shared_.fleet.has(Role::kPrefill)) return Prefill::kNoEngine;
  const Prefill what = decide(members, request_.route().is_anthropic,
                              static_cast<std::size_t>(shared_.options.min_prefill_tokens));
  if (what != Prefill::kDone) return what;
  if (is_cached()) return Prefill::kCached;
  return costs_more_than_decode() ? Prefill::kCost : Prefill::kDone;
}

void PrefillLeg::begin(const std::vector<JsonMember>& members, bool wants_token) {
  wants_token_ = wants_token;
  decided_ = decide_for(members);
  if (decided_ != Prefill::kDone) return;
  began_ = shared_.now();
  body_ = prefill_body(members, request_.route().is_anthropic, shared_.flow, wants_token);
  if (needs_.view.kv != nullptr && needs_.view.kv->wants_full_report) {
    body_ = with_full_report(body_);
  }
  counted_.emplace(shared_.metrics.body_bytes, body_.size());
  choose();
}

bool PrefillLeg::choose() {
  permit_.reset();
  const Fleet::Choice choice = shared_.fleet.choose(Role::kPrefill, needs_.fleet_request(tried_));
  if (choice.why != Fleet::Why::kFound) {
    if (tried_.empty()) decided_ = reason_of(choice.why);
    return false;
  }
  // No second attempt at the same engine: the decode engine can prefill, too.
  if (!tried_.empty() && choice.engine.get() == tried_.front()) return false;
  tried_.push_back(choice.engine.get());
  engine_ = choice.engine;
  permit_.emplace(shared_, choice.engine);
  record_.prefill_engine = choice.engine->url.text;
  return true;
}

asio::awaitable<Prefilled> PrefillLeg::run() {
  Prefilled prefilled = co_await first();
  co_return co_await rest(std::move(prefilled));
}

const PrefillPlace* PrefillLeg::place() const {
  return engine_ ? engine_->early.place(shared_.now()) : nullptr;
}

void PrefillLeg::go_early() {
  is_early_ = true;
  const Engine& engine = *engine_;
  KvRequest* const kv = needs_.view.kv;
  kv_.emplace(shared_, kv, engine);
  head_ = request_.engine_head(engine, body_.size(), true, kv);
  kv_->detach();
  if (kv == nullptr) return;
  // The decode engine is chosen as it would be after the prefill.
  kv->is_prefilled = true;
  kv->prefilled_by = engine.id;
}

void PrefillLeg::was_late() { engine_->early.was_late(shared_.now()); }

asio::awaitable<Prefilled> PrefillLeg::first() {
  if (!permit_) co_return Prefilled{.what = decided_};
  Prefilled prefilled = co_await send();
  ended(prefilled);
  co_return prefilled;
}

void PrefillLeg::ended(const Prefilled& prefilled) {
  record_.prefill_time = shared_.now() - began_;
  permit_.reset();
  if (prefilled.is_worth_another) return;
  counted_.reset();
  std::string().swap(body_);
}

asio::awaitable<Prefilled> PrefillLeg::rest(Prefilled prefilled) {
  const bool may_repeat = engine_ && prefilled.is_worth_another && shared_.options.retries > 0;
  is_early_ = false;
  if (KvRequest* const kv = needs_.view.kv; kv != nullptr && prefilled.what != Prefill::kDone) {
    kv->is_prefilled = false;
    kv->prefilled_by = 0;
  }
  if (may_repeat && !request_.client().is_gone() && !needs_.is_suspect() && choose()) {
    record_.count_retry(shared_.metrics, Role::kPrefill);
    prefilled = co_await send();
    ended(prefilled);
  }
  record(prefilled);
  if (!wants_token_) std::string().swap(prefilled.response);
  co_return prefilled;
}

void PrefillLeg::record(const Prefilled& prefilled) {
  counted_.reset();
  std::string().swap(body_);
  record_.prefill = prefilled.what;
  if (!request_.client().is_gone()) {
    ++shared_.metrics.prefill[static_cast<std::size_t>(prefilled.what)];
  }
}

bool PrefillLeg::is_cached() const {
  KvRequest* const kv = needs_.view.kv;
  if (kv == nullptr || !uses_store(shared_.flow)) return false;
  const std::vector<Candidate> engines =
      shared_.fleet.candidates(Role::kDecode, needs_.fleet_request({}));
  const auto uncached = shared_.kv->least_uncached(engines, *kv, shared_.now());
  return uncached && *uncached < static_cast<std::uint64_t>(shared_.options.min_prefill_tokens);
}

bool PrefillLeg::costs_more_than_decode() const {
  KvRequest* const kv = needs_.view.kv;
  const RouterOptions& options = shared_.options;
  if (kv == nullptr || !uses_store(shared_.flow) || options.prefill_policy != kKvAware ||
      options.decode_policy != kKvAware) {
    return false;
  }
  const std::vector<Candidate> prefills =
      shared_.fleet.candidates(Role::kPrefill, needs_.fleet_request({}));
  const std::vector<Candidate> decodes =
      shared_.fleet.candidates(Role::kDecode, needs_.fleet_request({}));
  // A leg that fails chooses anew, without the pair.
  return shared_.kv->choose_pair(prefills, decodes, *kv, shared_.now()) && kv->pair->skips_prefill;
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

asio::awaitable<Result<void>> PrefillLeg::read(UpstreamCall& call, Duration limit,
                                               std::string& response) {
  const TimePoint end = shared_.now() + limit;
  std::string head = is_early_
                         ? std::move(head_)
                         : request_.engine_head(*call.engine(), body_.size(), true, needs_.view.kv);
  Result<void> done = co_await call.open(std::move(head), body_, limit, Resend::kUnlessSent);
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

asio::awaitable<Prefilled> PrefillLeg::send() {
  EnginePermit& permit = *permit_;
  Engine& engine = *permit.engine();
  const TimePoint began = shared_.now();
  engine.handover.started(began);
  if (!is_early_) kv_.emplace(shared_, needs_.view.kv, engine);
  const Ending<KvLeg> account(kv_);
  UpstreamCall call(shared_.engine_connections, permit.engine());
  std::string response;
  Result<void> done;
  {
    const ClientWait::CallScope scope(wait_, call);
    done = co_await read(call, time_limit(body_.size()), response);
  }
  if (request_.client().is_gone()) co_return Prefilled{};
  // The decode engine's response has ended.
  if (!done && done.error().code == Errc::kCancelled) {
    co_return Prefilled{.what = Prefill::kUnneeded};
  }
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
  kv_->answered();
  if (needs_.view.kv != nullptr && !is_early_) {
    needs_.view.kv->has_answer = true;
    needs_.view.kv->prefilled_by = engine.id;
  }
  co_return handed_over(engine, std::move(response));
}

Prefilled PrefillLeg::failed(EnginePermit& permit, const UpstreamCall& call, const Error& error) {
  permit.failed();
  permit.engine()->early.forget();
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
  if (shared_.flow == Flow::kAuto) engine.early.learn(place_of(kv_params));
  if (what == Prefill::kNoParams && engine.handover.missed(shared_.now())) {
    g_log.warn(
        "a prefill engine is suspended: {} responses in a row announce no blocks, so each prompt "
        "is computed twice; check that its connector is on and serves its model engine={}",
        HandoverWatch::kMisses, engine.url.text);
  } else if (what == Prefill::kDone && engine.handover.worked()) {
    g_log.info("a prefill engine announces blocks again engine={}", engine.url.text);
  }
  return {.what = what, .kv_params = std::move(kv_params), .response = std::move(response)};
}

}  // namespace pegaflow::router
