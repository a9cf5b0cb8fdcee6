#include "server/http/http_guard.h"

#include <algorithm>
#include <cctype>

#include <arpa/inet.h>

#include <fmt/core.h>

namespace pegaflow::server {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return result;
}

/// The host of HOST[:PORT] or [HOST]:PORT, without brackets.
std::string host_of(std::string_view authority) {
  if (authority.starts_with('[')) return lower(authority.substr(1, authority.find(']') - 1));
  return lower(authority.substr(0, authority.find(':')));
}

bool is_address(const std::string& host) {
  in6_addr ignored{};
  return ::inet_pton(AF_INET, host.c_str(), &ignored) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

/// Takes as long for a wrong token as for the right one.
bool is_same(std::string_view given, std::string_view wanted) {
  if (given.size() != wanted.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(wanted[i]);
  }
  return difference == 0;
}

}  // namespace

std::optional<PostRefusal> HttpGuard::refuse(const PostHeaders& headers) const {
  if (headers.host) {
    const std::string host = host_of(*headers.host);
    const std::string machine = lower(machine_);
    const bool is_ours =
        host == "localhost" || is_address(host) ||
        (!machine.empty() && (host == machine || host == machine.substr(0, machine.find('.'))));
    if (!is_ours) {
      return PostRefusal{403,
                         "POST refused: Host is neither an address nor a name of this machine"};
    }
  }
  if (headers.origin &&
      (!headers.host || lower(*headers.origin) != "http://" + lower(*headers.host))) {
    return PostRefusal{403, "POST refused: it comes from a page of another origin"};
  }
  if (token_.empty()) {
    return PostRefusal{403, fmt::format("POST over TCP needs a server with --http-token-file; the "
                                        "Unix socket {} needs no token",
                                        socket_)};
  }
  if (!headers.authorization || !is_same(*headers.authorization, "Bearer " + token_)) {
    return PostRefusal{401, "the token is missing or wrong"};
  }
  return std::nullopt;
}

}  // namespace pegaflow::server
