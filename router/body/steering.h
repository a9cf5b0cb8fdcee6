#pragma once
/// \file
/// Removes from clients' bodies the members that only a router may send to an engine.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "router/http/json_text.h"

namespace pegaflow::router {

/// The depth to which a body is searched.
enum class SteeringDepth : unsigned char {
  kKnownPath,  ///< The places that vLLM reads: the top level, and `vllm_xargs`.
  kAnywhere,   ///< All levels, for paths of --pass, whose format the router does not know.
};

/// Removes the members that steer engines or PegaFlow and that only a router sends:
/// kv_transfer_params, ec_transfer_params, kv_hints, kv_cache_report_mode, and a session_id with
/// PegaFlow's prefix ("pf1:"). With them a client could choose the address that an engine reads
/// from or writes to.
///
/// Returns `body` without them, repeated and escaped keys included, and otherwise unchanged;
/// nullopt when it has none.
/// Errors: kInvalidArgument for a body that is not JSON, as from read_members().
Result<std::optional<std::string>> without_steering(std::string_view body, SteeringDepth depth);

/// Whether a body of a known path with these members may have steering members: a quick check.
bool may_steer(const std::vector<JsonMember>& members);

/// Whether a session id has PegaFlow's prefix, which no client may use.
bool is_own_session(std::string_view id);

}  // namespace pegaflow::router
