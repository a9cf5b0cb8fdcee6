#pragma once
/// \file
/// The requests of routers as HTTP has them, and the encoding of their answers: docs/router_api.md.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "server/http/router_messages.h"

namespace pegaflow::server {

/// Whether the path, without its query, is one of routers.
bool is_router_path(std::string_view path);

/// The limit of the body of a POST.
inline constexpr std::size_t kMostRouterBody = std::size_t{1} << 20;
/// The keys of one prefetch.
inline constexpr std::size_t kMostPrefetchKeys = 8192;

/// Decodes a request whose path is one of routers. `method` is "GET", "POST" or "DELETE".
/// Errors: kRefused for another method than the path has, kInvalidArgument for the rest; the text
/// names the value.
Result<RouterQuery> read_router_query(std::string_view method, std::string_view target,
                                      std::string_view body);

/// The binary body of /journal and /blocks.
std::string blocks_body(const BlocksAnswer& answer);
/// The JSON of /links.
std::string links_body(const LinksAnswer& answer);

}  // namespace pegaflow::server
