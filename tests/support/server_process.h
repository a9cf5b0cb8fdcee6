#pragma once
/// \file
/// harness::ServerProcess for tests: errors are exceptions with the server's log, and every wait
/// has the limit kHang.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "harness/child.h"
#include "harness/http_request.h"
#include "harness/server_process.h"
#include "tests/support/patience.h"

namespace pegaflow::testing {

/// A temporary directory that is removed with its object. Throws std::runtime_error without one.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  harness::TemporaryDirectory directory_;
  std::filesystem::path path_;
};

/// One pegaflow-server. Errors are thrown as std::runtime_error with its log.
class ServerProcess {
 public:
  struct Options {
    std::string pool_size = "64mb";
    std::vector<std::string> arguments{};       ///< As in harness::ServerProcess::Options.
    std::vector<std::string> command_prefix{};  ///< As in harness::ServerProcess::Options.
    bool wait_until_ready = true;
    std::string http_host = "127.0.0.1";
  };
  using Response = harness::HttpResponse;

  ServerProcess() : ServerProcess(Options()) {}
  explicit ServerProcess(Options options);
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  /// The server of this build, or $PEGA_TEST_SERVER: a server of another build, for example with
  /// sanitizers.
  static std::filesystem::path binary();

  enum class Wait : std::uint8_t { kUntilReady, kNo };
  /// Starts the server again on the same socket, after its end.
  void start(Wait wait = Wait::kUntilReady);
  void wait_until_ready(std::chrono::seconds limit = kHang);
  /// The HTTP address in the log, which comes before the server is ready.
  [[nodiscard]] std::string wait_for_http_address(std::chrono::seconds limit = kHang) const;

  /// Sends SIGKILL and waits for the end of the server.
  void kill();
  /// Sends SIGTERM, waits for the end of the server, and returns its exit status.
  int terminate(std::chrono::seconds limit = kHang);
  void signal(int number) const;
  /// The exit status once the server has ended, -N for signal N; no value after `limit`.
  std::optional<int> wait_for_exit(std::chrono::seconds limit = kHang);

  [[nodiscard]] std::filesystem::path directory() const { return server_.directory(); }
  [[nodiscard]] std::string socket() const { return server_.socket_path(); }
  /// The Unix socket of the HTTP pages, where POST needs no token.
  [[nodiscard]] std::string http_socket() const { return server_.directory() + "/pega.http"; }
  /// HOST:PORT, once the server is ready.
  [[nodiscard]] const std::string& http() const noexcept { return server_.http(); }
  [[nodiscard]] pid_t pid() const noexcept { return server_.process().pid(); }
  /// Output and errors of the server since its last start.
  [[nodiscard]] std::string log() const;

  [[nodiscard]] Response get(const std::string& path) const;
  /// Sends a POST over http_socket().
  [[nodiscard]] Response post(const std::string& path) const;

  /// A sample of /metrics by name and labels. Throws when there is none.
  [[nodiscard]] double metric(std::string_view sample) const;
  /// Reads the sample until it has the value; false after `limit`.
  [[nodiscard]] bool metric_becomes(std::string_view sample, double value,
                                    std::chrono::seconds limit = kHang) const;

 private:
  [[noreturn]] void fail(const std::string& what) const;
  void check(const Result<void>& result) const;

  harness::ServerProcess server_;
};

/// harness::http_request() that throws std::runtime_error.
ServerProcess::Response http_request(const std::string& address, std::string_view method,
                                     const std::string& path,
                                     const std::vector<std::string>& headers = {});

/// An IPv4 address of this machine other than loopback; empty if there is none.
std::string own_address();

/// The end of a program.
struct Ran {
  int exit_code = 0;   ///< -N for signal N.
  std::string output;  ///< Standard output and error.
};
/// Runs pegaflow-server with exactly these arguments until it ends. Throws after `limit`.
Ran run_server_binary(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment = {},
                      std::chrono::seconds limit = kHang);

}  // namespace pegaflow::testing
