#include "router/routes.h"

#include <algorithm>
#include <array>

namespace pegaflow {
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
    Row{"/v1/models", "GET", {RouteKind::kModels, "models"}},
    Row{"/v1/chat/completions", "POST", {RouteKind::kSplit, "chat"}},
    Row{"/v1/completions", "POST", {RouteKind::kSplit, "completions"}},
    Row{"/v1/messages", "POST", {RouteKind::kSplit, "messages", true}},
    Row{"/v1/messages/count_tokens", "POST", {RouteKind::kOne, "count_tokens", true}},
    Row{"/v1/responses", "POST", {RouteKind::kResponses, "responses"}},
    Row{"/v1/embeddings", "POST", {RouteKind::kOne, "embeddings"}},
    Row{"/v1/audio/transcriptions", "POST", {RouteKind::kOne, "audio"}},
    Row{"/v1/audio/translations", "POST", {RouteKind::kOne, "audio"}},
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

Route find_route(std::string_view method, std::string_view target,
                 const std::vector<std::string>& passed) {
  const std::string_view path = target.substr(0, target.find('?'));
  for (const Row& row : kRows) {
    if (row.path != path) continue;
    if (row.method == method) return row.route;
    return {RouteKind::kWrongMethod, row.route.name, row.route.is_anthropic, false};
  }
  if (!response_id_of(target).empty()) {
    const bool cancels = path.substr(path.rfind('/')) == "/cancel";
    if (method != (cancels ? "POST" : "GET")) {
      return {RouteKind::kWrongMethod, "responses", false, false};
    }
    return {RouteKind::kResponses, "responses"};
  }
  if (std::find(passed.begin(), passed.end(), path) != passed.end()) {
    // Their answers have no body, whatever the answer's head says of its length.
    if (method == "HEAD" || method == "CONNECT") {
      return {RouteKind::kWrongMethod, "passed", false, false};
    }
    return {RouteKind::kOne, "passed"};
  }
  return {RouteKind::kDenied, "denied", false, false};
}

}  // namespace pegaflow
