#pragma once
/// \file
/// The check of POST requests that come over TCP.

#include <optional>
#include <string>
#include <string_view>

namespace pegaflow::server {

/// The headers of a POST that decide; no value where the request has no such header.
struct PostHeaders {
  std::optional<std::string_view> host{};
  std::optional<std::string_view> origin{};
  std::optional<std::string_view> authorization{};
};

struct PostRefusal {
  unsigned status = 403;
  std::string why;
};

/// Decides about POST requests over TCP. A request from this machine has no rights by that: every
/// local user, every web page in a browser and everything behind a port forward arrives from
/// loopback.
///
/// Immutable.
class HttpGuard {
 public:
  /// `token` empty: every POST is refused, and the text names `socket`. `machine` is this machine's
  /// host name.
  HttpGuard(std::string token, std::string socket, std::string machine)
      : token_(std::move(token)), socket_(std::move(socket)), machine_(std::move(machine)) {}

  /// The reason to refuse, or no value. 403 for a page of another origin, and for a Host that is
  /// neither an address nor `localhost` nor this machine's name, whatever the token: a foreign name
  /// that resolves to our address makes a browser send requests to us. 403 without a token file;
  /// 401 for a token that is missing or wrong.
  [[nodiscard]] std::optional<PostRefusal> refuse(const PostHeaders& headers) const;

 private:
  std::string token_;
  std::string socket_;
  std::string machine_;
};

}  // namespace pegaflow::server
