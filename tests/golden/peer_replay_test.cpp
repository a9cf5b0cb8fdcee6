// Replays the requests of a reader of peer version 3, byte by byte, against a server of today.
// After the next version this proves that the previous one is still served.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <capnp/schema.h>
#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/peer_proof.h"
#include "tests/golden/peer_scenario.h"
#include "tests/golden/rpc_message.h"
#include "tests/golden/transcript.h"
#include "tests/support/nodes.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::testing {
namespace {

constexpr MethodId kGreet{capnp::typeId<wire::PeerGate>(), 0};
constexpr MethodId kEnter{capnp::typeId<wire::PeerGate>(), 1};

/// A connection to a server's --peer-listen, and bytes on it.
class RawDialer {
 public:
  explicit RawDialer(const std::string& address) {
    const auto to = tcp::SocketAddress::parse(address).value();
    socket_ = UniqueFd(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(socket_.get(), to.data(), to.size()) == 0);
    const timeval patience{.tv_sec = kHang.count(), .tv_usec = 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  void send(const std::vector<std::byte>& bytes) const {
    REQUIRE(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(bytes.size()));
  }
  std::vector<std::byte> receive() {
    for (;;) {
      if (const auto size = message_bytes(stream_)) {
        const auto end = stream_.begin() + static_cast<std::ptrdiff_t>(*size);
        std::vector<std::byte> message(stream_.begin(), end);
        stream_.erase(stream_.begin(), end);
        return message;
      }
      std::byte buffer[65536];
      const ssize_t got = ::recv(socket_.get(), buffer, sizeof buffer, 0);
      REQUIRE_MESSAGE(got > 0, "the server ended the conversation: ",
                      std::string(got == 0 ? "end of stream" : std::strerror(errno)));
      stream_.insert(stream_.end(), buffer, buffer + got);
    }
  }

 private:
  UniqueFd socket_;
  std::vector<std::byte> stream_;
};

void replace(std::vector<std::byte>& bytes, const Bytes32& was, const Bytes32& is) {
  const auto at = std::search(bytes.begin(), bytes.end(), was.begin(), was.end());
  REQUIRE(at != bytes.end());
  std::copy(is.begin(), is.end(), at);
}

struct Replay {
  explicit Replay(const std::string& address) : dialer(address) {}

  void ask(const RecordedMessage& said) {
    RpcMessage message(said.bytes);
    std::vector<std::byte> bytes = said.bytes;
    if (message.get().isBootstrap()) {
      questions[message.get().getBootstrap().getQuestionId()] = std::nullopt;
    } else if (message.get().isCall()) {
      const auto call = message.get().getCall();
      const MethodId method{call.getInterfaceId(), call.getMethodId()};
      questions[call.getQuestionId()] = method;
      ++calls[method];
      const auto content = call.getParams().getContent();
      if (method == kGreet) {
        const auto params = content.getAs<wire::PeerGate::GreetParams>();
        greeting.dialer = read_id(params.getNode());
        greeting.dialer_challenge = read_bytes32(params.getChallenge()).value();
      } else if (method == kEnter) {
        // The proof answers the challenge of this server.
        const auto params = content.getAs<wire::PeerGate::EnterParams>();
        replace(bytes, read_bytes32(params.getProof()).value(),
                cluster::PeerSecret().prove(cluster::PeerSecret::Side::kDialer, greeting));
      }
    }
    dialer.send(bytes);
  }

  /// Waits for the same response.
  void answer(const RecordedMessage& said) {
    RpcMessage was(said.bytes);
    if (!was.get().isReturn()) return;
    const std::uint32_t question = was.get().getReturn().getAnswerId();
    const auto method = questions.at(question);
    for (;;) {
      RpcMessage is(dialer.receive());
      if (!is.get().isReturn() || is.get().getReturn().getAnswerId() != question) continue;
      if (!method) return;
      const std::string name(method_of(*method).getProto().getName().cStr());
      INFO("answer to ", name);
      REQUIRE(is.get().getReturn().isResults());
      const auto type = method_of(*method).getResultType();
      const auto older =
          was.get().getReturn().getResults().getContent().getAs<capnp::DynamicStruct>(type);
      const auto newer =
          is.get().getReturn().getResults().getContent().getAs<capnp::DynamicStruct>(type);
      for (const std::string& line : differences(older, newer, name)) FAIL_CHECK(line);
      if (*method == kGreet) {
        const auto greeted = newer.as<wire::PeerGate::GreetResults>();
        CHECK(greeted.getVersion() == 3);
        greeting.answerer = read_id(greeted.getNode());
        greeting.answerer_challenge = read_bytes32(greeted.getChallenge()).value();
      }
      return;
    }
  }

  RawDialer dialer;
  std::map<std::uint32_t, std::optional<MethodId>> questions;
  std::map<MethodId, std::size_t> calls;
  cluster::PeerSecret::Greeting greeting;
};

}  // namespace

TEST_SUITE("peer version 3") {
  TEST_CASE("an owner of today answers a reader of that version as an owner of that version did") {
    const auto at = node_addresses(1);
    const ServerProcess owner(golden_owner(at[0]));
    GoldenEngine engine(owner.socket());
    engine.save();

    Replay replay(at[0]);
    for (const RecordedMessage& said : read_transcript(PEGA_GOLDEN "/peer_v3.txt")) {
      said.is_from_client ? replay.ask(said) : replay.answer(said);
    }

    // Each method of the interface was called.
    for (std::uint16_t method = 0; method < 2; ++method) {
      CHECK(replay.calls[{capnp::typeId<wire::PeerGate>(), method}] == 1);
    }
    for (std::uint16_t method = 0; method < 7; ++method) {
      CAPTURE(method);
      CHECK(replay.calls[{capnp::typeId<wire::Peer>(), method}] >= 1);
    }
    CHECK(owner.metric_becomes("pegaflow_leases", 0));
    CHECK(owner.metric("pegaflow_leases_total{result=\"ran_out\"}") == 0);
    CHECK(owner.metric("pegaflow_namespace_resets_total{origin=\"peer\"}") == 1);
    CHECK(engine.engine().lookup(numbers_from(1, GoldenEngine::kBlocks)).value().blocks == 0);
  }
}

}  // namespace pegaflow::testing
