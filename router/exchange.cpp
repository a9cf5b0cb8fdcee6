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
#include "router/cors.h"
#include "router/model_watch.h"
#include "router/pages.h"
#include "router/steering.h"
#include "version.h"

namespace pegaflow {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {

constexpr Log kLog{"router"};
constexpr Log kAccessLog{"access"};

/// Between two times that engines are asked for their models out of turn: what clients ask for must
/// not become questions without end.
constexpr std::chrono::seconds kModelsPause(1);

constexpr std::string_view kNoAnswer = "the engine could not be reached or gave no answer";

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

std::string_view media_type(const std::string& type) {
  const std::string_view media = std::string_view(type).substr(0, type.find(';'));
  const std::size_t end = media.find_last_not_of(" \t");
  return media.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

bool is_json_type(const std::string& type) {
  return equals_ignoring_case(media_type(type), "application/json");
}

/// Whether a web framework may read such a body as JSON.
bool is_like_json(const std::string& type) {
  constexpr std::string_view kSuffix = "+json";
  const std::string_view media = media_type(type);
  return is_json_type(type) ||
         (media.size() > kSuffix.size() &&
          equals_ignoring_case(media.substr(media.size() - kSuffix.size()), kSuffix));
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
  cors_ = cors_lines(shared_.options.cors_origins, head.fields);
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

AccessList::Verdict Exchange::check_key() {
  // A proxy in front may have put an Authorization of its own there.
  const std::string* const bearer = find_field(head_.fields, "authorization");
  const std::string* const plain = find_field(head_.fields, "x-api-key");
  AccessList::Verdict verdict;
  if (bearer != nullptr) verdict = shared_.access->check(bearer_key(*bearer), shared_.now());
  if (verdict.kind == AccessList::Verdict::Kind::kUnknown && plain != nullptr) {
    verdict = shared_.access->check(*plain, shared_.now());
  }
  return verdict;
}

std::string Exchange::refusal() {
  const bool keeps = keeps_connection();
  if (answers_cors(shared_.options.cors_origins) && is_preflight(head_.method, head_.fields)) {
    route_ = {RouteKind::kOptions, "options", false, false};
    PreflightAnswer preflight = preflight_answer(shared_.options.cors_origins, head_.fields, keeps);
    status_ = preflight.status;
    return std::move(preflight.text);
  }
  const auto refuse = [&](unsigned status, std::string_view text, std::string_view fields = {}) {
    status_ = status;
    std::string whole =
        error_answer(status, text, route_.is_anthropic, fmt::format("{}{}", fields, cors_), keeps);
    // A client of HEAD reads no body: it would take it for its next answer.
    if (is_head()) whole.resize(whole.find("\r\n\r\n") + 4);
    return whole;
  };
  if (route_.kind == RouteKind::kDenied) return refuse(404, "the router does not serve this path");
  if (route_.kind == RouteKind::kOptions) {
    status_ = 204;
    return fmt::format("HTTP/1.1 204 No Content\r\nAllow: {}\r\n{}{}\r\n", route_.methods, cors_,
                       keeps ? "" : "Connection: close\r\n");
  }
  if (route_.kind == RouteKind::kWrongMethod) {
    return refuse(
        405, "the router does not serve this path with this method",
        route_.methods.empty() ? std::string() : fmt::format("Allow: {}\r\n", route_.methods));
  }
  if (shared_.access && route_.needs_key) {
    const AccessList::Verdict verdict = check_key();
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
  const bool is_answered_by_engines = route_.kind == RouteKind::kSplit ||
                                      route_.kind == RouteKind::kOne ||
                                      route_.kind == RouteKind::kResponses;
  if (is_answered_by_engines && route_.body == BodyKind::kJson && type != nullptr &&
      !is_json_type(*type)) {
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
  const std::string lines = fmt::format("{}X-Request-Id: {}\r\n{}", fields, request_id_, cors_);
  std::string whole = error_answer(status, text, route_.is_anthropic, lines, keeps);
  if (is_head()) whole.resize(whole.find("\r\n\r\n") + 4);
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

Exchange::Refusal Exchange::read_body(std::vector<JsonMember>& members) {
  if (route_.body == BodyKind::kForm) return {};
  const std::string* const type = find_field(head_.fields, "content-type");
  const bool is_known = route_.body == BodyKind::kJson;
  if (!is_known && (body_.empty() || (type != nullptr && !is_like_json(*type)))) return {};
  auto read = read_members(body_);
  if (is_known && !read) return {400, read.error().detail};
  if (!is_known || may_steer(*read)) {
    auto cut =
        without_steering(body_, is_known ? SteeringDepth::kKnownPath : SteeringDepth::kAnywhere);
    if (!cut) {
      // Without a type it may be anything; with one an engine could read what we cannot.
      return is_known || type != nullptr ? Refusal{400, cut.error().detail} : Refusal{};
    }
    if (*cut) {
      ++shared_.metrics.steering_removed;
      body_ = std::move(**cut);
      read = read_members(body_);
    }
  }
  if (read) members = std::move(*read);
  const JsonMember* const model = find_member(members, "model");
  if (model != nullptr) model_ = json_unescape(model->value);
  if (model_.empty() && is_known) model_ = shared_.fleet.unnamed_model();
  return {};
}

asio::awaitable<void> Exchange::ask_engines(
    const std::function<asio::awaitable<void>(std::shared_ptr<Engine>)>& ask) {
  // All at once; the slowest one that answers in time decides how long it takes.
  struct Asked {
    std::size_t open = 0;
    asio::steady_timer* waiting = nullptr;  // None once the client left.
  };
  const auto asked = std::make_shared<Asked>();
  asked->waiting = &timer_;
  timer_.expires_at(TimePoint::max());
  const auto wait_for = [](std::shared_ptr<Asked> all,
                           asio::awaitable<void> question) -> asio::awaitable<void> {
    co_await std::move(question);
    if (--all->open == 0 && all->waiting != nullptr) all->waiting->cancel();
  };
  for (const auto& engine : shared_.fleet.engines()) {
    if (!engine->is_up) continue;
    ++asked->open;
    asio::co_spawn(shared_.io, wait_for(asked, ask(engine)), asio::detached);
  }
  error_code ignored;
  if (asked->open > 0) {
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  asked->waiting = nullptr;
}

asio::awaitable<bool> Exchange::is_unknown_model() {
  if (model_.empty() || pinned_ || !shared_.fleet.is_unknown_model(model_)) co_return false;
  if (shared_.now() - shared_.models_refreshed < kModelsPause) co_return true;
  // An adapter may have been loaded since the engines were asked.
  shared_.models_refreshed = shared_.now();
  co_await ask_engines([this](std::shared_ptr<Engine> engine) {
    return read_model_list(shared_, std::move(engine));
  });
  co_return shared_.fleet.is_unknown_model(model_);
}

Fleet::Request Exchange::wanted(const std::vector<const Engine*>& tried) const {
  return {.key = key_, .model = model_, .tried = tried, .excluded = ended_at_};
}

void Exchange::note_end(const UpstreamCall& call, const Error& error) {
  const bool ended =
      error.code == Errc::kPeerLost || error.code == Errc::kIo || error.code == Errc::kGone;
  if (ended && call.was_sent()) ended_at_.push_back(call.engine()->url.text);
}

void Exchange::count_suspect() {
  ++shared_.metrics.suspect_requests;
  kLog.warn(
      "a request is not tried again: two engines ended while they had it id={} route={} "
      "engines={},{}",
      request_id_, route_.name, ended_at_[0], ended_at_[1]);
}

asio::awaitable<bool> Exchange::answer_suspect() {
  // Clients of OpenAI and Anthropic go by that field, and send again after any other 5xx.
  return answer(502, "two engines ended while they had this request; it is not tried again",
                "X-Should-Retry: false\r\n");
}

asio::awaitable<bool> Exchange::run(std::string body) {
  body_ = std::move(body);
  bytes_in_ = body_.size();
  const Watching watching(client_, [this] { interrupt(); });
  std::vector<JsonMember> members;  // Views into body_.
  switch (route_.kind) {
    case RouteKind::kHealth:
    case RouteKind::kMetrics:
    case RouteKind::kVersion:
      co_return co_await own_page();
    case RouteKind::kModels:
      co_return co_await models();
    case RouteKind::kSplit:
    case RouteKind::kResponses:
    case RouteKind::kOne:
      break;
    case RouteKind::kDenied:
    case RouteKind::kWrongMethod:
    case RouteKind::kOptions:
      co_return false;  // refusal() has answered.
  }
  const Refusal refusal = read_body(members);
  if (refusal.status != 0) co_return co_await answer(refusal.status, refusal.text);
  key_ = key_of(members);
  if (route_.kind == RouteKind::kResponses) {
    std::string id(response_id_of(head_.target));
    const JsonMember* const previous = find_member(members, "previous_response_id");
    if (previous != nullptr) id = json_unescape(previous->value);
    pinned_ = shared_.response_owners.find(id);
  }
  if (co_await is_unknown_model()) {
    if (client_.is_gone()) co_return false;
    ++shared_.metrics.unknown_models;
    status_ = 404;
    const std::string lines = fmt::format("X-Request-Id: {}\r\n{}", request_id_, cors_);
    const std::string whole =
        unknown_model_answer(model_, route_.is_anthropic, lines, keeps_connection());
    bytes_out_ += whole.size();
    co_return co_await client_.send(whole);
  }
  if (client_.is_gone()) co_return false;
  if (route_.kind == RouteKind::kSplit) co_return co_await split(members);
  co_return co_await forward(body_);
}

asio::awaitable<bool> Exchange::own_page() {
  std::string page;
  std::string_view type = "application/json";
  unsigned status = 200;
  if (route_.kind == RouteKind::kHealth) {
    const HealthPage health =
        health_page(shared_.fleet, shared_.namespaces, shared_.is_leaving, shared_.now());
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
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}{}\r\n", status,
                  status == 200 ? "OK" : "Service Unavailable", type, page.size(), cors_,
                  keeps_connection() ? "" : "Connection: close\r\n");
  co_return co_await client_.send(head, is_head() ? std::string_view() : page);
}

asio::awaitable<bool> Exchange::models() {
  const auto answers = std::make_shared<std::vector<std::string>>();
  const auto ask = [](std::shared_ptr<std::vector<std::string>> all, Shared& shared,
                      std::shared_ptr<Engine> engine,
                      std::string request) -> asio::awaitable<void> {
    const Result<ShortAnswer> got =
        co_await get_from_engine(shared.engine_connections, engine, std::move(request),
                                 shared.options.health_timeout, kModelListBytes);
    if (!got || got->status != 200) co_return;
    if (const auto ids = read_model_ids(got->body)) engine->models.set(*ids);
    all->push_back(got->body);
  };
  co_await ask_engines([&](std::shared_ptr<Engine> engine) {
    std::string request = engine_request(*engine, 0, false);
    return ask(answers, shared_, std::move(engine), std::move(request));
  });
  if (client_.is_gone()) co_return false;
  if (answers->empty()) {
    ++shared_.metrics.no_engine;
    co_return co_await answer(503, "no engine says which models it has", "Retry-After: 1\r\n");
  }
  const std::string page = merge_models(*answers);
  status_ = 200;
  const std::string head = fmt::format(
      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
      "X-Request-Id: {}\r\n{}{}\r\n",
      page.size(), request_id_, cors_, keeps_connection() ? "" : "Connection: close\r\n");
  co_return co_await client_.send(head, is_head() ? std::string_view() : page);
}

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

asio::awaitable<Exchange::Admitted> Exchange::admit(std::vector<const Engine*>& tried) {
  Admitted result;
  const TimePoint began = shared_.now();
  const TimePoint end = began + shared_.options.queue_timeout;
  const bool keeps = keeps_connection();
  const auto refuse = [&](unsigned status, std::string_view text) {
    status_ = status;
    result.refusal = error_answer(
        status, text, route_.is_anthropic,
        fmt::format("Retry-After: 1\r\nX-Request-Id: {}\r\n{}", request_id_, cors_), keeps);
  };
  if (pinned_) {
    result.slot.emplace(shared_, pinned_);
    co_return result;
  }
  bool waited = false;
  while (true) {
    // Who comes now goes behind those that wait already.
    const bool must_wait = !waited && shared_.line.has(model_);
    Fleet::Choice choice;
    choice.why = Fleet::Why::kBusy;
    if (!must_wait) choice = shared_.fleet.choose(Role::kDecode, wanted(tried));
    if (choice.why == Fleet::Why::kFound) {
      if (waited) shared_.metrics.queue_wait.record(shared_.now() - began);
      result.slot.emplace(shared_, choice.engine);
      co_return result;
    }
    if (choice.why == Fleet::Why::kNone && !ended_at_.empty()) {
      refuse(502, kNoAnswer);
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
    WaitingLine::Place place{&timer_, model_};
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
      if (place.is_called) shared_.line.call_next(model_);
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
    if (attempt > 0) {
      ++shared_.metrics.retries[static_cast<std::size_t>(Role::kDecode)];
      ++retries_;
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
          co_await call.open(std::move(request), body, shared_.options.answer_timeout,
                             may_repeat ? Resend::kUnlessSent : Resend::kNever);
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
      note_end(call, error);
    }
    if (client_.is_gone() || how == Relay::kGone) co_return false;
    shared_.metrics.leg[static_cast<std::size_t>(Role::kDecode)].record(shared_.now() - began);
    judge(slot, status, error);
    // An adapter may have been unloaded.
    if (status == 404 && !model_.empty()) refresh_model_list(shared_, engine, kModelsPause);
    if (is_suspect()) count_suspect();
    if (how == Relay::kWhole || how == Relay::kErrorFrame) co_return true;
    if (how == Relay::kBroken) co_return false;
    if (is_suspect()) co_return co_await answer_suspect();
    const bool repeats =
        (may_repeat && error.code != Errc::kTimeout) || (error.code == Errc::kRefused && !pinned_);
    if (is_last || !repeats) {
      const bool late = error.code == Errc::kTimeout;
      co_return co_await answer(
          late ? 504 : 502,
          late ? std::string_view("the engine did not answer in time") : kNoAnswer,
          "Retry-After: 1\r\n");
    }
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
  // HEAD is the router's own affair: its answer has no body, and engines know no HEAD.
  request += fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\n", is_head() ? "GET" : head_.method,
                         head_.target, std::string_view(engine.url.text).substr(7));
  const bool hides_keys = shared_.access.has_value() || !shared_.engine_key.empty();
  for (const HttpField& field : head_.fields) {
    const auto is = [&](std::string_view name) { return equals_ignoring_case(field.name, name); };
    if (is("host") || is("content-length") || is("expect") || is("x-request-id") ||
        is("accept-encoding") || is_hop_by_hop(field.name, head_.fields)) {
      continue;
    }
    if (is("x-session-id") && is_own_session(field.value)) continue;
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
  if ((head_.method != "GET" && !is_head()) || body_size > 0) {
    request += fmt::format("Content-Length: {}\r\n", body_size);
  }
  request += fmt::format("Via: 1.1 pegaflow-router\r\nX-Request-Id: {}\r\n\r\n", request_id_);
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
