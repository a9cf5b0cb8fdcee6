#include "router/exchange/exchange.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "router/body/early_params.h"
#include "router/body/first_token.h"
#include "router/body/full_report.h"
#include "router/body/prompt_text.h"
#include "router/body/request_body.h"
#include "router/body/split.h"
#include "router/body/steering.h"
#include "router/exchange/decode_leg.h"
#include "router/exchange/early_legs.h"
#include "router/exchange/first_token_splice.h"
#include "router/exchange/prefill_leg.h"
#include "router/exchange/prompt_render.h"
#include "router/exchange/score_leg.h"
#include "router/exchange/snapshot_reply.h"
#include "router/kv/kv_routing.h"
#include "router/page/pages.h"
#include "router/request/announcement.h"
#include "router/request/head_check.h"
#include "router/request/turn_wait.h"
#include "router/routing/policy.h"
#include "router/score/renderers.h"
#include "version.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// Watches a client, and stops also when an exception ends the scope: the callback's objects are
/// destroyed then.
class Watching {
 public:
  Watching(Client& client, std::function<void()> on_gone) : client_(client) {
    client_.watch(std::move(on_gone));
  }
  ~Watching() { client_.unwatch(); }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  Client& client_;
};

/// The hash that related requests share: of their session, or of the beginning of their prompt.
std::uint64_t affinity_of(const RequestHead& head, const std::vector<JsonMember>& members,
                          std::size_t prefix_bytes) {
  const std::string* const session = find_field(head.fields, "x-session-id");
  if (session != nullptr && !session->empty()) return hash_key(*session);
  const std::string_view prefix = prompt_prefix(members, prefix_bytes);
  return prefix.empty() ? 0 : hash_key(prefix);
}

}  // namespace

Exchange::Exchange(Client& client, Shared& shared, const RequestHead& head)
    : shared_(shared),
      client_(client),
      record_{.began = shared.now()},
      request_(client, shared, head, record_),
      needs_(request_),
      wait_(request_),
      prefill_wait_(request_),
      models_(request_, wait_),
      bodies_(request_),
      writer_(request_, record_, bodies_) {
  ++shared_.metrics.in_flight;
}

Exchange::~Exchange() {
  --shared_.metrics.in_flight;
  if (kv_) shared_.kv->finished(*kv_, shared_.now());
}

std::string Exchange::refusal() { return check_head(request_, record_); }

asio::awaitable<bool> Exchange::run(std::string body) {
  record_.bytes_in = body.size();
  bodies_.client() = std::move(body);
  const Watching watching(client_, [this] {
    wait_.interrupt();
    prefill_wait_.interrupt();
  });
  switch (request_.route().kind) {
    case RouteKind::kHealth:
    case RouteKind::kMetrics:
    case RouteKind::kVersion:
    case RouteKind::kRoutes:
      co_return co_await send_own_page();
    case RouteKind::kSnapshot:
      co_return co_await send_snapshot(request_, record_);
    case RouteKind::kModels:
      co_return co_await send_models();
    case RouteKind::kScore:
    case RouteKind::kLesson:
    case RouteKind::kDump:
      co_return co_await serve_scores(request_, record_, bodies_.client());
    case RouteKind::kDenied:
    case RouteKind::kWrongMethod:
    case RouteKind::kOptions:
      co_return false;  // refusal() has the response.
    case RouteKind::kAnnounced:
    case RouteKind::kSplit:
    case RouteKind::kResponses:
    case RouteKind::kOne:
      break;
  }
  const Result<std::vector<JsonMember>> members = read_body();
  if (!members) co_return co_await request_.send_error(400, members.error().detail);
  if (request_.route().kind == RouteKind::kAnnounced) co_return co_await announce(*members);
  read_prompt(*members);
  if (kv_) {
    co_await render_prompt(shared_, *kv_, request_.route().name, bodies_.client(), wait_);
    if (client_.is_gone()) co_return false;
  }
  co_await wait_for_turn(shared_, needs_, request_.first_role(), wait_);
  if (client_.is_gone()) co_return false;
  co_return co_await serve(*members);
}

