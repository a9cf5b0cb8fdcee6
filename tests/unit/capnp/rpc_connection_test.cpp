#include "capnp/wire/rpc_connection.h"

#include <optional>
#include <string>
#include <utility>

#include <capnp/rpc-twoparty.h>
#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "capnp/cache.capnp.h"

namespace pegaflow {
namespace {

struct Gate final : wire::Gate::Server {
  kj::Promise<void> hello(HelloContext call) override {
    call.getResults().setVersion(7);
    return kj::READY_NOW;
  }
};

/// A connection, and the stream at its other end.
struct Fixture {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::TwoWayPipe pipe = io.provider->newTwoWayPipe();
  std::optional<RpcConnection> connection{std::in_place, kj::mv(pipe.ends[0])};

  bool is_over(kj::Promise<void>& over) { return over.poll(io.waitScope); }
};

std::uint16_t version_of(RpcConnection& connection, kj::WaitScope& scope) {
  return connection.bootstrap<wire::Gate>().helloRequest().send().wait(scope).getVersion();
}

TEST_SUITE("rpc connection") {
  TEST_CASE("the peer's interface is called over a stream") {
    Fixture f;
    capnp::TwoPartyClient server(*f.pipe.ends[1], kj::heap<Gate>(),
                                 capnp::rpc::twoparty::Side::SERVER);
    CHECK(version_of(*f.connection, f.io.waitScope) == 7);
  }

  TEST_CASE("the peer's interface is called over a Unix socket") {
    auto io = kj::setupAsyncIo();
    auto pipe = io.provider->newCapabilityPipe();
    capnp::TwoPartyClient server(*pipe.ends[1], kj::heap<Gate>(),
                                 capnp::rpc::twoparty::Side::SERVER);
    RpcConnection connection(kj::mv(pipe.ends[0]), 1);
    CHECK(version_of(connection, io.waitScope) == 7);
  }

  TEST_CASE("it is over once the peer has closed its end") {
    Fixture f;
    auto gate = f.connection->bootstrap<wire::Gate>();
    auto over = f.connection->on_over();
    CHECK(!f.is_over(over));
    f.pipe.ends[1] = nullptr;
    over.wait(f.io.waitScope);
  }

  TEST_CASE("it is over once it is dropped, also twice, for all that wait") {
    Fixture f;
    auto over = f.connection->on_over();
    auto other = f.connection->on_over();
    f.connection->drop();
    f.connection->drop();
    CHECK(f.is_over(over));
    CHECK(f.is_over(other));
  }

  TEST_CASE("requests that the peer does not read are queued bytes") {
    Fixture f;
    auto gate = f.connection->bootstrap<wire::Gate>();
    auto request = gate.helloRequest();
    request.setBuild(std::string(4'000'000, 'x').c_str());
    auto sent = request.send();
    auto over = f.connection->on_over();
    CHECK(!f.is_over(over));
    CHECK(f.connection->queued_bytes() > 10'000);
  }
}

}  // namespace
}  // namespace pegaflow
