#pragma once
/// \file
/// Reads the body of a request before it goes to an engine, and removes the members that only a
/// router may send.

#include <string>
#include <vector>

#include "base/error.h"
#include "router/body/cache_salt.h"
#include "router/http/json_text.h"
#include "router/http/routes.h"

namespace pegaflow::router {

/// The parts of a body that the router uses.
struct BodyReading {
  std::vector<JsonMember> members{};  ///< Views into the body; empty for a body that is not read.
  std::string model{};                ///< Empty: the body names no model.
  bool lost_steering = false;         ///< Steering members were removed from the body.
};

/// Reads `body` as its route and its `content_type` (nullptr: none given) require, and removes the
/// members that only a router may send (steering.h). From a form it reads the model. A body that is
/// not read stays unchanged. With a `tenant`, JSON receives the tenant's cache_salt (cache_salt.h).
/// Errors: kInvalidArgument for a body that must be JSON and is not, and for a cache_salt that vLLM
/// would reject, too; the client receives the detail.
Result<BodyReading> read_request_body(std::string& body, BodyKind kind,
                                      const std::string* content_type,
                                      const Tenant* tenant = nullptr);

/// Whether a Content-Type is application/json.
bool is_json_type(const std::string& type);

}  // namespace pegaflow::router
