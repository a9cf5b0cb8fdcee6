#pragma once
/// \file
/// A pegaflow-server that runs as long as its object.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "harness/child.h"

namespace pegaflow::harness {

/// A server on a socket in a temporary directory, with HTTP on a free port. The destructor ends it.
/// Thread-bound, as Child is.
class ServerProcess {
 public:
  struct Options {
    std::string program;  ///< Empty: the pegaflow-server of the same build or installation.
    std::uint64_t pool_bytes = 0;
    std::vector<std::string> arguments;  ///< More options.
  };

  /// Starts the server and waits until it is ready.
  /// Errors: the kernel's when it cannot be started; kInternal when it ends first, with the last
  /// lines of its log; kTimeout after a minute.
  static Result<ServerProcess> start(const Options& options);

  [[nodiscard]] const std::string& socket_path() const noexcept { return socket_path_; }
  [[nodiscard]] const Child& process() const noexcept { return child_; }
  /// From before the fork until the server reported that it is ready.
  [[nodiscard]] Duration start_time() const noexcept { return start_time_; }

  /// The body of a response with status 200.
  /// Errors: kPeerLost without a response; kInternal for another status.
  [[nodiscard]] Result<std::string> get(const std::string& path) const;
  [[nodiscard]] Result<std::string> post(const std::string& path) const;

  /// Samples of /metrics by name and labels, spelled as on the page.
  using Metrics = std::map<std::string, double, std::less<>>;
  [[nodiscard]] Result<Metrics> metrics() const;

  /// Ends the server and waits until its memory is free. Errors: as Child::stop().
  Result<void> stop();

 private:
  ServerProcess(TemporaryDirectory directory, Child child)
      : directory_(std::move(directory)), child_(std::move(child)) {}

  TemporaryDirectory directory_;  // Outlives the child, which writes into it.
  Child child_;
  std::string socket_path_;
  std::string http_host_;
  std::string http_socket_;
  std::uint16_t http_port_ = 0;
  Duration start_time_{};
};

/// Parses a Prometheus page. Skips lines that are not samples.
ServerProcess::Metrics parse_metrics(std::string_view page);

/// The path of the server of the same build or installation: beside this program, or in ../server.
/// Errors: kIo, which names both places.
Result<std::string> find_server();

}  // namespace pegaflow::harness
