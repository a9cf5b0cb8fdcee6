#pragma once
/// \file
/// A real pegaflow-server for tests, on a socket and an HTTP port of its own.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "base/os/unique_fd.h"
#include "tests/support/patience.h"

namespace pegaflow::testing {

/// A directory under /tmp that goes with its object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// Runs one pegaflow-server and leaves nothing behind. Whatever goes wrong is thrown as
/// std::runtime_error with the server's log, so that a test shows it.
class ServerProcess {
 public:
  struct Options {
    std::string pool_size = "64mb";
    std::vector<std::string>
        arguments{};  ///< Beside --addr, --http-addr, --ready-file, --pool-size.
    std::vector<std::string> command_prefix{};  ///< For example {"unshare", "--pid", "--fork"}.
    bool wait_until_ready = true;
    std::string http_host = "127.0.0.1";
  };

  ServerProcess() : ServerProcess(Options()) {}
  explicit ServerProcess(Options options);
  /// Kills it if it still runs.
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  /// The path of the binary of this build, or $PEGA_TEST_SERVER: to run tests against a server of
  /// another build, for example one with sanitizers, without building the tests so.
  static std::filesystem::path binary();

  /// Starts it again, on the same socket, after kill(), terminate() or an end of its own.
  enum class Wait : std::uint8_t { kUntilReady, kNo };
  void start(Wait wait = Wait::kUntilReady);
  /// Waits for the ready file; throws when the server ends before.
  void wait_until_ready(std::chrono::seconds limit = kHang);

  /// The HTTP address as soon as its log has it: before it is ready.
  [[nodiscard]] std::string wait_for_http_address(std::chrono::seconds limit = kHang) const;

  /// SIGKILL, and waits for its end.
  void kill();
  /// SIGTERM, and waits for its end; the exit code.
  int terminate(std::chrono::seconds limit = kHang);
  void signal(int number) const;
  /// The exit code once it has ended by itself, -N for signal N; no value at the limit.
  std::optional<int> wait_for_exit(std::chrono::seconds limit = kHang);

  [[nodiscard]] const std::filesystem::path& directory() const noexcept {
    return directory_.path();
  }
  [[nodiscard]] std::string socket() const { return (directory() / "pega.sock").string(); }
  /// The Unix socket of the HTTP pages, where POST needs no token.
  [[nodiscard]] std::string http_socket() const { return (directory() / "pega.http").string(); }
  /// HOST:PORT. Known once it is ready.
  [[nodiscard]] const std::string& http() const noexcept { return http_; }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// Everything that it wrote to standard output and error since the last start.
  [[nodiscard]] std::string log() const;

  struct Response {
    int status = 0;
    std::string body;
  };
  [[nodiscard]] Response get(const std::string& path) const;
  /// Over http_socket().
  [[nodiscard]] Response post(const std::string& path) const;

  /// A sample of /metrics by its whole name, labels included:
  /// `pegaflow_load_blocks_total{written_by="this_process"}`. Throws when there is none.
  [[nodiscard]] double metric(std::string_view sample) const;
  /// Asks again and again until the sample has the value; false at the limit.
  [[nodiscard]] bool metric_becomes(std::string_view sample, double value,
                                    std::chrono::seconds limit = kHang) const;

 private:
  [[noreturn]] void fail(const std::string& what) const;

  Options options_;
  TemporaryDirectory directory_;
  std::string http_;
  pid_t pid_ = -1;
  UniqueFd pidfd_;
};

/// One HTTP request to HOST:PORT, or to the Unix socket at an absolute path; `headers` may have a
/// Host of their own; throws std::runtime_error when nobody answers.
ServerProcess::Response http_request(const std::string& address, std::string_view method,
                                     const std::string& path,
                                     const std::vector<std::string>& headers = {});

/// An IPv4 address of this machine beyond loopback; empty when it has none.
std::string own_address();

/// What a program that ends by itself said.
struct Ran {
  int exit_code = 0;   ///< -N for signal N.
  std::string output;  ///< Standard output and error.
};
/// Runs pegaflow-server with exactly these arguments until it ends; throws at the limit.
Ran run_server_binary(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment = {},
                      std::chrono::seconds limit = kHang);

}  // namespace pegaflow::testing
