#include "router/exchange.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.h"
#include "router/client_connection.h"
#include "router/pages.h"
#include "version.h"

namespace pegaflow {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {

constexpr Log kAccessLog{"access"};

/// With the token ids of the longest prompt that they are asked for.
constexpr std::size_t kPrefillAnswerBytes = 8 * kFirstTokenBodyBytes;

/// A client's own id is kept if it is harmless in a head and in a log.
bool is_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           std::string_view("-_.:/+=").find(c) != std::string_view::npos;
  });
}

bool is_worth_another_engine(unsigned status) {
  return status == 500 || status == 502 || status == 503 || status == 504;
}

/// Failures of the engine; 503 is only that it has enough to do.
bool is_engine_failure(unsigned status) { return status >= 500 && status != 503; }

bool is_json_type(const std::string& type) {
  const std::string_view media = std::string_view(type).substr(0, type.find(';'));
  const std::size_t end = media.find_last_not_of(" \t");
  return equals_ignoring_case(media.substr(0, end == std::string_view::npos ? 0 : end + 1),
                              "application/json");
}

/// Watches a client, and stops also when something throws: what it calls has gone by then.
class Watching {
 public:
  Watching(ClientConnection& client, std::function<void()> on_gone) : client_(client) {
    client_.watch(std::move(on_gone));
  }
  ~Watching() { client_.unwatch(); }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  ClientConnection& client_;
};

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

