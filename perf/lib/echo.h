#pragma once
/// \file
/// The echo that a lookup is held against.

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

/// Serves echoes to connections of `listener`, a listening Unix socket, until it is killed. The
/// body of the child process that EchoProcess starts. Returns only with an error: kIo.
Result<void> serve_echo(int listener);

/// A child process that echoes. Thread-bound, as Child is.
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

/// One connection to an EchoProcess. Thread-bound: to the thread of `io`, which outlives it.
class EchoClient {
 public:
  /// Errors: kPeerLost.
  static Result<std::unique_ptr<EchoClient>> connect(kj::AsyncIoContext& io,
                                                     const std::string& socket_path);

  /// The same messages as a lookup: all the bytes there, eight back. Returns how many bytes came.
  std::size_t count(std::span<const std::byte> bytes);
  /// All the bytes there and back. Returns how many came back.
  std::size_t back(std::span<const std::byte> bytes);

 private:
  EchoClient(kj::AsyncIoContext& io, UniqueFd socket);
  kj::AsyncIoContext& io_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyClient rpc_;
  pegaflow::echo::Echo::Client echo_;
};

}  // namespace pegaflow::perf
