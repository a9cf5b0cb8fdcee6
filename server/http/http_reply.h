#pragma once
/// \file
/// The responses of the HTTP pages, made from plain answers.

#include <string>

#include <nlohmann/json.hpp>

#include "server/http/admin_messages.h"
#include "server/http/http_counters.h"

namespace pegaflow::server {

/// The response to one request.
struct Reply {
  unsigned status = 200;
  std::string body{};
  const char* type = "application/json";
};

/// The phrase of an HTTP status.
const char* reason(unsigned status);
/// Invalid UTF-8 is replaced, since ids come from clients.
Reply json_reply(unsigned status, const nlohmann::json& body);
/// {"error": text}.
Reply error_reply(unsigned status, const std::string& text);
/// The page /health.
Reply health_reply(const Health& health);
/// The page that an answer of the RPC thread stands for. `http` goes into /metrics.
Reply reply_of(AdminAnswer&& answer, const HttpCounters& http);

}  // namespace pegaflow::server
