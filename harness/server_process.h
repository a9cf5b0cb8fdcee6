#pragma once
/// \file
/// A pegaflow-server of our own, for the time of one run.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "harness/child.h"

namespace pegaflow::harness {

/// A server on a socket in a temporary directory, with HTTP on a free port. Gone with this object.
/// Thread-bound, as Child is.
class ServerProcess {
 public:
  struct Options {
    std::string program;  ///< Empty: the pegaflow-server of the same build or installation.
    std::uint64_t pool_bytes = 0;
    std::vector<std::string> arguments;  ///< Further flags.
  };

  /// Starts it and waits until it is ready.
  /// Errors: the kernel's when it cannot be started, kInternal when it ended instead (with the end
  /// of its log), kTimeout after a minute.
  static Result<ServerProcess> start(const Options& options);

  [[nodiscard]] const std::string& socket_path() const noexcept { return socket_path_; }
  [[nodiscard]] const Child& process() const noexcept { return child_; }
  /// From before the process was made until it said that it is ready.
  [[nodiscard]] Duration start_time() const noexcept { return start_time_; }

  /// The body of an answer with status 200.
  /// Errors: kPeerLost when nobody answers, kInternal for another status.
  [[nodiscard]] Result<std::string> get(const std::string& path) const;
  [[nodiscard]] Result<std::string> post(const std::string& path) const;

  /// Samples of /metrics by their name with labels, as the page spells it.
  using Metrics = std::map<std::string, double, std::less<>>;
  [[nodiscard]] Result<Metrics> metrics() const;

  /// Ends it and waits until its memory is back. Errors: as Child::stop().
  Result<void> stop();

 private:
  ServerProcess(TemporaryDirectory directory, Child child)
      : directory_(std::move(directory)), child_(std::move(child)) {}

  TemporaryDirectory directory_;  // Goes after the child, which writes into it.
  Child child_;
  std::string socket_path_;
  std::string http_host_;
  std::string http_socket_;
  std::uint16_t http_port_ = 0;
  Duration start_time_{};
};

/// Reads a Prometheus page. Lines that are no samples are passed over.
ServerProcess::Metrics parse_metrics(std::string_view page);

/// Where the server of the same build or installation is: beside this program, or in ../server.
/// Errors: kIo that names the places.
Result<std::string> find_server();

}  // namespace pegaflow::harness
