#include "router/http/cors.h"

#include <algorithm>

#include <fmt/format.h>

namespace pegaflow::router {
namespace {

bool has_any(const std::vector<std::string>& origins) {
  return std::find(origins.begin(), origins.end(), "*") != origins.end();
}

bool is_allowed(const std::vector<std::string>& origins, const std::string& origin) {
  return has_any(origins) || std::find(origins.begin(), origins.end(), origin) != origins.end();
}

}  // namespace

bool answers_cors(const std::vector<std::string>& origins) {
  return !(origins.size() == 1 && origins.front() == "none");
}

std::string cors_lines(const std::vector<std::string>& origins, const HttpFields& fields) {
  if (!answers_cors(origins)) return {};
  const std::string* const origin = find_field(fields, "origin");
  if (has_any(origins)) {
    return origin != nullptr ? "Access-Control-Allow-Origin: *\r\n" : std::string();
  }
  // A cache must not return one origin's response to another.
  if (origin == nullptr || !is_allowed(origins, *origin)) return "Vary: Origin\r\n";
  return fmt::format("Access-Control-Allow-Origin: {}\r\nVary: Origin\r\n", *origin);
}

std::string cors_lines_without_head(const std::vector<std::string>& origins) {
  return answers_cors(origins) && has_any(origins) ? "Access-Control-Allow-Origin: *\r\n"
                                                   : std::string();
}

bool is_preflight(std::string_view method, const HttpFields& fields) {
  return method == "OPTIONS" && find_field(fields, "origin") != nullptr &&
         find_field(fields, "access-control-request-method") != nullptr;
}

PreflightResponse preflight_response(const std::vector<std::string>& origins,
                                     const HttpFields& fields, bool keep_alive) {
  const bool good = is_allowed(origins, *find_field(fields, "origin"));
  const std::string_view body = good ? "OK" : "Disallowed CORS origin";
  std::string lines = cors_lines(origins, fields);
  lines +=
      "Access-Control-Allow-Methods: DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT\r\n"
      "Access-Control-Max-Age: 600\r\n";
  if (const std::string* const wanted = find_field(fields, "access-control-request-headers")) {
    lines += fmt::format("Access-Control-Allow-Headers: {}\r\n", *wanted);
  }
  return {good ? 200U : 400U,
          fmt::format("HTTP/1.1 {}\r\nContent-Type: text/plain; charset=utf-8\r\n"
                      "Content-Length: {}\r\n{}{}\r\n{}",
                      good ? "200 OK" : "400 Bad Request", body.size(), lines,
                      keep_alive ? "" : "Connection: close\r\n", body)};
}

bool is_cors_field(std::string_view name) {
  constexpr std::string_view kBegin = "access-control-";
  return equals_ignoring_case(name.substr(0, kBegin.size()), kBegin);
}

}  // namespace pegaflow::router
