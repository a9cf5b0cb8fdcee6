// Conformance of the socket lane, over IPv4 and IPv6, with large windows and small ones.
#include "tests/unit/transport/fabric_conformance.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::testing {
namespace {

std::unique_ptr<Fabric> make_tcp(const TcpFabric::Options& options, Fabric::CompletionSink sink) {
  static const SteadyClock clock;
  auto made = TcpFabric::create(options, clock, std::move(sink));
  REQUIRE_MESSAGE(made, to_string(made.error()));
  return std::move(*made);
}

/// IPv6 where this machine has it: containers often do not.
std::string loopback() {
  const auto address = tcp::SocketAddress::parse("[::1]:0").value();
  return tcp::listen_at(address) ? "[::1]:0" : "127.0.0.1:0";
}

struct TcpBackend {
  static std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
    return make_tcp({}, std::move(sink));
  }
};

/// Small pieces, and one connection with a window that is hardly larger than a piece.
struct NarrowTcpBackend {
  static std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
    return make_tcp(
        {.listen = loopback(), .connections = 1, .piece_bytes = 5000, .window_bytes = 12000},
        std::move(sink));
  }
};

TEST_CASE_TEMPLATE_INVOKE(fabric_conformance, TcpBackend, NarrowTcpBackend);

}  // namespace
}  // namespace pegaflow::testing
