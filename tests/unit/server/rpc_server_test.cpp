#include "server/rpc/rpc_server.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <sys/socket.h>

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "capnp/peer.capnp.h"
#include "server/rpc/listener.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::server {
namespace {

constexpr std::uint32_t kCalls = 1000;
constexpr std::size_t kAnswerBytes = 100'000;

/// Answers all calls at once, when the test wants it to.
struct Gate final : wire::PeerGate::Server {
  struct State {
    State() : State(kj::newPromiseAndFulfiller<void>()) {}
    explicit State(kj::PromiseFulfillerPair<void> pair)
        : go(kj::mv(pair.fulfiller)), going(pair.promise.fork()) {}
    std::uint32_t calls = 0;
    std::uint32_t answers = 0;
    kj::Own<kj::PromiseFulfiller<void>> go;
    kj::ForkedPromise<void> going;
  };
  explicit Gate(State& state) : state_(state) {}

 protected:
  kj::Promise<void> greet(GreetContext call) override {
    ++state_.calls;
    return state_.going.addBranch().then([this, call]() mutable {
      ++state_.answers;
      call.getResults().setBuild(std::string(kAnswerBytes, 'x').c_str());
    });
  }

 private:
  State& state_;
};

std::string to_bytes(capnp::MessageBuilder& message) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
}

/// A bootstrap, and calls on what it returns.
std::string calls_of_greet() {
  capnp::MallocMessageBuilder first;
  first.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  std::string bytes = to_bytes(first);
  for (std::uint32_t question = 1; question <= kCalls; ++question) {
    capnp::MallocMessageBuilder message;
    auto call = message.initRoot<capnp::rpc::Message>().initCall();
    call.setQuestionId(question);
    call.initTarget().initPromisedAnswer().setQuestionId(0);
    call.setInterfaceId(capnp::typeId<wire::PeerGate>());
    call.setMethodId(0);
    bytes += to_bytes(message);
  }
  return bytes;
}

TEST_SUITE("RpcServer") {
  TEST_CASE("answers that are produced later, for a peer that does not read, are bounded") {
    auto io = kj::setupAsyncIo();
    RpcCounters counters;
    Gate::State state;
    std::optional<std::uint32_t> answers_at_end;
    RpcServer::Options options;
    options.limits.queued_bytes = std::size_t{1} << 20;
    auto listener = listen_tcp("127.0.0.1:0", "a test").value();
    RpcServer server(io, std::move(options), counters);
    server.serve({.bootstrap =
                      [&](const Id128&, const Peer&, kj::Function<void()> greeted) {
                        greeted();
                        return capnp::Capability::Client(kj::heap<Gate>(state));
                      },
                  .ended = [&](const Id128&) { answers_at_end = state.answers; },
                  .has_users = false},
                 listener.fd.get());
    const auto address = tcp::SocketAddress::parse(listener.address).value();
    const UniqueFd client(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(client.get(), address.data(), address.size()) == 0);
    const std::string bytes = calls_of_greet();
    const auto turn_until = [&](auto is_so) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!is_so()) {
        REQUIRE(std::chrono::steady_clock::now() < end);
        io.provider->getTimer().afterDelay(1 * kj::MILLISECONDS).wait(io.waitScope);
      }
    };
    std::size_t sent = 0;
    turn_until([&]() {
      const auto now = ::send(client.get(), bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT);
      sent += now > 0 ? static_cast<std::size_t>(now) : 0;
      return sent == bytes.size() && state.calls == kCalls;
    });
    CHECK(counters.connections == 1);

    state.go->fulfill();

    turn_until([&]() { return answers_at_end.has_value(); });
    CHECK(counters.connections == 0);
    CHECK(counters.closed_protocol == 1);
    // The limit, what the kernel takes of it, and not all 100 MB. Calls run on behind the end, but
    // what they answer has no connection to wait for.
    CHECK(*answers_at_end < kCalls / 2);
  }
}

}  // namespace
}  // namespace pegaflow::server