Result<std::vector<JsonMember>> Exchange::read_body() {
  const RequestHead& head = request_.head();
  const Route& route = request_.route();
  std::optional<Tenant> tenant;
  if (shared_.salts) tenant.emplace(Tenant{*shared_.salts, request_.key_name()});
  Result<BodyReading> reading =
      read_request_body(bodies_.client(), route.body, find_field(head.fields, "content-type"),
                        tenant ? &*tenant : nullptr);
  if (!reading) return tl::unexpected<Error>(std::move(reading.error()));
  if (reading->lost_steering) ++shared_.metrics.steering_removed;
  std::vector<JsonMember> members = std::move(reading->members);
  needs_.model = std::move(reading->model);
  if (needs_.model.empty() && route.body != BodyKind::kUnknown) {
    needs_.model = shared_.fleet.unnamed_model();
  }
  needs_.view.affinity =
      affinity_of(head, members, static_cast<std::size_t>(shared_.options.hash_prefix_bytes));
  if (route.kind == RouteKind::kResponses) {
    std::string id(response_id_of(head.target));
    const JsonMember* const previous = find_member(members, "previous_response_id");
    if (previous != nullptr) id = json_unescape(previous->value);
    needs_.pinned = shared_.response_owners.find(id);
  }
  return members;
}

void Exchange::read_prompt(const std::vector<JsonMember>& members) {
  if (shared_.kv == nullptr) return;
  PromptText prompt = prompt_text(request_.route().name, members);
  if (prompt.root == 0) return;
  const std::string* const field = find_field(request_.head().fields, "x-session-id");
  // vLLM prefers the member.
  const JsonMember* const member = find_member(members, "session_id");
  std::string session = member != nullptr ? json_unescape(member->value) : std::string();
  if (session.empty() && field != nullptr && !is_own_session(*field)) session = *field;
  kv_ = shared_.kv->begin(std::move(prompt), needs_.model, session);
  bodies_.count_text(kv_->text_size);
  needs_.view.kv = kv_.get();
  writer_.watch(kv_.get());
}

asio::awaitable<bool> Exchange::announce(const std::vector<JsonMember>& members) {
  if (co_await models_.is_unknown(needs_)) {
    if (client_.is_gone()) co_return false;
    co_return co_await send_unknown_model();
  }
  PromptText prompt = prompt_text(request_.route().announced, members);
  std::unique_ptr<KvRequest> request;
  if (prompt.root != 0) {
    request = shared_.kv->peek(std::move(prompt), needs_.model);
    bodies_.count_text(request->text_size);
  }
  co_return co_await serve_announcement(request_, needs_, request.get(), record_);
}

asio::awaitable<bool> Exchange::serve(const std::vector<JsonMember>& members) {
  const bool is_unknown = co_await models_.is_unknown(needs_);
  if (client_.is_gone()) co_return false;
  if (is_unknown) co_return co_await send_unknown_model();
  if (request_.route().kind == RouteKind::kSplit) co_return co_await split(members);
  co_return co_await decode();
}

asio::awaitable<bool> Exchange::split(const std::vector<JsonMember>& members) {
  if (shared_.options.pd_first_token && uses_store(shared_.flow)) {
    record_.first_token = request_.route().name == "completions"
                              ? decide_first_token(members, bodies_.client().size())
                              : FirstToken::kRoute;
  }
  const bool wants_token = record_.first_token == FirstToken::kSent;
  PrefillLeg prefill(request_, needs_, prefill_wait_, record_);
  prefill.begin(members, wants_token);
  const PrefillPlace* const place = prefill.place();
  Prefilled prefilled;
  std::vector<const Engine*> tried;
  if (place != nullptr && may_be_early(members, wants_token)) {
    bodies_.hold_continuation(
        decode_body(bodies_.client(), members,
                    early_params(*place, std::chrono::duration_cast<std::chrono::milliseconds>(
                                             prefill.limit() + EarlyLegs::kLate))));
    EarlyLegs legs(request_, needs_, wait_, prefill_wait_, record_, writer_, prefill);
    EarlyOutcome outcome = co_await legs.run(bodies_.continuation());
    if (outcome.is_answered) co_return outcome.keeps;
    bodies_.drop_continuation();
    prefilled = std::move(outcome.prefilled);
    tried = std::move(outcome.tried);
  } else {
    prefilled = co_await prefill.run();
    if (prefilled.what == Prefill::kDone) {
      record_.handover = Handover::kSerial;
      record_.prefilled_at = shared_.now();
    }
  }
  if (client_.is_gone()) co_return false;
  if (needs_.is_suspect()) {
    needs_.report_suspect();
    co_return co_await needs_.refuse_suspect();
  }
  if (kv_) kv_->is_prefilled = prefilled.what == Prefill::kDone;
  if (wants_token) {
    FirstTokenSplice splice(request_, needs_, wait_, record_, bodies_, writer_);
    const Spliced spliced = co_await splice.run(members, prefilled);
    record_.first_token = spliced.what;
    if (client_.is_gone()) co_return false;
    if (spliced.what == FirstToken::kSent) co_return spliced.keeps;
    if (needs_.is_suspect()) {
      needs_.report_suspect();
      co_return co_await needs_.refuse_suspect();
    }
  }
  if (!prefilled.kv_params.empty()) {
    std::string changed = decode_body(bodies_.client(), members, prefilled.kv_params);
    bodies_.client() = std::move(changed);  // From here on `members` are invalid.
  }
  co_return co_await decode(std::move(tried));
}

