// A node that knows the secret, has the requested blocks, and lies about their bytes, to test its
// readers. It behaves like an owner of docs/nodes.md until a chunk is requested; then it sends the
// lie that it was started for, and prints a line on standard output.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include "base/os/unique_fd.h"
#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/peer_proof.h"
#include "tests/fault/lying_node.h"
#include "tests/support/engine_memory.h"
#include "tests/support/test_engine.h"
#include "transport/checksum.h"
#include "transport/tcp/socket_address.h"
#include "transport/tcp/wire.h"

namespace pegaflow::testing {
namespace {

using tcp::Hello;
using tcp::Request;
using tcp::Response;
using tcp::Verdict;
using tcp::Welcome;

/// Its blocks and their places: block number `kFirstLyingBlock` + i is page i.
struct Held {
  std::vector<std::byte> pages = std::vector<std::byte>(kLyingBlocks * kLyingPageBytes);
  std::map<BlockKey, std::uint32_t> places;

  Held() {
    for (std::uint32_t i = 0; i < kLyingBlocks; ++i) {
      fill_page(pages.data() + i * kLyingPageBytes, kLyingPageBytes, kFirstLyingBlock + i);
      places[numbered_key(kFirstLyingBlock + i)] = i;
    }
  }
};

// ---- the lane

/// One connection of a reader.
class LyingLane {
 public:
  LyingLane(UniqueFd socket, Lie lie, const Id128& self, const Held& held)
      : socket_(std::move(socket)), lie_(lie), self_(self), held_(held) {}

  void run() {
    Hello hello;
    if (!receive(hello)) return;
    Welcome welcome{.holder_high = self_.high, .holder_low = self_.low};
    if (lie_ == Lie::kOldLife) {
      welcome.holder_low ^= 1;  // The former incarnation: it is the same address.
      report_lie();
    }
    if (lie_ == Lie::kOldVerdict) {
      welcome.verdict = Verdict::kGone;
      report_lie();
    }
    send(&welcome, sizeof welcome);
    for (Request request; receive(request);) respond(request);
  }

 private:
  void respond(const Request& request) {
    const std::byte* const truth = held_.pages.data() + request.offset;
    Response good{.request_id = request.request_id,
                  .slot = request.slot,
                  .size_bytes = request.size_bytes,
                  .checksum = PageChecksum::of({truth, request.size_bytes})};
    if (lie_ == Lie::kNone) return send(good, {truth, request.size_bytes});
    std::vector<std::byte> lies(request.size_bytes + kLyingPageBytes);
    for (std::size_t i = 0; i < lies.size(); ++i) lies[i] = lying_byte(i);
    const auto send_lie = [&](Response header) {
      header.checksum = PageChecksum::of({lies.data(), header.size_bytes});
      report_lie();
      send(header, {lies.data(), header.size_bytes});
    };
    Response bad = good;
    switch (lie_) {
      case Lie::kUnasked:
        bad.request_id += 1'000'000;
        return send_lie(bad);
      case Lie::kOtherPlace:
        bad.slot ^= 1;  // Another open slot, or none.
        return send_lie(bad);
      case Lie::kBeyondPlaces:
        bad.slot = 0xFFFF'FFFF;
        return send_lie(bad);
      case Lie::kTwice:
        send(good, {truth, request.size_bytes});
        return send_lie(bad);
      case Lie::kLonger:
        bad.size_bytes += 4096;
        return send_lie(bad);
      case Lie::kShorter:
        bad.size_bytes -= 4096;
        return send_lie(bad);
      case Lie::kOtherBytes:  // Under the checksum of the right ones.
        report_lie();
        return send(good, {lies.data(), request.size_bytes});
      case Lie::kNone:
      case Lie::kOldLife:  // A reader that sends requests all the same gets lies.
      case Lie::kOldVerdict:
        return send_lie(bad);
    }
  }

  static void report_lie() {
    const ssize_t wrote = ::write(STDOUT_FILENO, "lied\n", 5);
    if (wrote != 5) std::abort();
  }
  void send(const Response& response, std::span<const std::byte> bytes) {
    send(&response, sizeof response);
    send(bytes.data(), bytes.size());
  }
  /// Ignores the result: the reader may have closed the connection.
  void send(const void* data, std::size_t size) {
    const auto* at = static_cast<const std::byte*>(data);
    while (size > 0) {
      const ssize_t sent = ::send(socket_.get(), at, size, MSG_NOSIGNAL);
      if (sent <= 0) return;
      at += sent;
      size -= static_cast<std::size_t>(sent);
    }
  }
  template <typename Message>
  bool receive(Message& message) {
    return ::recv(socket_.get(), &message, sizeof message, MSG_WAITALL) ==
           static_cast<ssize_t>(sizeof message);
  }

  UniqueFd socket_;
  const Lie lie_;
  const Id128 self_;
  const Held& held_;
};

// ---- messages between servers

class LyingPeer final : public wire::Peer::Server {
 public:
  explicit LyingPeer(const Held& held) : held_(held) {}

