#pragma once
/// \file
/// What lets pages of a browser call the router (CORS), as vLLM's server answers it.

#include <string>
#include <string_view>
#include <vector>

#include "router/http/http_message.h"

namespace pegaflow::router {

/// Whether the router answers for CORS at all: `--cors-origins none` leaves it to the engines.
bool answers_cors(const std::vector<std::string>& origins);

/// The lines that an answer to a request with `fields` gets; empty where it gets none: no Origin,
/// or one that is not allowed.
std::string cors_lines(const std::vector<std::string>& origins, const HttpFields& fields);

/// The same for an answer to what is not read as far as its Origin: only where every origin is
/// allowed can a page read it.
std::string cors_lines_without_head(const std::vector<std::string>& origins);

/// Whether it is the question of a browser that comes before the request proper.
bool is_preflight(std::string_view method, const HttpFields& fields);

struct PreflightAnswer {
  unsigned status = 200;  ///< 400 for an origin that is not allowed.
  std::string text;       ///< The whole answer.
};
PreflightAnswer preflight_answer(const std::vector<std::string>& origins, const HttpFields& fields,
                                 bool keep_alive);

/// Whether an engine's field is replaced by the router's.
bool is_cors_field(std::string_view name);

}  // namespace pegaflow::router