double milliseconds_of(Duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

Exchange::Exchange(ClientConnection& client, const RequestHead& head)
    : client_(client),
      shared_(client.shared_),
      head_(head),
      route_(find_route(head.method, head.target, client.shared_.options.pass)),
      began_(client.shared_.now()),
      timer_(client.shared_.io) {
  ++shared_.metrics.in_flight;
  const std::string* const id = find_field(head.fields, "x-request-id");
  request_id_ = id != nullptr && is_request_id(*id)
                    ? *id
                    : fmt::format("{:016x}{:016x}", shared_.random(), shared_.random());
}

Exchange::~Exchange() { --shared_.metrics.in_flight; }

void Exchange::interrupt() {
  if (call_ != nullptr) {
    ++shared_.metrics.cancelled_legs;
    call_->cancel();
  }
  timer_.cancel();
}

bool Exchange::keeps_connection() {
  const bool keeps = head_.keep_alive && !head_.is_http_10 && !shared_.is_draining;
  if (!keeps) client_.ends_with_this_answer();
  return keeps;
}

void Exchange::forget_body() {
  shared_.metrics.body_bytes -= std::exchange(client_.body_bytes_, 0);
  body_ = std::string();
  if (splice_) splice_->body = std::string();
}

std::string Exchange::refusal() {
  const bool keeps = keeps_connection();
  const auto refuse = [&](unsigned status, std::string_view text, std::string_view fields = {}) {
    status_ = status;
    std::string whole = error_answer(status, text, route_.is_anthropic, fields, keeps);
    // A client of HEAD reads no body: it would take it for its next answer.
    if (head_.method == "HEAD") whole.resize(whole.find("\r\n\r\n") + 4);
    return whole;
  };
  if (route_.kind == RouteKind::kDenied) return refuse(404, "the router does not serve this path");
  if (route_.kind == RouteKind::kWrongMethod) {
    return refuse(405, "the router does not serve this path with this method");
  }
  if (shared_.access && route_.needs_key) {
    const std::string* const bearer = find_field(head_.fields, "authorization");
    const std::string* const plain = find_field(head_.fields, "x-api-key");
    const std::string_view key = bearer != nullptr  ? bearer_key(*bearer)
                                 : plain != nullptr ? std::string_view(*plain)
                                                    : std::string_view();
    const AccessList::Verdict verdict = shared_.access->check(key, shared_.now());
    key_name_ = verdict.name;
    if (verdict.kind == AccessList::Verdict::Kind::kUnknown) {
      ++shared_.metrics.refused_keys;
      return refuse(401, "no valid API key", "WWW-Authenticate: Bearer\r\n");
    }
    if (verdict.kind == AccessList::Verdict::Kind::kTooOften) {
      ++shared_.metrics.rate_limited;
      const double seconds = std::chrono::duration<double>(verdict.retry_after).count();
      return refuse(429, "too many requests with this API key",
                    fmt::format("Retry-After: {}\r\n", std::max(1.0, std::ceil(seconds))));
    }
  }
  const std::string* const type = find_field(head_.fields, "content-type");
  if (route_.kind == RouteKind::kSplit && type != nullptr && !is_json_type(*type)) {
    return refuse(415, "the body has to be application/json");
  }
  return {};
}

asio::awaitable<bool> Exchange::wait(Duration time) {
  error_code ignored;
  timer_.expires_after(time);
  co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  co_return !client_.is_gone();
}

asio::awaitable<bool> Exchange::wait_before_retry(std::int64_t attempt) {
  std::uniform_real_distribution<double> jitter(0.5, 1.5);
  const std::chrono::duration<double> delay =
      std::chrono::duration<double>(shared_.options.retry_delay) *
      (std::ldexp(1.0, static_cast<int>(std::min<std::int64_t>(attempt, 16))) *
       jitter(shared_.random));
  co_return co_await wait(std::chrono::duration_cast<Duration>(delay));
}

asio::awaitable<bool> Exchange::answer(unsigned status, std::string_view text,
                                       std::string_view fields) {
  status_ = status;
  const bool keeps = keeps_connection();
  const std::string lines = fmt::format("{}X-Request-Id: {}\r\n", fields, request_id_);
  const std::string whole = error_answer(status, text, route_.is_anthropic, lines, keeps);
  bytes_out_ += whole.size();
  co_return co_await client_.send(whole);
}

std::uint64_t Exchange::key_of(const std::vector<JsonMember>& members) const {
  const std::string* const session = find_field(head_.fields, "x-session-id");
  if (session != nullptr && !session->empty()) return hash_key(*session);
  const std::string_view prefix =
      prompt_prefix(members, static_cast<std::size_t>(shared_.options.hash_prefix_bytes));
  return prefix.empty() ? 0 : hash_key(prefix);
}

asio::awaitable<bool> Exchange::run(std::string body) {
  body_ = std::move(body);
  bytes_in_ = body_.size();
  const Watching watching(client_, [this] { interrupt(); });
  bool keeps = false;
  switch (route_.kind) {
    case RouteKind::kHealth:
    case RouteKind::kMetrics:
    case RouteKind::kVersion:
      keeps = co_await own_page();
      break;
    case RouteKind::kModels:
      keeps = co_await models();
      break;
    case RouteKind::kSplit:
      keeps = co_await split();
      break;
    case RouteKind::kResponses: {
      std::string id(response_id_of(head_.target));
      const auto members = read_members(body_);
      if (members) {
        key_ = key_of(*members);
        const JsonMember* const previous = find_member(*members, "previous_response_id");
        if (previous != nullptr) id = json_unescape(previous->value);
      }
      pinned_ = shared_.response_owners.find(id);
      keeps = co_await forward(body_);
      break;
    }
    case RouteKind::kOne:
      key_ = key_of({});
      keeps = co_await forward(body_);
      break;
    case RouteKind::kDenied:
    case RouteKind::kWrongMethod:
      break;  // refusal() has answered.
  }
  co_return keeps;
}

asio::awaitable<bool> Exchange::own_page() {
  std::string page;
  std::string_view type = "application/json";
  unsigned status = 200;
  if (route_.kind == RouteKind::kHealth) {
    const HealthPage health =
        health_page(shared_.fleet, shared_.namespaces, shared_.is_draining, shared_.now());
    page = health.text;
    status = health.is_serving ? 200 : 503;
  } else if (route_.kind == RouteKind::kMetrics) {
    page = metrics_page(shared_.metrics, shared_.fleet, shared_.namespaces, shared_.now());
    type = "text/plain; version=0.0.4";
  } else {
    page = fmt::format("{{\"version\":{}}}\n", json_quote(kVersion));
  }
  status_ = status;
  const std::string head =
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}\r\n", status,
                  status == 200 ? "OK" : "Service Unavailable", type, page.size(),
                  keeps_connection() ? "" : "Connection: close\r\n");
  co_return co_await client_.send(head, page);
}

