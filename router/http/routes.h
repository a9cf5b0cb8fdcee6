#pragma once
/// \file
/// The paths that the router serves, and the handling of each. All other paths are denied.

#include <string>
#include <string_view>
#include <vector>

namespace pegaflow::router {

enum class RouteKind : unsigned char {
  kDenied,       ///< 404: above all the development endpoints of engines.
  kWrongMethod,  ///< 405.
  kOptions,      ///< The methods of a path; browsers' preflights are handled earlier.
  kHealth,       ///< The router's own page.
  kMetrics,
  kVersion,
  kRoutes,     ///< The last decisions of the policy kv-aware.
  kSnapshot,   ///< Texts for a router that starts.
  kScore,      ///< The blocks that engines have of a prompt.
  kLesson,     ///< The blocks that a text becomes.
  kDump,       ///< The index, in parts.
  kAnnounced,  ///< A request that will come: its blocks are fetched.
  kModels,     ///< Merged from all engines.
  kSplit,      ///< Prefill and decode.
  kOne,        ///< One engine responds.
  kResponses,  ///< One engine, which also receives the requests that name the response.
};

/// The format of a route's body.
enum class BodyKind : unsigned char {
  kJson,
  kForm,     ///< multipart/form-data.
  kUnknown,  ///< Paths of --pass, and paths whose requests usually have no body.
};

struct Route {
  RouteKind kind = RouteKind::kDenied;
  std::string_view name = "denied";  ///< For metrics and log; never text of a client.
  bool is_anthropic = false;         ///< Errors have Anthropic's format.
  bool needs_key = true;
  BodyKind body = BodyKind::kJson;
  std::string_view methods = {};    ///< With kWrongMethod and kOptions: the path's methods.
  std::string_view announced = {};  ///< With kAnnounced: the name of the route that it announces.
};

/// The route of a request. HEAD is supported where the router itself responds to GET. `target` may
/// have a query. `passed` lists further paths that one engine may serve.
Route find_route(std::string_view method, std::string_view target,
                 const std::vector<std::string>& passed);

/// The route of a request to pegaflow-index.
Route find_index_route(std::string_view method, std::string_view target);

/// The ID in /v1/responses/ID and /v1/responses/ID/cancel; empty for other paths.
std::string_view response_id_of(std::string_view target);

}  // namespace pegaflow::router
