#pragma once
/// \file
/// An engine with one rank, over the wire.

#include <cstdint>
#include <utility>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {

inline constexpr std::uint64_t kPage = 4096;

/// A server, and one engine with two connections.
struct WireEngine {
  explicit WireEngine(ServerProcess::Options options = {})
      : server(std::move(options)),
        io(kj::setupAsyncIo()),
        worker(io, server.socket()),
        scheduler(io, server.socket()) {
    REQUIRE(worker.hello().version == kWireMaximum);
    auto mapped = worker.register_rank("engine", kPage);
    REQUIRE(mapped);
    pool = std::move(*mapped);
    const auto greeting = scheduler.hello();
    REQUIRE(greeting.version == kWireMaximum);
    incarnation = greeting.server;
    REQUIRE(scheduler.attach("engine"));
  }
  JobId job() { return {.scheduler = scheduler.process(), .number = ++jobs}; }

  ServerProcess server;
  kj::AsyncIoContext io;
  WireClient worker;
  WireClient scheduler;
  MappedPool pool;
  Id128 incarnation;  ///< The server's.
  std::uint64_t jobs = 0;
};

}  // namespace pegaflow::testing