bool Exchange::may_be_early(const std::vector<JsonMember>& members, bool wants_token) const {
  // A response that is not streamed shows too late that the decode engine waits in vain.
  return shared_.flow == Flow::kAuto && !wants_token && is_streamed(members);
}

asio::awaitable<bool> Exchange::decode(std::vector<const Engine*> tried) {
  if (kv_ && kv_->wants_full_report && !kv_->is_prefilled) {
    std::string changed = with_full_report(bodies_.client());
    bodies_.client() = std::move(changed);
  }
  DecodeLeg leg(request_, needs_, wait_, record_, writer_, std::move(tried));
  co_return co_await leg.run(bodies_.client());
}

asio::awaitable<bool> Exchange::send_own_page() {
  std::string page;
  std::string_view type = "application/json";
  record_.status = 200;
  if (request_.route().kind == RouteKind::kHealth) {
    HealthPage health = health_page(shared_.fleet, shared_.namespaces, shared_.kv,
                                    shared_.is_leaving, shared_.now());
    page = std::move(health.text);
    if (!health.is_serving) record_.status = 503;
  } else if (request_.route().kind == RouteKind::kMetrics) {
    shared_.metrics.queue_clients = shared_.line.clients();
    shared_.metrics.queue_tokens = shared_.line.tokens();
    page = shared_.options.is_index
               ? index_metrics_page(shared_.metrics, shared_.fleet, *shared_.kv, shared_.now())
               : metrics_page(shared_.metrics, shared_.fleet, shared_.namespaces, shared_.kv,
                              shared_.now());
    if (shared_.renderers != nullptr) {
      page += shared_.renderers->metrics(shared_.options.is_index ? "pegaflow_index_"
                                                                  : "pegaflow_router_");
    }
    type = "text/plain; version=0.0.4";
  } else if (request_.route().kind == RouteKind::kRoutes) {
    page = shared_.kv->log().json(shared_.now());
  } else {
    page = fmt::format("{{\"version\":{}}}\n", json_quote(kVersion));
  }
  const std::string head = request_.own_head(record_.status, type, page.size(), {});
  co_return co_await client_.send(head, request_.is_head() ? std::string_view() : page);
}

asio::awaitable<bool> Exchange::send_models() {
  const std::vector<std::string> lists = co_await models_.lists();
  if (client_.is_gone()) co_return false;
  if (lists.empty()) {
    ++shared_.metrics.no_engine;
    co_return co_await request_.send_error(503, "no engine has returned its models",
                                           "Retry-After: 1\r\n");
  }
  const std::string page = merge_models(lists);
  record_.status = 200;
  const std::string head = request_.own_head(200, "application/json", page.size(),
                                             fmt::format("X-Request-Id: {}\r\n", request_.id()));
  co_return co_await client_.send(head, request_.is_head() ? std::string_view() : page);
}

asio::awaitable<bool> Exchange::send_unknown_model() {
  ++shared_.metrics.unknown_models;
  record_.status = 404;
  const std::string lines = fmt::format("X-Request-Id: {}\r\n{}", request_.id(), request_.cors());
  return request_.send(unknown_model_response(needs_.model, request_.route().is_anthropic, lines,
                                              request_.keeps_connection()));
}

void Exchange::finished() {
  record_.finish(shared_, {.route = request_.route(),
                           .id = request_.id(),
                           .key_name = request_.key_name(),
                           .is_gone = client_.is_gone() && !record_.is_delivered});
}

}  // namespace pegaflow::router
