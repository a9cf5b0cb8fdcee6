#include "router/http/routes.h"

#include <algorithm>
#include <array>

namespace pegaflow::router {
namespace {

struct Row {
  std::string_view path;
  std::string_view method;
  Route route;
};

constexpr std::array kRows = {
    Row{"/health", "GET", {RouteKind::kHealth, "health", false, false}},
    Row{"/metrics", "GET", {RouteKind::kMetrics, "metrics", false, false}},
    Row{"/version", "GET", {RouteKind::kVersion, "version", false, false}},
    Row{"/routes", "GET", {RouteKind::kRoutes, "routes", false, false}},
    Row{"/index/snapshot", "GET", {RouteKind::kSnapshot, "snapshot", false, false}},
    // Not /score, which is an engine's: the similarity of texts.
    Row{"/kv/score", "POST", {RouteKind::kScore, "kv_score", false, false}},
    Row{"/kv/prefetch/v1/chat/completions",
        "POST",
        {RouteKind::kAnnounced, "kv_prefetch", false, true, BodyKind::kJson, {}, "chat"}},
    Row{"/kv/prefetch/v1/completions",
        "POST",
        {RouteKind::kAnnounced, "kv_prefetch", false, true, BodyKind::kJson, {}, "completions"}},
    Row{"/kv/prefetch/v1/messages",
        "POST",
        {RouteKind::kAnnounced, "kv_prefetch", true, true, BodyKind::kJson, {}, "messages"}},
    Row{"/kv/prefetch/v1/responses",
        "POST",
        {RouteKind::kAnnounced, "kv_prefetch", false, true, BodyKind::kJson, {}, "responses"}},
    Row{"/v1/models", "GET", {RouteKind::kModels, "models"}},
    Row{"/v1/chat/completions", "POST", {RouteKind::kSplit, "chat"}},
    Row{"/v1/completions", "POST", {RouteKind::kSplit, "completions"}},
    Row{"/v1/messages", "POST", {RouteKind::kSplit, "messages", true}},
    Row{"/v1/messages/count_tokens", "POST", {RouteKind::kOne, "count_tokens", true}},
    Row{"/v1/responses", "POST", {RouteKind::kResponses, "responses"}},
    Row{"/v1/embeddings", "POST", {RouteKind::kOne, "embeddings"}},
    Row{"/v1/audio/transcriptions",
        "POST",
        {RouteKind::kOne, "audio", false, true, BodyKind::kForm}},
    Row{"/v1/audio/translations", "POST", {RouteKind::kOne, "audio", false, true, BodyKind::kForm}},
    Row{"/v1/audio/speech", "POST", {RouteKind::kOne, "audio"}},
    Row{"/rerank", "POST", {RouteKind::kOne, "rerank"}},
    Row{"/v1/rerank", "POST", {RouteKind::kOne, "rerank"}},
    Row{"/v2/rerank", "POST", {RouteKind::kOne, "rerank"}},
    Row{"/score", "POST", {RouteKind::kOne, "score"}},
    Row{"/v1/score", "POST", {RouteKind::kOne, "score"}},
    Row{"/classify", "POST", {RouteKind::kOne, "classify"}},
    Row{"/pooling", "POST", {RouteKind::kOne, "pooling"}},
    Row{"/tokenize", "POST", {RouteKind::kOne, "tokenize"}},
    Row{"/detokenize", "POST", {RouteKind::kOne, "detokenize"}},
};

constexpr std::array kIndexRows = {
    Row{"/health", "GET", {RouteKind::kHealth, "health", false, false}},
    Row{"/metrics", "GET", {RouteKind::kMetrics, "metrics", false, false}},
    Row{"/version", "GET", {RouteKind::kVersion, "version", false, false}},
    Row{"/score", "POST", {RouteKind::kScore, "score", false, false}},
    Row{"/kv/score", "POST", {RouteKind::kScore, "score", false, false}},
    Row{"/learn", "POST", {RouteKind::kLesson, "learn", false, false}},
    Row{"/index/dump", "GET", {RouteKind::kDump, "dump", false, false}},
};

constexpr std::string_view kResponsesFolder = "/v1/responses/";

}  // namespace

std::string_view response_id_of(std::string_view target) {
  std::string_view path = target.substr(0, target.find('?'));
  if (path.substr(0, kResponsesFolder.size()) != kResponsesFolder) return {};
  path.remove_prefix(kResponsesFolder.size());
  const std::size_t slash = path.find('/');
  if (slash != std::string_view::npos && path.substr(slash) != "/cancel") return {};
  return path.substr(0, slash);
}

namespace {

/// `route` for one of its methods; otherwise the route that lists the methods.
Route by_method(std::string_view method, std::string_view methods, const Route& route) {
  const auto is_listed = [&] {
    for (std::string_view rest = methods; !rest.empty();) {
      const std::size_t end = std::min(rest.find(','), rest.size());
      if (rest.substr(0, end) == method) return true;
      rest.remove_prefix(std::min(end + 2, rest.size()));
    }
    return false;
  };
  if (is_listed()) return route;
  const RouteKind kind = method == "OPTIONS" ? RouteKind::kOptions : RouteKind::kWrongMethod;
  return {kind, route.name, route.is_anthropic, false, BodyKind::kUnknown, methods};
}

}  // namespace

Route find_index_route(std::string_view method, std::string_view target) {
  const std::string_view path = target.substr(0, target.find('?'));
  for (const Row& row : kIndexRows) {
    if (row.path != path) continue;
    return by_method(method, row.method == "GET" ? "GET, HEAD" : row.method, row.route);
  }
  return {RouteKind::kDenied, "denied", false, false};
}

Route find_route(std::string_view method, std::string_view target,
                 const std::vector<std::string>& passed) {
  const std::string_view path = target.substr(0, target.find('?'));
  for (const Row& row : kRows) {
    if (row.path != path) continue;
    return by_method(method, row.method == "GET" ? "GET, HEAD" : row.method, row.route);
  }
  if (!response_id_of(target).empty()) {
    const bool cancels = path.substr(path.rfind('/')) == "/cancel";
    return by_method(method, cancels ? "POST" : "GET",
                     {RouteKind::kResponses, "responses", false, true, BodyKind::kUnknown});
  }
  if (std::find(passed.begin(), passed.end(), path) != passed.end()) {
    // Responses to these methods have no body, whatever length their head contains.
    if (method == "HEAD" || method == "CONNECT") {
      return {RouteKind::kWrongMethod, "passed", false, false};
    }
    return {RouteKind::kOne, "passed", false, true, BodyKind::kUnknown};
  }
  if (path == "*" && method == "OPTIONS") {
    return {RouteKind::kOptions,       "options", false, false, BodyKind::kUnknown,
            "GET, HEAD, POST, OPTIONS"};
  }
  return {RouteKind::kDenied, "denied", false, false};
}

}  // namespace pegaflow::router
