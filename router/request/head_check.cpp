#include "router/request/head_check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "cluster/peer_proof.h"
#include "router/body/request_body.h"
#include "router/config/access.h"
#include "router/http/cors.h"
#include "router/page/pages.h"

namespace pegaflow::router {
namespace {

using Kind = AccessList::Verdict::Kind;

AccessList::Verdict check_key(Shared& shared, const RequestHead& head) {
  // A proxy in front may have added an Authorization of its own.
  const std::string* const bearer = find_field(head.fields, "authorization");
  const std::string* const plain = find_field(head.fields, "x-api-key");
  AccessList::Verdict verdict;
  if (bearer != nullptr) verdict = shared.access->check(bearer_key(*bearer), shared.now());
  if (verdict.kind == Kind::kUnknown && plain != nullptr) {
    verdict = shared.access->check(*plain, shared.now());
  }
  return verdict;
}

/// Whether the request's body must have the type application/json, and has another one.
bool has_wrong_type(const ClientRequest& request) {
  const Route& route = request.route();
  const bool is_for_engines = route.kind == RouteKind::kSplit || route.kind == RouteKind::kOne ||
                              route.kind == RouteKind::kResponses;
  const std::string* const type = find_field(request.head().fields, "content-type");
  return is_for_engines && route.body == BodyKind::kJson && type != nullptr && !is_json_type(*type);
}

/// Whether the request has a token that was made with one of the secrets.
bool has_token(const cluster::PeerSecrets& secrets, const RequestHead& head) {
  constexpr std::string_view kBearer = "Bearer ";
  const std::string* const field = find_field(head.fields, "authorization");
  if (field == nullptr || !field->starts_with(kBearer)) return false;
  return cluster::is_http_token(
      secrets, {.time = 0, .method = head.method, .target = head.target, .body = {}},
      std::string_view(*field).substr(kBearer.size()),
      static_cast<std::uint64_t>(std::time(nullptr)));
}

}  // namespace

std::string check_head(ClientRequest& request, AccessRecord& record) {
  Shared& shared = request.shared();
  const RequestHead& head = request.head();
  const auto& origins = shared.options.cors_origins;
  const bool keeps = request.keeps_connection();
  if (answers_cors(origins) && is_preflight(head.method, head.fields)) {
    request.set_route({RouteKind::kOptions, "options", false, false});
    PreflightResponse preflight = preflight_response(origins, head.fields, keeps);
    record.status = preflight.status;
    return std::move(preflight.text);
  }
  const Route& route = request.route();
  const auto refuse = [&](unsigned status, std::string_view text, std::string_view fields = {}) {
    record.status = status;
    std::string whole = error_response(status, text, route.is_anthropic,
                                       fmt::format("{}{}", fields, request.cors()), keeps);
    // A client of HEAD reads no body: it would take the body for its next response.
    if (request.is_head()) whole.resize(whole.find("\r\n\r\n") + 4);
    return whole;
  };
  if (route.kind == RouteKind::kDenied) return refuse(404, "the router does not serve this path");
  if (route.kind == RouteKind::kOptions) {
    record.status = 204;
    return fmt::format("HTTP/1.1 204 No Content\r\nAllow: {}\r\n{}{}\r\n", route.methods,
                       request.cors(), keeps ? "" : "Connection: close\r\n");
  }
  if (route.kind == RouteKind::kWrongMethod) {
    return refuse(
        405, "the router does not serve this path with this method",
        route.methods.empty() ? std::string() : fmt::format("Allow: {}\r\n", route.methods));
  }
  if (shared.access && route.needs_key) {
    const AccessList::Verdict verdict = check_key(shared, head);
    request.set_key_name(verdict.name);
    if (verdict.kind == Kind::kUnknown) {
      ++shared.metrics.refused_keys;
      return refuse(401, "no valid API key", "WWW-Authenticate: Bearer\r\n");
    }
    if (verdict.kind == Kind::kTooOften) {
      ++shared.metrics.rate_limited;
      const double seconds = std::chrono::duration<double>(verdict.retry_after).count();
      return refuse(429, "too many requests with this API key",
                    fmt::format("Retry-After: {}\r\n", std::max(1.0, std::ceil(seconds))));
    }
  }
  if (route.kind == RouteKind::kRoutes) {
    if (shared.kv == nullptr) return refuse(404, "no policy of this router is kv-aware");
    if (!shared.secrets) {
      return refuse(403,
                    "this page is for those who have the secret of servers and routers: start the "
                    "router with --peer-secret-file FILE");
    }
    if (!has_token(*shared.secrets, head)) {
      return refuse(401, "the token is missing, wrong or too old; `pegaflow routes` makes one");
    }
  }
  if (has_wrong_type(request)) return refuse(415, "the Content-Type must be application/json");
  return {};
}

}  // namespace pegaflow::router
