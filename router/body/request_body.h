#pragma once
/// \file
/// Reads the body of a request before an engine gets it, and removes what only a router may send.

#include <string>
#include <vector>

#include "base/error.h"
#include "router/body/cache_salt.h"
#include "router/http/json_text.h"
#include "router/http/routes.h"

namespace pegaflow::router {

/// What the router reads of a body.
struct BodyReading {
  std::vector<JsonMember> members{};  ///< Views into the body; none of a body that is not read.
  std::string model{};                ///< Empty: the body names none.
  bool lost_steering = false;         ///< Steering members were cut out of the body.
};

/// Reads `body` as its route and its `content_type` (nullptr: none given) require, and cuts the
/// members out that only a router may send (steering.h). Of a form the model is read. A body that
/// is not read stays as it is. With a `tenant`, JSON gets its cache_salt (cache_salt.h).
/// Errors: kInvalidArgument for a body that has to be JSON and is not, and for a cache_salt that
/// vLLM would not accept either; the client gets the detail.
Result<BodyReading> read_request_body(std::string& body, BodyKind kind,
                                      const std::string* content_type,
                                      const Tenant* tenant = nullptr);

/// Whether a Content-Type is application/json.
bool is_json_type(const std::string& type);

}  // namespace pegaflow::router
