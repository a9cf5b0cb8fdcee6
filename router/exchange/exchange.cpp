#include "router/exchange/exchange.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.h"
#include "router/body/request_body.h"
#include "router/body/steering.h"
#include "router/client_connection.h"
#include "router/http/cors.h"
#include "router/page/pages.h"
#include "router/watch/model_watch.h"
#include "version.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {

constexpr Log kLog{"router"};
constexpr Log kAccessLog{"access"};

constexpr std::string_view kNoAnswer = "the engine could not be reached or gave no answer";

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
    PreflightResponse preflight =
        preflight_response(shared_.options.cors_origins, head_.fields, keeps);
    status_ = preflight.status;
    return std::move(preflight.text);
  }
  const auto refuse = [&](unsigned status, std::string_view text, std::string_view fields = {}) {
    status_ = status;
    std::string whole = error_response(status, text, route_.is_anthropic,
                                       fmt::format("{}{}", fields, cors_), keeps);
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
  std::string whole = error_response(status, text, route_.is_anthropic, lines, keeps);
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

Fleet::Request Exchange::wanted(const std::vector<const Engine*>& tried) const {
  return {.view = {.affinity = key_}, .model = model_, .tried = tried, .excluded = ended_at_};
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
  std::optional<Tenant> tenant;
  if (shared_.salts) tenant.emplace(Tenant{*shared_.salts, key_name_});
  Result<BodyReading> reading = read_request_body(
      body_, route_.body, find_field(head_.fields, "content-type"), tenant ? &*tenant : nullptr);
  if (!reading) co_return co_await answer(400, reading.error().detail);
  if (reading->lost_steering) ++shared_.metrics.steering_removed;
  const std::vector<JsonMember> members = std::move(reading->members);  // Views into body_.
  model_ = std::move(reading->model);
  if (model_.empty() && route_.body != BodyKind::kUnknown) model_ = shared_.fleet.unnamed_model();
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
        unknown_model_response(model_, route_.is_anthropic, lines, keeps_connection());
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

asio::awaitable<Exchange::Admitted> Exchange::admit(std::vector<const Engine*>& tried) {
  Admitted result;
  const TimePoint began = shared_.now();
  const bool keeps = keeps_connection();
  const auto refuse = [&](unsigned status, std::string_view text) {
    status_ = status;
    result.refusal = error_response(
        status, text, route_.is_anthropic,
        fmt::format("Retry-After: 1\r\nX-Request-Id: {}\r\n{}", request_id_, cors_), keeps);
  };
  if (pinned_) {
    result.slot.emplace(shared_, pinned_);
    co_return result;
  }
  // Who waits already could not use an engine that is found here: it would have it.
  Fleet::Choice choice = shared_.fleet.choose(Role::kDecode, wanted(tried));
  if (choice.why == Fleet::Why::kFound) {
    result.slot.emplace(shared_, choice.engine);
    co_return result;
  }
  if (choice.why == Fleet::Why::kBusy) {
    if (shared_.line.size() >= static_cast<std::size_t>(shared_.options.queue)) {
      ++shared_.metrics.queue_refused;
      refuse(429, "all engines are busy, and the queue is full");
      co_return result;
    }
    WaitingLine::Place place{wanted(tried), [&](const Fleet::Choice& called_with) {
                               choice = called_with;
                               if (choice.engine) result.slot.emplace(shared_, choice.engine);
                               timer_.cancel();
                             }};
    shared_.line.join(place);
    ++shared_.metrics.queued;
    co_await wait(shared_.options.queue_timeout);
    --shared_.metrics.queued;
    shared_.line.leave(place);
    if (client_.is_gone()) {
      result.slot.reset();  // The next one gets it.
      co_return result;
    }
    if (result.slot) {
      shared_.metrics.queue_wait.record(shared_.now() - began);
      co_return result;
    }
    if (choice.why == Fleet::Why::kBusy) {
      ++shared_.metrics.queue_timeouts;
      refuse(503, "no engine had room in time");
      co_return result;
    }
  }
  if (choice.why == Fleet::Why::kNone && !ended_at_.empty()) {
    refuse(502, kNoAnswer);
    co_return result;
  }
  ++shared_.metrics.no_engine;
  refuse(503, "no engine is up");
  co_return result;
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

}  // namespace pegaflow::router
