#pragma once
/// \file
/// Which paths exist, and what is done with each. What is not here is denied.

#include <string>
#include <string_view>
#include <vector>

namespace pegaflow::router {

enum class RouteKind : unsigned char {
  kDenied,       ///< 404: above all the development endpoints of engines.
  kWrongMethod,  ///< 405.
  kOptions,      ///< The methods of a path; a browser's preflight is answered before.
  kHealth,       ///< The router's own.
  kMetrics,
  kVersion,
  kModels,     ///< Merged from all engines.
  kSplit,      ///< Prefill and decode.
  kOne,        ///< One engine answers.
  kResponses,  ///< One engine, and the same one for what follows.
};

/// What a route's body is.
enum class BodyKind : unsigned char {
  kJson,
  kForm,     ///< multipart/form-data.
  kUnknown,  ///< Of --pass, and of paths that mostly have none.
};

struct Route {
  RouteKind kind = RouteKind::kDenied;
  std::string_view name = "denied";  ///< For metrics and log; never what a client wrote.
  bool is_anthropic = false;         ///< Errors have Anthropic's form.
  bool needs_key = true;
  BodyKind body = BodyKind::kJson;
  std::string_view methods = {};  ///< With kWrongMethod and kOptions: what the path is served with.
};

/// HEAD is served where the router answers GET itself. `target` may have a query. `passed` are
/// further paths that one engine may answer.
Route find_route(std::string_view method, std::string_view target,
                 const std::vector<std::string>& passed);

/// The ID in /v1/responses/ID and /v1/responses/ID/cancel; empty for other paths.
std::string_view response_id_of(std::string_view target);

}  // namespace pegaflow::router
