#pragma once
/// \file
/// Cuts out of clients' bodies what only a router may send to an engine.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "router/http/json_text.h"

namespace pegaflow::router {

/// How far below the top of a body members are looked for.
enum class SteeringDepth : unsigned char {
  kKnownPath,  ///< Where vLLM reads them: at the top, and in `vllm_xargs`.
  kAnywhere,   ///< For paths of --pass, of which the router does not know what they read.
};

/// Members that steer engines or PegaFlow and that only a router sends: kv_transfer_params,
/// ec_transfer_params, kv_hints, kv_cache_report_mode, and a session_id with the prefix of ours
/// ("pf1:"). They would make an engine read from, or write to, where a client says.
///
/// Returns `body` without them, all else as it was written, repeated and escaped keys included;
/// nothing when there are none.
/// Errors: kInvalidArgument for a body that is no JSON, as read_members() says it.
Result<std::optional<std::string>> without_steering(std::string_view body, SteeringDepth depth);

/// Whether a body of a known path with these members may have any: a quick look.
bool may_steer(const std::vector<JsonMember>& members);

/// Whether a session id is one of ours, which no client may use.
bool is_own_session(std::string_view id);

}  // namespace pegaflow::router
