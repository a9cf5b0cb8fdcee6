#pragma once
/// \file
/// The address of a Redis or Valkey server, as an option names it.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow::directory {

/// A server, and how to log in there. A value.
struct RedisUrl {
  std::string host;
  std::uint16_t port = 6379;
  unsigned database = 0;
  bool is_tls = false;
  std::string user;      ///< Empty: the default user.
  std::string password;  ///< Empty: none is sent.

  /// `redis[s]://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`; `%41` and the like are decoded in user
  /// and password, and an IPv6 address is in brackets. Errors: kInvalidArgument, without the
  /// password in its detail.
  static Result<RedisUrl> parse(std::string_view text);
  /// For logs and metrics: `redis://HOST:PORT/DATABASE`, without user and password.
  [[nodiscard]] std::string name() const;
};

/// The user and the password in a file: two lines, or the password alone. Errors: kRefused when the
/// file cannot be read or every user may read it; kInvalidArgument for other contents.
struct RedisLogin {
  std::string user;
  std::string password;
  static Result<RedisLogin> read(const std::string& path);
};

}  // namespace pegaflow::directory
