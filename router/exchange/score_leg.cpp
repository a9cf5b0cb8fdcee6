#include "router/exchange/score_leg.h"

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "router/kv/kv_routing.h"
#include "router/request/head_check.h"
#include "router/score/renderers.h"
#include "router/score/score_answer.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// Shorter texts are estimated: a call costs more than they do.
constexpr std::size_t kLeastRendered = 1024;

/// Whether a server of --render is asked for the tokens of the request's text.
bool is_to_render(const Shared& shared, const ScoreRequest& request) {
  if (shared.renderers == nullptr || request.form != PromptForm::kText || request.has_media ||
      request.prompt.text.size() < kLeastRendered) {
    return false;
  }
  const std::string_view model = request.model;
  if (shared.kv->fleet().hashing_rank(model, !request.prompt.cache_salt.empty()) == nullptr) {
    return false;  // Tokens would not be of use.
  }
  // What is known of the text is most of it, if it was rendered before.
  const auto known = shared.kv->peek(request.prompt, model);
  return known->known.text_bytes * 2 < request.prompt.text.size();
}

asio::awaitable<ScoreAnswer> score(Shared& shared, const std::string& body) {
  Result<ScoreRequest> request = read_score_request(body);
  if (!request) co_return ScoreAnswer{400, request.error().detail};
  if (request->model.empty()) request->model = shared.fleet.unnamed_model();
  bool is_rendered = false;
  if (is_to_render(shared, *request)) {
    std::optional<std::vector<std::uint32_t>> tokens =
        co_await shared.renderers->tokens(request->is_chat ? "chat" : "completions", body, nullptr);
    if (tokens) {
      request->prompt.tokens = std::move(*tokens);
      request->prompt.is_exact = is_rendered = true;
    }
  }
  co_return answer_score(*shared.kv, shared.fleet, std::move(*request), is_rendered, shared.now());
}

ScoreAnswer learn(Shared& shared, const std::string& body) {
  Result<ScoreRequest> lesson = read_lesson(body);
  if (!lesson) return {400, lesson.error().detail};
  if (lesson->model.empty()) lesson->model = shared.fleet.unnamed_model();
  return answer_lesson(*shared.kv, shared.fleet, std::move(*lesson));
}

}  // namespace

asio::awaitable<bool> serve_scores(ClientRequest& request, AccessRecord& record,
                                   const std::string& body) {
  Shared& shared = request.shared();
  if (request.needs_token() &&
      !(shared.secrets && has_token(*shared.secrets, request.head(), body))) {
    co_return co_await request.send_error(
        401, "the token is missing, wrong or too old; docs/router_api.md tells how to make one");
  }
  ScoreAnswer answer;
  switch (request.route().kind) {
    case RouteKind::kScore:
      answer = co_await score(shared, body);
      break;
    case RouteKind::kLesson:
      answer = learn(shared, body);
      break;
    default:
      answer = answer_dump(*shared.kv, request.head().target);
  }
  if (answer.status != 200) co_return co_await request.send_error(answer.status, answer.text);
  record.status = 200;
  const std::string head =
      request.own_head(200, "application/json", answer.text.size(), std::string_view());
  if (request.is_head()) co_return co_await request.client().send(head);
  record.bytes_out += answer.text.size();
  co_return co_await request.client().send(head, answer.text);
}

}  // namespace pegaflow::router
