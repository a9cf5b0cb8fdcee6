#pragma once
/// \file
/// A Redis or Valkey server that runs as long as its object.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "directory/redis/reply.h"
#include "harness/child.h"

namespace pegaflow::harness {

/// A server in a temporary directory, without persistence. The destructor ends it. Thread-bound, as
/// Child is.
///
/// The program is `redis-server` or `valkey-server` in $PATH. Debian's redis-tools has it, too,
/// under the name redis-check-rdb, and installs no service.
class RedisProcess {
 public:
  struct Options {
    std::string address;  ///< IP:PORT.
    std::vector<std::string> arguments{};
    std::vector<std::string> command_prefix{};  ///< Such as nsenter and its arguments.
    bool is_tls = false;  ///< The address is one for TLS; call() needs one without.
  };
  /// Starts the server and waits until it answers. Errors: kRefused without the program;
  /// kInternal when it ends first, with its log; kTimeout.
  static Result<RedisProcess> start(Options options);

  /// Starts it again, empty, after its end. Errors: as start().
  Result<void> restart();
  [[nodiscard]] Child& process() noexcept { return *child_; }
  [[nodiscard]] const std::string& address() const noexcept { return options_.address; }
  [[nodiscard]] std::string url() const { return "redis://" + options_.address; }
  [[nodiscard]] const std::string& directory() const noexcept { return directory_.path(); }
  /// Sends one command on a connection of its own. Errors: the kernel's; kTimeout after 10 s.
  [[nodiscard]] Result<pegaflow::directory::Reply> call(
      std::initializer_list<std::string_view> arguments) const;

 private:
  RedisProcess(Options options, TemporaryDirectory directory)
      : options_(std::move(options)), directory_(std::move(directory)) {}
  Result<void> launch();

  Options options_;
  TemporaryDirectory directory_;
  std::optional<Child> child_;
};

}  // namespace pegaflow::harness
