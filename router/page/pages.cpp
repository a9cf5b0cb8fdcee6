#include "router/page/pages.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "router/http/json_text.h"
#include "router/page/kv_page.h"

namespace pegaflow::router {
namespace {

struct StatusWords {
  unsigned status;
  std::string_view reason;
  std::string_view type;       // OpenAI's type.
  std::string_view anthropic;  // Anthropic's type.
};

constexpr std::array kStatusWords = {
    StatusWords{400, "Bad Request", "invalid_request_error", "invalid_request_error"},
    StatusWords{401, "Unauthorized", "authentication_error", "authentication_error"},
    StatusWords{404, "Not Found", "not_found_error", "not_found_error"},
    StatusWords{405, "Method Not Allowed", "invalid_request_error", "invalid_request_error"},
    StatusWords{408, "Request Timeout", "invalid_request_error", "invalid_request_error"},
    StatusWords{413, "Content Too Large", "invalid_request_error", "request_too_large"},
    StatusWords{415, "Unsupported Media Type", "invalid_request_error", "invalid_request_error"},
    StatusWords{429, "Too Many Requests", "rate_limit_error", "rate_limit_error"},
    StatusWords{431, "Request Header Fields Too Large", "invalid_request_error",
                "request_too_large"},
    StatusWords{502, "Bad Gateway", "engine_error", "api_error"},
    StatusWords{503, "Service Unavailable", "overloaded_error", "overloaded_error"},
    StatusWords{504, "Gateway Timeout", "timeout_error", "timeout_error"},
};

}  // namespace

namespace {

std::string response_with(unsigned status, std::string_view reason, std::string_view body,
                          std::string_view fields, bool keep_alive) {
  return fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}{}\r\n{}",
      status, reason, body.size(), fields, keep_alive ? "" : "Connection: close\r\n", body);
}

std::string anthropic_error(std::string_view type, std::string_view text) {
  return fmt::format(R"({{"type":"error","error":{{"type":"{}","message":{}}}}})", type,
                     json_quote(text));
}

}  // namespace

std::string error_response(unsigned status, std::string_view text, bool is_anthropic,
                           std::string_view fields, bool keep_alive) {
  const auto* words = std::find_if(kStatusWords.begin(), kStatusWords.end(),
                                   [&](const StatusWords& each) { return each.status == status; });
  if (words == kStatusWords.end()) words = kStatusWords.begin();
  const std::string body =
      is_anthropic
          ? anthropic_error(words->anthropic, text)
          : fmt::format(R"({{"error":{{"message":{},"type":"{}","param":null,"code":{}}}}})",
                        json_quote(text), words->type, status);
  return response_with(status, words->reason, body, fields, keep_alive);
}

std::string unknown_model_response(std::string_view model, bool is_anthropic,
                                   std::string_view fields, bool keep_alive) {
  constexpr std::size_t kShown = 256;  // A name may be as long as a body.
  const std::string text = fmt::format("The model `{}` does not exist.", model.substr(0, kShown));
  const std::string body =
      is_anthropic
          ? anthropic_error("not_found_error", text)
          : fmt::format(
                R"({{"error":{{"message":{},"type":"NotFoundError","param":"model","code":404}}}})",
                json_quote(text));
  return response_with(404, "Not Found", body, fields, keep_alive);
}

std::optional<std::vector<std::string>> read_model_ids(std::string_view answer) {
  const auto members = read_members(answer);
  const JsonMember* const list = members ? find_member(*members, "data") : nullptr;
  if (list == nullptr || list->value.front() != '[') return std::nullopt;
  const auto elements = read_elements(list->value);
  if (!elements) return std::nullopt;
  std::vector<std::string> ids;
  for (const std::string_view model : *elements) {
    const auto fields = read_members(model);
    const JsonMember* const id = fields ? find_member(*fields, "id") : nullptr;
    if (id != nullptr) ids.push_back(json_unescape(id->value));
  }
  return ids;
}

std::vector<std::string> read_adapter_ids(std::string_view answer) {
  std::vector<std::string> ids;
  const auto members = read_members(answer);
  const JsonMember* const list = members ? find_member(*members, "data") : nullptr;
  if (list == nullptr || list->value.front() != '[') return ids;
  const auto elements = read_elements(list->value);
  if (!elements) return ids;
  for (const std::string_view model : *elements) {
    const auto fields = read_members(model);
    if (fields && !text_of(*fields, "parent").empty()) ids.push_back(text_of(*fields, "id"));
  }
  return ids;
}

std::string error_frame(bool is_anthropic, Errc why) {
  const std::string_view text = why == Errc::kTimeout
                                    ? "the engine stopped sending within the stream"
                                    : "the connection to the engine was lost within the stream";
  if (is_anthropic) {
    return fmt::format(
        "event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"api_error\","
        "\"message\":{}}}}}\n\n",
        json_quote(text));
  }
  return fmt::format(
      "data: {{\"error\":{{\"message\":{},\"type\":\"pd_decode_interrupted\",\"param\":null,"
      "\"code\":502}}}}\n\n",
      json_quote(text));
}

HealthPage health_page(const Fleet& fleet, const NamespaceView& namespaces, const KvRouting* kv,
                       bool is_draining, TimePoint now) {
  HealthPage page;
  page.is_serving = !is_draining && fleet.any_up(Role::kDecode);
  bool all_good = namespaces.is_good() && (kv == nullptr || kv_is_good(*kv));
  std::string engines;
  for (const auto& engine : fleet.engines()) {
    constexpr std::array<std::string_view, 3> kBreaker = {"closed", "open", "half_open"};
    all_good = all_good && engine->is_up;
    engines += fmt::format(
        "{}\n  {{\"role\":\"{}\",\"url\":{},\"up\":{},\"breaker\":\"{}\",\"inflight\":{}}}",
        engines.empty() ? "" : ",", to_string(engine->role), json_quote(engine->url.text),
        engine->is_up, kBreaker[static_cast<std::size_t>(engine->breaker.state(now))],
        engine->inflight);
  }
  std::string rest =
      namespaces.is_watched ? ",\n\"namespaces\":" + namespaces.json() : std::string();
  if (namespaces.shows_direct()) rest += ",\n\"direct\":" + namespaces.direct.json();
  if (kv != nullptr) rest += ",\n\"kv_aware\":" + kv_health(*kv, now);
  page.text = fmt::format("{{\"status\":\"{}\",\"engines\":[{}\n]{}}}\n",
                          is_draining        ? "draining"
                          : !page.is_serving ? "down"
                          : all_good         ? "ok"
                                             : "degraded",
                          engines, rest);
  return page;
}

std::string merge_models(std::span<const std::string> answers) {
  std::vector<std::string> ids;
  std::string data;
  for (const std::string& answer : answers) {
    const auto members = read_members(answer);
    const JsonMember* const list = members ? find_member(*members, "data") : nullptr;
    if (list == nullptr || list->value.front() != '[') continue;
    const auto elements = read_elements(list->value);
    if (!elements) continue;
    for (const std::string_view model : *elements) {
      const auto fields = read_members(model);
      const JsonMember* const id = fields ? find_member(*fields, "id") : nullptr;
      if (id == nullptr) continue;
      std::string name = json_unescape(id->value);
      if (std::find(ids.begin(), ids.end(), name) != ids.end()) continue;
      ids.push_back(std::move(name));
      if (!data.empty()) data += ',';
      data += model;
    }
  }
  return "{\"object\":\"list\",\"data\":[" + data + "]}";
}

}  // namespace pegaflow::router