asio::awaitable<bool> Exchange::models() {
  // All engines are asked at once; the slowest one that answers in time decides how long it takes.
  struct Asked {
    std::vector<std::string> answers;
    std::size_t open = 0;
    asio::steady_timer* waiting = nullptr;  // None once the client left.
  };
  const auto asked = std::make_shared<Asked>();
  asked->waiting = &timer_;
  timer_.expires_at(TimePoint::max());
  std::vector<std::string> urls;
  for (const auto& engine : shared_.fleet.engines()) {
    if (!engine->is_up || std::find(urls.begin(), urls.end(), engine->url.text) != urls.end()) {
      continue;
    }
    urls.push_back(engine->url.text);
    ++asked->open;
    const auto ask = [](std::shared_ptr<Asked> all, Shared& shared, std::shared_ptr<Engine> one,
                        std::string request) -> asio::awaitable<void> {
      const Result<ShortAnswer> got =
          co_await get_from_engine(shared.engine_connections, one, std::move(request),
                                   shared.options.health_timeout, std::size_t{1024} * 1024);
      if (got && got->status == 200) all->answers.push_back(got->body);
      if (--all->open == 0 && all->waiting != nullptr) all->waiting->cancel();
    };
    asio::co_spawn(shared_.io, ask(asked, shared_, engine, engine_request(*engine, 0, false)),
                   asio::detached);
  }
  error_code ignored;
  if (asked->open > 0) {
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  asked->waiting = nullptr;
  if (client_.is_gone()) co_return false;
  if (asked->answers.empty()) {
    ++shared_.metrics.no_engine;
    co_return co_await answer(503, "no engine says which models it has", "Retry-After: 1\r\n");
  }
  const std::string page = merge_models(asked->answers);
  status_ = 200;
  const std::string head = fmt::format(
      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
      "X-Request-Id: {}\r\n{}\r\n",
      page.size(), request_id_, keeps_connection() ? "" : "Connection: close\r\n");
  co_return co_await client_.send(head, page);
}

asio::awaitable<bool> Exchange::split() {
  // The views lie in body_, which stays as it is until the decode engine has answered.
  const auto members = read_members(body_);
  if (!members) co_return co_await answer(400, members.error().detail);
  key_ = key_of(*members);
  if (shared_.options.pd_first_token && shared_.flow == Flow::kStore) {
    first_token_ = route_.name == "completions" ? decide_first_token(*members, body_.size())
                                                : FirstToken::kRoute;
  }
  const bool wants_token = first_token_ == FirstToken::kSent;
  Prefilled prefilled = co_await prefill(*members, wants_token);
  if (client_.is_gone()) co_return false;
  if (wants_token) {
    const Spliced spliced = co_await splice(*members, prefilled);
    first_token_ = spliced.what;
    if (client_.is_gone()) co_return false;
    if (spliced.what == FirstToken::kSent) co_return spliced.keeps;
  }
  if (!prefilled.kv_params.empty() || find_member(*members, "kv_transfer_params") != nullptr) {
    std::string changed = decode_body(body_, *members, prefilled.kv_params);
    body_ = std::move(changed);
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
      const Fleet::Choice choice = shared_.fleet.choose(Role::kPrefill, key_, tried);
      if (choice.why != Fleet::Why::kFound) {
        if (attempt == 0) {
          what = choice.why == Fleet::Why::kBusy ? Prefill::kBusy : Prefill::kDown;
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
      if (client_.is_gone() || !prefilled.is_worth_another) break;
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
  const TimePoint end = began + shared_.options.prefill_timeout;
  UpstreamCall call(shared_.engine_connections, slot.engine());
  call_ = &call;
  std::string request = engine_request(*slot.engine(), body.size(), true);
  Result<void> done =
      co_await call.open(std::move(request), body, shared_.options.prefill_timeout, true);
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
  co_return Prefilled{.what = what, .kv_params = std::move(kv_params), .answer = std::move(text)};
}

asio::awaitable<Exchange::Admitted> Exchange::admit(std::vector<const Engine*>& tried) {
  Admitted result;
  const TimePoint began = shared_.now();
  const TimePoint end = began + shared_.options.queue_timeout;
  const bool keeps = keeps_connection();
  const auto refuse = [&](unsigned status, std::string_view text) {
    status_ = status;
    result.refusal =
        error_answer(status, text, route_.is_anthropic,
                     fmt::format("Retry-After: 1\r\nX-Request-Id: {}\r\n", request_id_), keeps);
  };
  if (pinned_) {
    result.slot.emplace(shared_, pinned_);
    co_return result;
  }
  bool waited = false;
  while (true) {
    // Who comes now goes behind those that wait already.
    const bool must_wait = !waited && shared_.line.size() > 0;
    Fleet::Choice choice;
    choice.why = Fleet::Why::kBusy;
    if (!must_wait) choice = shared_.fleet.choose(Role::kDecode, key_, tried);
    if (choice.why == Fleet::Why::kFound) {
      if (waited) shared_.metrics.queue_wait.record(shared_.now() - began);
      result.slot.emplace(shared_, choice.engine);
      co_return result;
    }
    if (choice.why != Fleet::Why::kBusy) {
      ++shared_.metrics.no_engine;
      refuse(503, "no engine is up");
      co_return result;
    }
    if (!waited && shared_.line.size() >= static_cast<std::size_t>(shared_.options.queue)) {
      ++shared_.metrics.queue_refused;
      refuse(429, "all engines are busy, and the queue is full");
      co_return result;
    }
    WaitingLine::Place place{&timer_};
    if (waited) {
      shared_.line.join_first(place);
    } else {
      shared_.line.join(place);
    }
    waited = true;
    ++shared_.metrics.queued;
    error_code ignored;
    timer_.expires_at(end);
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    --shared_.metrics.queued;
    if (!place.is_called) shared_.line.leave(place);
    if (client_.is_gone()) {
      if (place.is_called) shared_.line.call_next();
      co_return result;
    }
    if (!place.is_called) {
      ++shared_.metrics.queue_timeouts;
      refuse(503, "no engine had room in time");
      co_return result;
    }
  }
}

void Exchange::judge(Slot& slot, unsigned status, const Error& error) {
  if (is_engine_failure(status) || error.code == Errc::kPeerLost || error.code == Errc::kTimeout ||
      error.code == Errc::kRefused || error.code == Errc::kCorrupt || error.code == Errc::kIo) {
    slot.failed();
  } else {
    slot.succeeded();
  }
}

asio::awaitable<bool> Exchange::forward(std::string_view body) {
  // What an engine keeps (a stored response) must not be made twice; the rest may.
  const bool may_repeat = route_.kind == RouteKind::kSplit ||
                          (route_.kind == RouteKind::kOne && route_.name != "passed");
  std::vector<const Engine*> tried;
  for (std::int64_t attempt = 0;; ++attempt) {
    Admitted admitted = co_await admit(tried);
    if (!admitted.slot) {
      if (admitted.refusal.empty()) co_return false;
      bytes_out_ += admitted.refusal.size();
      co_return co_await client_.send(admitted.refusal);
    }
    Slot& slot = *admitted.slot;
    const std::shared_ptr<Engine> engine = slot.engine();
    decode_engine_ = engine->url.text;
    const bool is_last = attempt >= shared_.options.retries;
    const TimePoint began = shared_.now();
    Relay how = Relay::kNothingSent;
    Error error;
    unsigned status = 0;
    {
      UpstreamCall call(shared_.engine_connections, engine);
      call_ = &call;
      std::string request = engine_request(*engine, body.size(), false);
      const Result<void> opened =
          co_await call.open(std::move(request), body, shared_.options.answer_timeout, may_repeat);
      if (!opened) {
        error = opened.error();
      } else {
        status = call.head().status;
        if (is_worth_another_engine(status) && may_repeat && !is_last) {
          error = {Errc::kBusy, fmt::format("{} answered {}", engine->url.text, status)};
        } else {
          how = co_await relay(call, error);
        }
      }
      call_ = nullptr;
    }
    if (client_.is_gone() || how == Relay::kGone) co_return false;
    shared_.metrics.leg[static_cast<std::size_t>(Role::kDecode)].record(shared_.now() - began);
    judge(slot, status, error);
    if (how == Relay::kWhole || how == Relay::kErrorFrame) co_return true;
    if (how == Relay::kBroken) co_return false;
    const bool repeats =
        (may_repeat && error.code != Errc::kTimeout) || (error.code == Errc::kRefused && !pinned_);
    if (is_last || !repeats) {
      const bool late = error.code == Errc::kTimeout;
      co_return co_await answer(late ? 504 : 502,
                                late ? "the engine did not answer in time"
                                     : "the engine could not be reached or gave no answer",
                                "Retry-After: 1\r\n");
    }
    ++shared_.metrics.retries[static_cast<std::size_t>(Role::kDecode)];
    ++retries_;
    tried.push_back(engine.get());
    admitted.slot.reset();
    if (!co_await wait_before_retry(attempt)) co_return false;
  }
}

std::string Exchange::engine_request(const Engine& engine, std::size_t body_size,
                                     bool is_prefill) const {
  // A head that shapes no answer of P is not left out: LoRA routing, tenants and tracing go by it.
  std::string request;
  request.reserve(512);
  request += fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\n", head_.method, head_.target,
                         std::string_view(engine.url.text).substr(7));
  const bool hides_keys = shared_.access.has_value() || !shared_.engine_key.empty();
  for (const HttpField& field : head_.fields) {
    const auto is = [&](std::string_view name) { return equals_ignoring_case(field.name, name); };
    if (is("host") || is("content-length") || is("expect") || is("x-request-id") ||
        is("accept-encoding") || is_hop_by_hop(field.name, head_.fields)) {
      continue;
    }
    if (hides_keys && (is("authorization") || is("x-api-key"))) continue;
    if (is_prefill && is("accept")) continue;  // P is asked for JSON whatever D is asked for.
    request += field.name;
    request += ": ";
    request += field.value;
    request += "\r\n";
  }
  if (!shared_.engine_key.empty()) {
    request += fmt::format("Authorization: Bearer {}\r\n", shared_.engine_key);
  }
  // Without its length a body would be the engine's next request, whatever the method is.
  if (head_.method != "GET" || body_size > 0) {
    request += fmt::format("Content-Length: {}\r\n", body_size);
  }
  request += fmt::format("X-Request-Id: {}\r\n\r\n", request_id_);
  return request;
}

void Exchange::finished() {
  const Duration whole = shared_.now() - began_;
  constexpr std::array<std::string_view, 6> kClasses = {"gone", "1xx", "2xx", "3xx", "4xx", "5xx"};
  const std::string_view status = client_.is_gone() ? kClasses[0] : kClasses[status_ / 100 % 6];
  ++shared_.metrics.requests[{route_.name, status}];
  if (first_token_ && !client_.is_gone()) {
    ++shared_.metrics.first_token[static_cast<std::size_t>(*first_token_)];
  }
  if (status_ != 0 && !client_.is_gone()) shared_.metrics.whole.record(whole);
  if (first_event_time_) {
    shared_.metrics.first_event.record(*first_event_time_);
    if (events_ > 1) {
      shared_.metrics.between_events.record((whole - *first_event_time_) /
                                            static_cast<std::int64_t>(events_ - 1));
    }
  }
  const bool is_own = route_.kind == RouteKind::kHealth || route_.kind == RouteKind::kMetrics;
  if (!shared_.options.access_log || is_own) return;
  std::string line =
      fmt::format("answered id={} route={} status={} in={} out={} ms={:.3f}", request_id_,
                  route_.name, status_, bytes_in_, bytes_out_, milliseconds_of(whole));
  const auto text = [&](std::string_view name, std::string_view value) {
    if (!value.empty()) line += fmt::format(" {}={}", name, value);
  };
  text("key", key_name_);
  text("prefill", prefill_ ? to_string(*prefill_) : std::string_view());
  text("first_token", first_token_ ? to_string(*first_token_) : std::string_view());
  text("p", prefill_engine_);
  text("d", decode_engine_);
  if (prefill_time_) line += fmt::format(" p_ms={:.3f}", milliseconds_of(*prefill_time_));
  if (first_event_time_) {
    line += fmt::format(" first_ms={:.3f} events={}", milliseconds_of(*first_event_time_), events_);
  }
  if (retries_ > 0) line += fmt::format(" retries={}", retries_);
  if (late_error_) line += " late_error=1";
  if (client_.is_gone()) line += " gone=1";
  kAccessLog.info("{}", line);
}

}  // namespace pegaflow
