#pragma once
/// \file
/// CORS, which lets web pages call the router, with the responses of vLLM's server.

#include <string>
#include <string_view>
#include <vector>

#include "router/http/http_message.h"

namespace pegaflow::router {

/// Whether the router handles CORS at all: `--cors-origins none` leaves it to the engines.
bool answers_cors(const std::vector<std::string>& origins);

/// The CORS lines of a response to a request with `fields`; empty when there is no Origin, or one
/// that is not allowed.
std::string cors_lines(const std::vector<std::string>& origins, const HttpFields& fields);

/// The CORS lines of a response that is sent before the request's Origin was read. A page can read
/// such a response only if every origin is allowed.
std::string cors_lines_without_head(const std::vector<std::string>& origins);

/// Whether a request is a browser's preflight, which precedes the actual request.
bool is_preflight(std::string_view method, const HttpFields& fields);

struct PreflightResponse {
  unsigned status = 200;  ///< 400 for an origin that is not allowed.
  std::string text;       ///< The whole response.
};
PreflightResponse preflight_response(const std::vector<std::string>& origins,
                                     const HttpFields& fields, bool keep_alive);

/// Whether the router replaces this field of an engine's response.
bool is_cors_field(std::string_view name);

}  // namespace pegaflow::router
