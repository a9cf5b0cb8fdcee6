#pragma once
/// \file
/// The hints about blocks that the router gives an engine's connector (docs/router_api.md).

#include <string>
#include <string_view>

namespace pegaflow::router {

/// `body`, a JSON object without kv_transfer_params, with `hint` (JSON: "compute" or nodes) for the
/// engine's connector.
std::string with_hint(std::string_view body, std::string_view hint);

}  // namespace pegaflow::router