 private:
  ::kj::Promise<void> locate(LocateContext call) override {
    call.getResults().setSealed(
        static_cast<std::uint32_t>(places(call.getParams().getKeys()).size()));
    return ::kj::READY_NOW;
  }
  ::kj::Promise<void> lease(LeaseContext call) override {
    const auto found = places(call.getParams().getKeys());
    LeaseGrant grant{.lease = found.empty() ? 0 : ++last_lease_,
                     .granted = std::chrono::milliseconds(call.getParams().getMilliseconds()),
                     .pages = {},
                     .checksums = {}};
    for (const std::uint32_t place : found) {
      grant.pages.push_back(place * static_cast<std::uint32_t>(kLyingPageBytes / 4096));
    }
    write_grant(grant, call.getResults());
    return ::kj::READY_NOW;
  }
  ::kj::Promise<void> release(ReleaseContext call) override {
    write_done({}, call.getResults());
    return ::kj::READY_NOW;
  }

  /// The longest prefix that it has.
  std::vector<std::uint32_t> places(wire::Keys::Reader reader) {
    std::vector<std::uint32_t> found;
    std::vector<BlockKey> scratch;
    const auto keys = read_keys(reader, scratch);
    if (!keys) return found;
    for (const BlockKey& key : *keys) {
      const auto at = held_.places.find(key);
      if (at == held_.places.end()) break;
      found.push_back(at->second);
    }
    return found;
  }

  const Held& held_;
  std::uint64_t last_lease_ = 0;
};

class LyingGate final : public wire::PeerGate::Server {
 public:
  LyingGate(const Id128& self, const cluster::PeerSecret& secret, const FabricDescriptor& fabric,
            const Held& held)
      : self_(self), secret_(secret), fabric_(fabric), held_(held) {}

 private:
  ::kj::Promise<void> greet(GreetContext call) override {
    const auto params = call.getParams();
    const cluster::PeerSecret::Greeting greeting{
        .dialer = read_id(params.getNode()),
        .answerer = self_,
        .dialer_challenge = read_bytes32(params.getChallenge()).value(),
        .answerer_challenge = cluster::random_bytes32()};
    const auto data = [](const Bytes32& bytes) {
      return ::capnp::Data::Reader(reinterpret_cast<const ::kj::byte*>(bytes.data()), bytes.size());
    };
    auto results = call.getResults();
    results.setVersion(std::min<std::uint16_t>(params.getMaximum(), kPeerWireAwaitsJobs));
    results.setMinimum(kPeerWireMinimum);
    results.setMaximum(kPeerWireMaximum);
    write_id(self_, results.initNode());
    results.setBuild("a node that lies");
    results.setChallenge(data(greeting.answerer_challenge));
    results.setProof(data(secret_.prove(cluster::PeerSecret::Side::kAnswerer, greeting)));
    return ::kj::READY_NOW;
  }
  ::kj::Promise<void> enter(EnterContext call) override {
    auto results = call.getResults();
    results.setPeer(::kj::heap<LyingPeer>(held_));
    write_fabrics({&fabric_, 1}, results);
    return ::kj::READY_NOW;
  }

  const Id128 self_;
  const cluster::PeerSecret& secret_;
  const FabricDescriptor& fabric_;
  const Held& held_;
};

int run(const std::string& address, const std::string& secret_file, Lie lie) {
  const auto secret = cluster::PeerSecrets::read(secret_file);
  const auto at = tcp::SocketAddress::parse(address);
  if (!secret || !at) return 2;
  const Held held;
  const Id128 self = Id128::random();
  const tcp::SocketAddress any = at->with_port(0);
  const UniqueFd listener(::socket(any.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(listener.get(), any.data(), any.size()) != 0 || ::listen(listener.get(), 16) != 0) {
    return 3;
  }
  const std::string lane = to_string(tcp::SocketAddress::near_end(listener.get()).value());
  const auto bytes = std::as_bytes(std::span(lane.data(), lane.size()));
  const FabricDescriptor fabric{
      .backend = "tcp",
      .incarnation = self,
      .address = {bytes.begin(), bytes.end()},
      .regions = {{.region = RegionId{0}, .size_bytes = held.pages.size()}}};
  std::thread([&]() {
    for (;;) {
      UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) std::abort();
      std::thread([&held, self, lie, socket = std::move(socket)]() mutable {
        LyingLane(std::move(socket), lie, self, held).run();
      }).detach();
    }
  }).detach();
  auto io = ::kj::setupAsyncIo();
  ::capnp::TwoPartyServer server(::kj::heap<LyingGate>(self, secret->first(), fabric, held));
  auto receiver =
      io.provider->getNetwork().parseAddress(address.c_str()).wait(io.waitScope)->listen();
  server.listen(*receiver).wait(io.waitScope);
  return 0;
}

}  // namespace
}  // namespace pegaflow::testing

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return pegaflow::testing::run(argv[1], argv[2],
                                static_cast<pegaflow::testing::Lie>(std::atoi(argv[3])));
}
