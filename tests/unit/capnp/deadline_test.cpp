#include "capnp/wire/deadline.h"

#include <array>
#include <chrono>

#include <doctest/doctest.h>
#include <kj/async-io.h>

namespace pegaflow {
namespace {

using std::chrono::milliseconds;

/// Keeps the thread busy until the deadline of a call that began before is over.
void stall() {
  const auto end = std::chrono::steady_clock::now() + milliseconds(20);
  while (std::chrono::steady_clock::now() < end) {
  }
}

/// Reads an answer of two parts, and decodes it in some steps more, as RPC does.
kj::Promise<bool> answer(kj::AsyncIoStream& stream, std::array<char, 8>& to) {
  return stream.read(to.data(), 4)
      .then([&stream, &to]() { return stream.read(to.data() + 4, 4); })
      .then([]() { return kj::evalLater([]() {}); })
      .then([]() { return kj::evalLater([]() { return true; }); });
}

TEST_SUITE("the deadline of a call") {
  TEST_CASE("an answer that arrived while the thread did not run is not late") {
    auto io = kj::setupAsyncIo();
    auto pipe = io.provider->newTwoWayPipe();
    std::array<char, 8> to{};
    auto deadline =
        deadline_in(io.provider->getTimer(), milliseconds(10)).then([]() { return false; });
    auto both = answer(*pipe.ends[0], to).exclusiveJoin(kj::mv(deadline));
    pipe.ends[1]->write("answered", 8).wait(io.waitScope);

    stall();

    CHECK(both.wait(io.waitScope));
  }

  TEST_CASE("without an answer it is over in time") {
    auto io = kj::setupAsyncIo();
    auto pipe = io.provider->newTwoWayPipe();
    std::array<char, 8> to{};
    auto deadline =
        deadline_in(io.provider->getTimer(), milliseconds(10)).then([]() { return false; });

    CHECK_FALSE(answer(*pipe.ends[0], to).exclusiveJoin(kj::mv(deadline)).wait(io.waitScope));
  }
}

}  // namespace
}  // namespace pegaflow
