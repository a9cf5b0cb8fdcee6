#include "harness/wire_client.h"

#include <sys/socket.h>

#include <doctest/doctest.h>

namespace pegaflow::harness {
namespace {

/// A socket whose other end is closed.
UniqueFd lost_socket() {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd other(ends[1]);
  return UniqueFd(ends[0]);
}

TEST_SUITE("wire client") {
  TEST_CASE("a call without a response returns peer_lost or throws, as the client was made") {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    using OnLoss = WireClient::OnLoss;

    WireClient returning(io, lost_socket(), OnLoss::kReturn);
    CHECK(returning.hello({}).error().code == Errc::kPeerLost);
    CHECK(returning.goodbye().error().code == Errc::kPeerLost);

    WireClient throwing(io, lost_socket(), OnLoss::kThrow);
    CHECK_THROWS_AS((void)throwing.hello({}), kj::Exception);
    CHECK_THROWS_AS((void)throwing.goodbye(), kj::Exception);
  }

  TEST_CASE("a socket that does not exist is named") {
    const auto socket = connect_unix("/nonexistent/server.sock");
    REQUIRE_FALSE(socket);
    CHECK(to_string(socket.error()) ==
          "peer_lost: connect to /nonexistent/server.sock: No such file or directory");
  }
}

}  // namespace
}  // namespace pegaflow::harness
