#pragma once
/// \file
/// A pegaflow-server that runs as long as its object.

#include <map>
#include <optional>
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
    std::string program{};  ///< Empty: the pegaflow-server of the same build or installation.
    std::string pool_size = "64mb";
    std::vector<std::string> arguments{};       ///< More options.
    std::vector<std::string> command_prefix{};  ///< For example {"unshare", "--pid", "--fork"}.
    std::string http_host = "127.0.0.1";
  };
  static constexpr Duration kPatience = std::chrono::seconds(60);

  /// Starts the server and waits until it is ready. Errors: as launch() and wait_until_ready().
  static Result<ServerProcess> start(Options options);
  /// Starts the server. Errors: the kernel's when it cannot be started.
  static Result<ServerProcess> launch(Options options);

  /// Starts the server again on the same socket, after its end. Errors: as launch().
  Result<void> relaunch();
  /// Waits for the ready file.
  /// Errors: kInternal when the server ends first, with the last lines of its log; kTimeout.
  Result<void> wait_until_ready(Duration limit = kPatience);
  /// Waits for the HTTP address in the log, which comes before the server is ready.
  /// Errors: as wait_until_ready().
  [[nodiscard]] Result<std::string> wait_for_http_address(Duration limit = kPatience) const;

  /// Ends the server and waits until its memory is free. Errors: as Child::stop().
  Result<void> stop();

  [[nodiscard]] const std::string& directory() const noexcept { return directory_.path(); }
  [[nodiscard]] std::string socket_path() const { return directory() + "/pega.sock"; }
  /// HOST:PORT of the HTTP pages, once the server is ready.
  [[nodiscard]] const std::string& http() const noexcept { return http_; }
  [[nodiscard]] Child& process() noexcept { return *child_; }
  [[nodiscard]] const Child& process() const noexcept { return *child_; }
  /// Output and errors of the server since its last start. Errors: the kernel's.
  [[nodiscard]] Result<std::string> log() const { return read_file(log_file()); }
  /// From before the fork until the server reported that it is ready.
  [[nodiscard]] Duration start_time() const noexcept { return start_time_; }

  /// The body of a response with status 200.
  /// Errors: as http_request(); kInternal for another status.
  [[nodiscard]] Result<std::string> get(const std::string& path) const;
  [[nodiscard]] Result<std::string> post(const std::string& path) const;

  /// Samples of /metrics by name and labels, spelled as on the page.
  using Metrics = std::map<std::string, double, std::less<>>;
  [[nodiscard]] Result<Metrics> metrics() const;

 private:
  ServerProcess(Options options, TemporaryDirectory directory)
      : options_(std::move(options)), directory_(std::move(directory)) {}
  [[nodiscard]] std::string log_file() const { return directory() + "/log"; }
  [[nodiscard]] std::string ready_file() const { return directory() + "/ready.json"; }
  [[nodiscard]] std::string log_tail() const;
  Result<void> read_ready_file();
  template <typename IsThere>
  [[nodiscard]] Result<void> wait_for(const std::string& watched, std::uint32_t events,
                                      Duration limit, std::string_view what,
                                      const IsThere& is_there) const;

  Options options_;
  TemporaryDirectory directory_;  // Outlives the child, which writes into it.
  std::optional<Child> child_;
  std::string http_;
  std::string http_socket_;
  TimePoint launched_{};
  Duration start_time_{};
};

/// Parses a Prometheus page. Skips lines that are not samples.
ServerProcess::Metrics parse_metrics(std::string_view page);

/// The path of the server of the same build or installation: beside this program, or in ../server.
/// Errors: kIo, which names both places.
Result<std::string> find_server();

}  // namespace pegaflow::harness
