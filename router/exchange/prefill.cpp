// The part of Exchange that has a prefill engine compute the prompt first.
#include <algorithm>
#include <utility>

#include <boost/asio/awaitable.hpp>

#include "base/log.h"
#include "router/client_connection.h"
#include "router/exchange/exchange.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr Log kLog{"router"};

/// With the token ids of the longest prompt that they are asked for.
constexpr std::size_t kPrefillAnswerBytes = 8 * kFirstTokenBodyBytes;

/// Counts bytes for as long as it lives.
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

}  // namespace

asio::awaitable<bool> Exchange::split(const std::vector<JsonMember>& members) {
  if (shared_.options.pd_first_token && shared_.flow == Flow::kStore) {
    first_token_ = route_.name == "completions" ? decide_first_token(members, body_.size())
                                                : FirstToken::kRoute;
  }
  const bool wants_token = first_token_ == FirstToken::kSent;
  Prefilled prefilled = co_await prefill(members, wants_token);
  if (client_.is_gone()) co_return false;
  if (is_suspect()) {
    count_suspect();
    co_return co_await answer_suspect();
  }
  if (wants_token) {
    const Spliced spliced = co_await splice(members, prefilled);
    first_token_ = spliced.what;
    if (client_.is_gone()) co_return false;
    if (spliced.what != FirstToken::kSent && is_suspect()) {
      count_suspect();
      co_return co_await answer_suspect();
    }
    if (spliced.what == FirstToken::kSent) co_return spliced.keeps;
  }
  if (!prefilled.kv_params.empty()) {
    std::string changed = decode_body(body_, members, prefilled.kv_params);
    body_ = std::move(changed);  // From here on `members` lead nowhere.
  }
  co_return co_await forward(body_);
}

asio::awaitable<Exchange::Prefilled> Exchange::prefill(const std::vector<JsonMember>& members,
                                                       bool wants_token) {
  Prefilled prefilled;
  Prefill what = Prefill::kNoEngine;
  if (shared_.fleet.has(Role::kPrefill)) {
    what = decide(members, route_.is_anthropic,
                  static_cast<std::size_t>(shared_.options.min_prefill_tokens));
  }
  if (what == Prefill::kDone) {
    const TimePoint began = shared_.now();
    const std::string body = prefill_body(members, route_.is_anthropic, shared_.flow, wants_token);
    const CountedBytes counted(shared_.metrics.body_bytes, body.size());
    std::vector<const Engine*> tried;
    const std::size_t attempts = shared_.options.retries > 0 ? 2 : 1;
    for (std::size_t attempt = 0; attempt < attempts; ++attempt) {
      const Fleet::Choice choice = shared_.fleet.choose(Role::kPrefill, wanted(tried));
      if (choice.why != Fleet::Why::kFound) {
        if (attempt == 0) {
          what = choice.why == Fleet::Why::kBusy        ? Prefill::kBusy
                 : choice.why == Fleet::Why::kSuspended ? Prefill::kSuspended
                 : choice.why == Fleet::Why::kNone      ? Prefill::kNoEngine
                                                        : Prefill::kDown;
        }
        break;
      }
      // The decode engine can do it too: no second attempt at the same engine.
      if (!tried.empty() && choice.engine.get() == tried.front()) break;
      if (attempt > 0) {
        ++shared_.metrics.retries[static_cast<std::size_t>(Role::kPrefill)];
        ++retries_;
      }
      tried.push_back(choice.engine.get());
      Slot slot(shared_, choice.engine);
      prefill_engine_ = choice.engine->url.text;
      prefilled = co_await prefill_once(slot, body);
      what = prefilled.what;
      if (client_.is_gone() || !prefilled.is_worth_another || is_suspect()) break;
    }
    prefill_time_ = shared_.now() - began;
  }
  prefill_ = what;
  if (!client_.is_gone()) ++shared_.metrics.prefill[static_cast<std::size_t>(what)];
  if (!wants_token) prefilled.answer = std::string();
  co_return prefilled;
}

asio::awaitable<Exchange::Prefilled> Exchange::prefill_once(Slot& slot, const std::string& body) {
  const TimePoint began = shared_.now();
  const RouterOptions& options = shared_.options;
  Duration limit = options.prefill_timeout;
  if (options.min_prefill_rate > 0) {
    const std::chrono::duration<double> earned(static_cast<double>(body.size()) / 4 /
                                               static_cast<double>(options.min_prefill_rate));
    limit = std::min(limit + std::chrono::duration_cast<Duration>(earned),
                     std::max(limit, options.answer_timeout));
  }
  const TimePoint end = began + limit;
  slot.engine()->handover.started(began);
  UpstreamCall call(shared_.engine_connections, slot.engine());
  call_ = &call;
  std::string request = engine_request(*slot.engine(), body.size(), true);
  Result<void> done = co_await call.open(std::move(request), body, limit, Resend::kUnlessSent);
  std::string text;
  while (done) {
    const Duration left = std::max<Duration>(end - shared_.now(), std::chrono::milliseconds(1));
    done = co_await call.more(text, left);
    if (call.is_complete()) break;
    if (text.size() > kPrefillAnswerBytes) done = fail(Errc::kCorrupt, "a long answer");
  }
  call_ = nullptr;
  if (client_.is_gone()) co_return Prefilled{};
  shared_.metrics.leg[static_cast<std::size_t>(Role::kPrefill)].record(shared_.now() - began);
  if (!done) {
    slot.failed();
    note_end(call, done.error());
    if (done.error().code == Errc::kGone) co_return Prefilled{.what = Prefill::kDown};
    // What took too long once would take as long again.
    if (done.error().code == Errc::kTimeout) co_return Prefilled{.what = Prefill::kTimeout};
    const bool is_refused = done.error().code == Errc::kRefused;
    co_return Prefilled{.what = is_refused ? Prefill::kRefused : Prefill::kLost,
                        .is_worth_another = true};
  }
  const unsigned status = call.head().status;
  if (is_engine_failure(status)) {
    slot.failed();
  } else {
    slot.succeeded();
  }
  if (status != 200) {
    // An engine that refuses the body as such (4xx) speaks for all of them.
    co_return Prefilled{.what = Prefill::kStatus, .is_worth_another = status >= 500};
  }
  std::string kv_params = kv_params_of(text);
  const Prefill what = kv_params.empty() ? Prefill::kNoParams : Prefill::kDone;
  Engine& engine = *slot.engine();
  if (what == Prefill::kNoParams && engine.handover.missed(shared_.now())) {
    kLog.warn(
        "a prefill engine is suspended: {} answers in a row announce no blocks, so each prompt "
        "is computed twice; is its connector on and its model served? engine={}",
        HandoverWatch::kMisses, engine.url.text);
  } else if (what == Prefill::kDone && engine.handover.worked()) {
    kLog.info("a prefill engine announces blocks again engine={}", engine.url.text);
  }
  co_return Prefilled{.what = what, .kv_params = std::move(kv_params), .answer = std::move(text)};
}

}  // namespace pegaflow::router
