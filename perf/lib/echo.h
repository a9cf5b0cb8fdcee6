#pragma once
/// \file
/// The echo server: the bound of a lookup.

#include <memory>
#include <span>
#include <string>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <kj/io.h>

#include "base/error.h"
#include "harness/child.h"
#include "perf/lib/echo.capnp.h"

namespace pegaflow::perf {

/// Serves echoes to one connection of `listener`, a listening Unix socket, until it closes: the
/// body of the child process of EchoProcess. Errors: kIo.
Result<void> serve_echo(int listener);

/// A child process with the echo server. Thread-bound, as Child is.
class EchoProcess {
 public:
  /// Errors: the kernel's.
  static Result<EchoProcess> start();

  [[nodiscard]] const std::string& socket_path() const noexcept { return socket_path_; }
  [[nodiscard]] const harness::Child& process() const noexcept { return child_; }

 private:
  EchoProcess(harness::TemporaryDirectory directory, harness::Child child, std::string socket_path)
      : directory_(std::move(directory)),
        child_(std::move(child)),
        socket_path_(std::move(socket_path)) {}
  harness::TemporaryDirectory directory_;
  harness::Child child_;
  std::string socket_path_;
};

/// One connection to an EchoProcess. Thread-bound to the thread of `io`, which outlives it.
class EchoClient {
 public:
  /// Errors: kPeerLost.
  static Result<std::unique_ptr<EchoClient>> connect(kj::AsyncIoContext& io,
                                                     const std::string& socket_path);

  /// Exchanges messages as a lookup does: all bytes there, eight back. Returns the number of bytes
  /// received by the echo.
  std::size_t count(std::span<const std::byte> bytes);
  /// Sends all bytes there and back. Returns the number of bytes that came back.
  std::size_t back(std::span<const std::byte> bytes);

 private:
  EchoClient(kj::AsyncIoContext& io, UniqueFd socket);
  kj::AsyncIoContext& io_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyClient rpc_;
  pegaflow::echo::Echo::Client echo_;
};

}  // namespace pegaflow::perf
