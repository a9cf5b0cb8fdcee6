#include "capnp/wire/rpc_error.h"

#include <string>

#include <capnp/rpc-twoparty.h>
#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "capnp/peer.capnp.h"

namespace pegaflow {
namespace {

kj::Exception thrown(kj::Exception::Type type, const std::string& what) {
  return {type, __FILE__, __LINE__, kj::heapString(what.data(), what.size())};
}

TEST_SUITE("errors of KJ") {
  TEST_CASE("an exception of KJ has a code that decides what the caller can do") {
    CHECK(error_from(thrown(kj::Exception::Type::DISCONNECTED, "gone")).code == Errc::kPeerLost);
    CHECK(error_from(thrown(kj::Exception::Type::OVERLOADED, "full")).code == Errc::kBusy);
    CHECK(error_from(thrown(kj::Exception::Type::FAILED, "odd")).code == Errc::kInternal);
    CHECK(error_from(thrown(kj::Exception::Type::FAILED, "odd")).detail == "odd");
  }

  TEST_CASE("open calls end as on a lost connection when this side drops the connection") {
    auto io = kj::setupAsyncIo();
    auto pipe = kj::newTwoWayPipe();
    auto client = kj::heap<capnp::TwoPartyClient>(*pipe.ends[0]);
    auto call = client->bootstrap().castAs<wire::PeerGate>().greetRequest().send();

    client = nullptr;

    const auto problem = kj::runCatchingExceptions([&]() { call.wait(io.waitScope); });
    KJ_IF_MAYBE (failed, problem) {
      CHECK(error_from(*failed).code == Errc::kPeerLost);
    } else {
      FAIL("the call was answered");
    }
  }

  TEST_CASE("an Error that is thrown is read back with its detail") {
    const Error full{.code = Errc::kBusy, .detail = "512 wait already"};
    const Error back = error_from(to_exception(full));
    CHECK(back.code == Errc::kBusy);
    CHECK(back.detail == "512 wait already");
  }

  TEST_CASE("an unknown host name is reported without KJ's expressions") {
    auto io = kj::setupAsyncIo();
    const std::string name(300, 'x');  // Longer than a name can be: no server is asked.

    const auto problem = kj::runCatchingExceptions(
        [&]() { io.provider->getNetwork().parseAddress(name.c_str(), 1).wait(io.waitScope); });

    KJ_IF_MAYBE (failed, problem) {
      const std::string detail = error_from(*failed).detail;
      CAPTURE(detail);
      CHECK(detail.starts_with(name + ": "));
      CHECK(detail.size() > name.size() + 2);
      CHECK(detail.find("gai_strerror") == std::string::npos);
    } else {
      FAIL("the name was found");
    }
  }
}

}  // namespace
}  // namespace pegaflow
