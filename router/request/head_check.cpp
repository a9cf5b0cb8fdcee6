#include "router/request/head_check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "cluster/peer_proof.h"
#include "router/body/request_body.h"
#include "router/config/access.h"
#include "router/http/cors.h"
#include "router/page/pages.h"
#include "router/replicas/snapshot.h"

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
                              route.kind == RouteKind::kResponses ||
                              route.kind == RouteKind::kScore || route.kind == RouteKind::kLesson ||
                              route.kind == RouteKind::kAnnounced;
  const std::string* const type = find_field(request.head().fields, "content-type");
  return is_for_engines && route.body == BodyKind::kJson && type != nullptr && !is_json_type(*type);
}

/// The reason for which a page of the policy kv-aware is refused.
struct PageRefusal {
  unsigned status = 0;  ///< 0: it is not.
  std::string_view text{};
  std::string_view fields{};
};

constexpr PageRefusal kWrongToken{
    401, "the token is missing, wrong or too old; `pegaflow routes` makes one"};

/// Judges another router's request for what this one knows.
PageRefusal check_snapshot(const Shared& shared, const RequestHead& head) {
  if (shared.replicas == nullptr || !shared.secrets) {
    return {404, "this router has no --replicas, or no --peer-secret-file"};
  }
  if (!has_token(*shared.secrets, head, {})) {
    return {401, "the token is missing, wrong or too old"};
  }
  if (nonce_of(head.target).empty()) {
    return {400, "the query must be a nonce of 32 hexadecimal digits"};
  }
  if (shared.sends_snapshot) {
    return {503, "another snapshot is being sent", "Retry-After: 1\r\n"};
  }
  return {};
}

/// Judges a request to a page that tells what caches hold. A token that covers a body is judged
/// when the body has arrived.
PageRefusal check_page(ClientRequest& request) {
  Shared& shared = request.shared();
  const RouteKind kind = request.route().kind;
  if (shared.kv == nullptr) return {404, "no policy of this router is kv-aware"};
  if (shared.options.is_index) {
    // Its clients are gateways: they have keys, or the secret, or are on this host.
    if (!shared.access && !shared.secrets) return {};
    if (shared.access) {
      const AccessList::Verdict verdict = check_key(shared, request.head());
      request.set_key_name(verdict.name);
      if (verdict.kind == Kind::kAllowed) return {};
      if (verdict.kind == Kind::kTooOften) return {429, "too many requests with this API key"};
      if (!shared.secrets) return {401, "no valid API key"};
    }
  } else if (!shared.secrets) {
    return {403,
            "this page is for those who have the secret of servers and routers: start the router "
            "with --peer-secret-file FILE"};
  }
  if (kind == RouteKind::kScore || kind == RouteKind::kLesson) {
    request.set_needs_token();
    return {};
  }
  return has_token(*shared.secrets, request.head(), {}) ? PageRefusal{} : kWrongToken;
}

bool is_page_of_caches(RouteKind kind) {
  return kind == RouteKind::kRoutes || kind == RouteKind::kScore || kind == RouteKind::kLesson ||
         kind == RouteKind::kDump;
}

}  // namespace

bool has_token(const cluster::PeerSecrets& secrets, const RequestHead& head,
               std::string_view body) {
  constexpr std::string_view kBearer = "Bearer ";
  const std::string* const field = find_field(head.fields, "authorization");
  if (field == nullptr || !field->starts_with(kBearer)) return false;
  return cluster::is_http_token(
      secrets, {.time = 0, .method = head.method, .target = head.target, .body = body},
      std::string_view(*field).substr(kBearer.size()),
      static_cast<std::uint64_t>(std::time(nullptr)));
}

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
  if (is_page_of_caches(route.kind) || route.kind == RouteKind::kSnapshot) {
    const PageRefusal refusal =
        route.kind == RouteKind::kSnapshot ? check_snapshot(shared, head) : check_page(request);
    if (refusal.status != 0) return refuse(refusal.status, refusal.text, refusal.fields);
  }
  const bool fetches = shared.prefetches != nullptr && shared.options.full_key_bytes() > 0;
  if (route.kind == RouteKind::kAnnounced && !fetches) {
    return refuse(404,
                  "this router fetches no blocks: it needs a kv-aware policy, --servers, "
                  "--peer-secret-file, and --prefetch-key-bytes above 0");
  }
  if (has_wrong_type(request)) return refuse(415, "the Content-Type must be application/json");
  return {};
}

}  // namespace pegaflow::router
