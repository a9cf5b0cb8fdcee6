#pragma once
/// \file
/// One HTTP request to a server, as curl would send it.

#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::harness {

struct HttpResponse {
  int status = 0;
  std::string body;
};

/// Sends one request over a new connection to HOST:PORT (HOST is an IPv4 address), or to the Unix
/// socket at a path that begins with "/" or "./". `headers` may contain a Host.
/// Errors: kPeerLost without a complete response within 30 s; kInvalidArgument for an address of
/// another form; kInternal for a response without Content-Length, for example in chunks.
Result<HttpResponse> http_request(const std::string& address, std::string_view method,
                                  const std::string& path,
                                  const std::vector<std::string>& headers = {},
                                  const std::string& body = {});

}  // namespace pegaflow::harness
