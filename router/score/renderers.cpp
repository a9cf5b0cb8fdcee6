#include "router/score/renderers.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "base/program/metrics_page.h"
#include "router/body/prompt_text.h"
#include "router/http/json_text.h"
#include "router/request/client_wait.h"
#include "router/upstream/engine_connections.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

using Tokens = std::vector<std::uint32_t>;

/// vLLM's path that renders the body of a request of the route, without generating.
std::string_view render_path(std::string_view route) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kPaths{
      {{"chat", "/v1/chat/completions/render"},
       {"completions", "/v1/completions/render"},
       {"messages", "/v1/messages/render"},
       {"responses", "/v1/responses/render"}}};
  for (const auto& [name, path] : kPaths) {
    if (name == route) return path;
  }
  return {};
}

/// /tokenize reads the bodies of these routes only.
bool is_tokenized(std::string_view route) { return route == "chat" || route == "completions"; }

TimePoint now() { return std::chrono::steady_clock::now(); }

bool is_set(const std::vector<JsonMember>& members, std::string_view name) {
  const JsonMember* const member = find_member(members, name);
  return member != nullptr && member->value != "null";
}

/// One request at a server, which has no outcome if it ends with an exception.
class Asking {
 public:
  explicit Asking(Engine& engine) : engine_(engine) {
    ++engine_.inflight;
    engine_.breaker.started(now());
  }
  ~Asking() {
    --engine_.inflight;
    if (!has_outcome_) engine_.breaker.withdrawn();
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  void succeeded() {
    engine_.breaker.succeeded();
    has_outcome_ = true;
  }
  void failed() {
    engine_.breaker.failed(now());
    has_outcome_ = true;
  }

 private:
  Engine& engine_;
  bool has_outcome_ = false;
};

}  // namespace

std::vector<std::uint32_t> read_rendered(std::string_view answer) {
  // /v1/completions/render returns a list, with an element for each prompt.
  if (const auto prompts = read_elements(answer)) {
    if (prompts->size() != 1 || prompts->front().front() != '{') return {};
    answer = prompts->front();
  }
  const auto members = read_members(answer);
  if (!members || is_set(*members, "features") || is_set(*members, "content_parts")) return {};
  const JsonMember* list = find_member(*members, "token_ids");
  if (list == nullptr) list = find_member(*members, "tokens");
  if (list == nullptr || list->value.front() != '[') return {};
  return read_token_ids(list->value);
}

bool AskedTexts::continues_one(const index::Text& text) const {
  return std::any_of(text.chunks.begin(), text.chunks.end(),
                     [&](std::uint64_t chunk) { return ends_[chunk % kTexts] == chunk; });
}

void AskedTexts::add(const index::Text& text) {
  if (!text.chunks.empty()) ends_[text.chunks.back() % kTexts] = text.chunks.back();
}

Renderers::Renderers(EngineConnections& connections, const std::vector<EngineUrl>& servers,
                     const std::string& key, const Options& options)
    : connections_(connections), key_(key), options_(options) {
  for (const EngineUrl& url : servers) {
    servers_.push_back({std::make_shared<Engine>(url, Role::kDecode, Breaker::Options())});
  }
}

std::string Renderers::metrics(std::string_view prefix) const {
  MetricsPage page{std::string(prefix)};
  page.counters("renders_total", "Texts for which a server of --render was asked, by outcome",
                "result",
                {{"rendered", static_cast<double>(stats_.rendered)},
                 {"failed", static_cast<double>(stats_.failed)},
                 {"late", static_cast<double>(stats_.late)},
                 {"busy", static_cast<double>(stats_.busy)}});
  return page.text();
}

Renderers::Server* Renderers::choose() {
  Server* best = nullptr;
  for (Server& server : servers_) {
    const Engine& engine = *server.engine;
    if (engine.inflight >= options_.inflight || !engine.breaker.allows(now())) continue;
    if (best == nullptr || engine.inflight < best->engine->inflight) best = &server;
  }
  return best;
}

bool Renderers::may_render(std::size_t body_bytes) const {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(options_.timeout);
  return body_bytes <= static_cast<std::size_t>(limit.count() * kBytesPerMs);
}

asio::awaitable<Result<Tokens>> Renderers::ask(Server& server, std::string_view route,
                                               std::string_view body, ClientWait* wait) {
  const TimePoint end = now() + options_.timeout;
  bool renders = now() >= server.tokenizes_until || !is_tokenized(route);
  while (true) {
    const std::string_view path = renders ? render_path(route) : "/tokenize";
    UpstreamCall call(connections_, server.engine);
    std::optional<ClientWait::CallScope> scope;
    if (wait != nullptr) scope.emplace(*wait, call);
    Result<ShortResponse> answer =
        co_await ask_engine(call, request_head(*server.engine, "POST", path, key_, body.size()),
                            body, std::max<Duration>(end - now(), Duration::zero()), kAnswerBytes);
    if (!answer) co_return Result<Tokens>(tl::unexpected<Error>(std::move(answer.error())));
    if (renders && answer->status == 404 && is_tokenized(route)) {
      renders = false;
      continue;
    }
    if (answer->status >= 500) {
      co_return Result<Tokens>(fail(Errc::kPeerLost, "{} answered {}", path, answer->status));
    }
    // A server that refuses a text, such as one beyond its length, works.
    if (answer->status != 200) co_return Result<Tokens>(Tokens());
    // An unknown model is 404, too: only an answer tells that /render is what the server lacks.
    if (!renders) server.tokenizes_until = std::max(server.tokenizes_until, now() + kTokenizeTime);
    co_return Result<Tokens>(read_rendered(answer->body));
  }
}

asio::awaitable<std::optional<Tokens>> Renderers::tokens(std::string_view route,
                                                         std::string_view body, ClientWait* wait) {
  Server* const server = choose();
  if (server == nullptr) {
    ++stats_.busy;
    co_return std::optional<Tokens>();
  }
  Asking asking(*server->engine);
  Result<Tokens> tokens = co_await ask(*server, route, body, wait);
  if (!tokens && tokens.error().code == Errc::kCancelled) co_return std::optional<Tokens>();
  if (!tokens) {
    const bool is_late = tokens.error().code == Errc::kTimeout;
    if (!is_late || may_render(body.size())) asking.failed();
    ++(is_late ? stats_.late : stats_.failed);
    co_return std::optional<Tokens>();
  }
  asking.succeeded();
  ++(tokens->empty() ? stats_.failed : stats_.rendered);
  co_return tokens->empty() ? std::optional<Tokens>() : std::optional(std::move(*tokens));
}

}  // namespace pegaflow::router
