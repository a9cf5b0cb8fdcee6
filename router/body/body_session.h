#pragma once
/// \file
/// The session id in a body, for engines that do not read the one in the head.

#include <string>
#include <string_view>

namespace pegaflow::router {

/// `body`, a JSON object, with `"session_id"`. A body that has that member, or SGLang's
/// `session_params`, which excludes it, stays unchanged.
std::string with_session(std::string_view body, std::string_view session);

}  // namespace pegaflow::router
