#include "router/request/client_request.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "router/body/steering.h"
#include "router/http/cors.h"
#include "router/kv/kv_request.h"
#include "router/page/pages.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// A client's own id is kept if it is harmless in a head and in a log.
bool is_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           std::string_view("-_.:/+=").find(c) != std::string_view::npos;
  });
}

void append_field(std::string& out, const HttpField& field) {
  out += field.name;
  out += ": ";
  out += field.value;
  out += "\r\n";
}

}  // namespace

ClientRequest::ClientRequest(Client& client, Shared& shared, const RequestHead& head,
                             AccessRecord& record)
    : client_(client),
      shared_(shared),
      head_(head),
      record_(record),
      route_(shared.options.is_index ? find_index_route(head.method, head.target)
                                     : find_route(head.method, head.target, shared.options.pass)),
      cors_(cors_lines(shared.options.cors_origins, head.fields)) {
  const std::string* const id = find_field(head.fields, "x-request-id");
  id_ = id != nullptr && is_request_id(*id)
            ? *id
            : fmt::format("{:016x}{:016x}", shared.random(), shared.random());
}

bool ClientRequest::keeps_connection() {
  const bool keeps = head_.keep_alive && !head_.is_http_10 && !shared_.is_draining;
  if (!keeps) client_.end_with_this_response();
  return keeps;
}

std::string ClientRequest::engine_head(const Engine& engine, std::size_t body_size, bool is_prefill,
                                       const KvRequest* kv) const {
  const bool names_rank = kv != nullptr && kv->placed && kv->placed->names_rank;
  // Fields that do not affect a prefill stay: LoRA routing, tenants and tracing use them.
  std::string request;
  request.reserve(512);
  // HEAD is served by the router itself: the response has no body, and engines do not support HEAD.
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
    if (names_rank && is("x-data-parallel-rank")) continue;
    if (is_prefill && is("accept")) continue;  // A prefill engine always responds with JSON.
    append_field(request, field);
  }
  if (!shared_.engine_key.empty()) {
    request += fmt::format("Authorization: Bearer {}\r\n", shared_.engine_key);
  }
  if (kv != nullptr && kv->has_lesson && kv->adds_session) {
    request += fmt::format("X-Session-ID: {}\r\n", kv->session);
  }
  if (names_rank) request += fmt::format("X-data-parallel-rank: {}\r\n", kv->placed->rank);
  // Without its length a body would be the engine's next request, whatever the method is.
  if ((head_.method != "GET" && !is_head()) || body_size > 0) {
    request += fmt::format("Content-Length: {}\r\n", body_size);
  }
  request += fmt::format("Via: 1.1 pegaflow-router\r\nX-Request-Id: {}\r\n\r\n", id_);
  return request;
}

Role ClientRequest::first_role() const noexcept {
  const bool splits = route_.kind == RouteKind::kSplit ||
                      (route_.kind == RouteKind::kAnnounced && route_.announced != "responses");
  return splits && shared_.fleet.has(Role::kPrefill) ? Role::kPrefill : Role::kDecode;
}

std::string ClientRequest::response_head(const ResponseHead& head, std::string_view framing) {
  std::string out;
  out.reserve(512);
  out += fmt::format("HTTP/1.1 {} {}\r\n", head.status, head.reason);
  bool has_id = false;
  const bool answers = answers_cors(shared_.options.cors_origins);
  for (const HttpField& field : head.fields) {
    if (answers && is_cors_field(field.name)) continue;
    if (equals_ignoring_case(field.name, "content-length") ||
        is_hop_by_hop(field.name, head.fields)) {
      continue;
    }
    has_id = has_id || equals_ignoring_case(field.name, "x-request-id");
    append_field(out, field);
  }
  if (!has_id) out += fmt::format("X-Request-Id: {}\r\n", id_);
  out += cors_;
  out += framing;
  if (!keeps_connection()) out += "Connection: close\r\n";
  out += "\r\n";
  return out;
}

std::string ClientRequest::own_head(unsigned status, std::string_view type, std::size_t size,
                                    std::string_view fields) {
  return fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}{}{}\r\n",
                     status,
                     status == 200   ? "OK"
                     : status == 202 ? "Accepted"
                                     : "Service Unavailable",
                     type, size, fields, cors_, keeps_connection() ? "" : "Connection: close\r\n");
}

std::string ClientRequest::error(unsigned status, std::string_view text, std::string_view fields) {
  record_.status = status;
  const bool keeps = keeps_connection();
  const std::string lines = fmt::format("{}X-Request-Id: {}\r\n{}", fields, id_, cors_);
  std::string whole = error_response(status, text, route_.is_anthropic, lines, keeps);
  // A client of HEAD reads no body: it would take the body for its next response.
  if (is_head()) whole.resize(whole.find("\r\n\r\n") + 4);
  return whole;
}

asio::awaitable<bool> ClientRequest::send(std::string response) {
  record_.bytes_out += response.size();
  co_return co_await client_.send(response);
}

asio::awaitable<bool> ClientRequest::send_error(unsigned status, std::string_view text,
                                                std::string_view fields) {
  return send(error(status, text, fields));
}

}  // namespace pegaflow::router
