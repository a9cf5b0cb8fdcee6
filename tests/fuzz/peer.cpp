// libFuzzer: any bytes on a connection of another node, to the real gate, in this process.
//
// The first byte chooses how the rest arrives: whole or in two parts (1), behind a valid greeting,
// so that it may request blocks (2), with an end behind it (4). After each input no connection is
// left, the store's invariants hold, every lease has ended once its time is over, and another peer
// is still admitted.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <kj/async-io.h>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/lanes.h"
#include "cluster/peer_proof.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/direct/direct_reads.h"
#include "server/direct/peer_offers.h"
#include "server/rpc/peer_gate.h"
#include "server/rpc/rpc_server.h"
#include "tests/fuzz/peer_names.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kPoolBytes = 1 << 20;
constexpr std::size_t kBlocks = 8;
constexpr Id128 kDialer{9, 9};

class Target {
 public:
  Target() : io_(kj::setupAsyncIo()), memory_(kPoolBytes) {
    set_log_level(LogLevel::kOff);
    address_.sun_family = AF_UNIX;
    const std::string path = socket_path();
    path.copy(address_.sun_path, sizeof address_.sun_path - 1);
    ::unlink(path.c_str());
    listener_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto* const to = reinterpret_cast<const sockaddr*>(&address_);
    PEGA_ASSERT(::bind(listener_.get(), to, sizeof address_) == 0, "bind");
    PEGA_ASSERT(::listen(listener_.get(), 16) == 0, "listen");
    std::atexit([]() { ::unlink(socket_path().c_str()); });

    auto made = server::CacheService::create({.store = {.pool_bytes = kPoolBytes}}, clock_,
                                             [](const Id128&) {});
    PEGA_ASSERT(made, "{}", made.error().detail);
    service_ = std::move(*made);
    background_ = std::make_unique<server::Background>(*service_, io_.provider->getTimer(), clock_);
    auto lanes = cluster::Lanes::open({.listen = "127.0.0.1:0"}, memory_, clock_, 1);
    PEGA_ASSERT(lanes, "{}", lanes.error().detail);
    lanes_ = std::move(*lanes);
    watches_ = std::make_unique<cluster::EpochWatches>(
        service_->epochs(), io_.provider->getTimer(),
        [](const cluster::EpochWatches::Dialer&) { return false; });
    direct_ = std::make_unique<server::DirectReads>(*service_, io_.provider->getTimer(), clock_);
    offers_ =
        std::make_unique<server::PeerOffers>(*service_, *direct_, io_.provider->getTimer(), clock_);
    context_.reset(new server::PeerContext{.service = *service_,
                                           .watches = *watches_,
                                           .background = *background_,
                                           .lanes = *lanes_,
                                           .own = own_,
                                           .clock = clock_,
                                           .offers = *offers_});
    store_blocks();
    rpc_ = std::make_unique<server::RpcServer>(io_, server::RpcServer::Options(), counters_);
    rpc_->serve(peer_service(*context_), listener_.get());
  }

  void feed(std::uint8_t how, const char* data, std::size_t size) {
    {
      const UniqueFd peer = connect();
      const std::size_t first = (how & 1U) != 0 ? size / 2 : size;
      if ((how & 2U) != 0) enter(peer.get());
      send(peer.get(), data, first);
      if (first != size) {
        io_.waitScope.poll();
        send(peer.get(), data + first, size - first);
      }
      if ((how & 4U) != 0) ::shutdown(peer.get(), SHUT_WR);
      io_.waitScope.poll();
      (void)receive(peer.get());
      io_.waitScope.poll();
    }
    while (counters_.connections != 0) {
      io_.unixEventPort.wait();
      io_.waitScope.poll();
    }
    // All leases have expired; nothing else is held here.
    clock_.advance(std::chrono::seconds(60));
    service_->expire();
    while (service_->work()) {
    }
    background_->poke();
    PEGA_ASSERT(service_->stats().store.leases == 0, "{} leases", service_->stats().store.leases);
    PEGA_ASSERT(service_->stats().store.held == 0, "a block is held");
    const auto checked = service_->store().check();
    PEGA_ASSERT(checked, "{}", checked.error().detail);
    if (++inputs_ % 64 == 0) {
      const UniqueFd peer = connect();
      const std::uint64_t before = context_->counters.greetings;
      enter(peer.get());
      PEGA_ASSERT(context_->counters.greetings == before + 1, "a valid peer was rejected");
    }
  }

 private:
  static std::string socket_path() {
    return "/tmp/pega-fuzz-peer-" + std::to_string(::getpid()) + ".sock";
  }

  /// The engine whose blocks the corpus requests.
  void store_blocks() {
    const Id128 engine{1, 1};
    PEGA_ASSERT(service_->connected(engine, {.process = engine,
                                             .previous_connection = {},
                                             .quiesced = false,
                                             .build = "fuzz",
                                             .watch = std::make_shared<int>(0)}),
                "connected");
    PEGA_ASSERT(service_->register_rank(engine, fuzz::engine()), "register");
    const std::vector<BlockKey> keys = fuzz::keys(kBlocks);
    const JobId job{.scheduler = engine, .number = 1};
    PEGA_ASSERT(service_->reserve(engine, job, 0, keys), "reserve");
    PEGA_ASSERT(service_->publish(engine, job) == 0U, "publish");
    PEGA_ASSERT(service_->present(fuzz::space(), keys) == kBlocks, "the corpus requests others");
  }

  [[nodiscard]] UniqueFd connect() const {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto* const to = reinterpret_cast<const sockaddr*>(&address_);
    PEGA_ASSERT(::connect(fd.get(), to, sizeof address_) == 0, "connect");
    return fd;
  }

  /// Sends as much as the socket takes: the rest of a long input is not needed.
  static void send(int fd, const char* data, std::size_t size) {
    if (size != 0) (void)::send(fd, data, size, MSG_NOSIGNAL);
  }
  static void send(int fd, capnp::MessageBuilder& message) {
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    send(fd, reinterpret_cast<const char*>(bytes.begin()), bytes.size());
  }

  static std::string receive(int fd) {
    std::string all;
    char part[65536];
    for (ssize_t count = 0; (count = ::recv(fd, part, sizeof part, 0)) > 0;) {
      all.append(part, static_cast<std::size_t>(count));
    }
    return all;
  }

  /// Sends a valid greeting: question 0 is the bootstrap, 1 the greeting, 2 returns the capability
  /// to request blocks. The input continues from question 3.
  void enter(int fd) {
    capnp::MallocMessageBuilder bootstrap;
    bootstrap.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
    send(fd, bootstrap);
    capnp::MallocMessageBuilder greet;
    auto greeting =
        fuzz::call<wire::PeerGate::GreetParams>(greet, 1, capnp::typeId<wire::PeerGate>(), 0, 0);
    greeting.setMinimum(kPeerWireMinimum);
    greeting.setMaximum(kPeerWireMaximum);
    write_id(kDialer, greeting.initNode());
    greeting.setChallenge(kj::arrayPtr(challenge_.data(), challenge_.size()));
    send(fd, greet);
    io_.waitScope.poll();
    const Bytes32 proof = prove(receive(fd));
    capnp::MallocMessageBuilder enter;
    auto entering =
        fuzz::call<wire::PeerGate::EnterParams>(enter, 2, capnp::typeId<wire::PeerGate>(), 1, 0);
    entering.setProof(kj::arrayPtr(reinterpret_cast<const kj::byte*>(proof.data()), proof.size()));
    send(fd, enter);
    io_.waitScope.poll();
  }

  /// The dialer's proof for the gate's response.
  [[nodiscard]] Bytes32 prove(const std::string& answers) const {
    std::vector<capnp::word> words(answers.size() / sizeof(capnp::word));
    std::memcpy(words.data(), answers.data(), words.size() * sizeof(capnp::word));
    kj::ArrayPtr<const capnp::word> rest(words.data(), words.size());
    while (rest.size() > 0) {
      capnp::FlatArrayMessageReader reader(rest);
      const auto message = reader.getRoot<capnp::rpc::Message>();
      rest = kj::arrayPtr(reader.getEnd(), rest.end());
      if (!message.isReturn() || message.getReturn().getAnswerId() != 1) continue;
      const auto results =
          message.getReturn().getResults().getContent().getAs<wire::PeerGate::GreetResults>();
      Bytes32 ours;
      std::memcpy(ours.data(), challenge_.data(), ours.size());
      return own_.secrets.first().prove(
          cluster::PeerSecret::Side::kDialer,
          {.dialer = kDialer,
           .answerer = read_id(results.getNode()),
           .dialer_challenge = ours,
           .answerer_challenge = read_bytes32(results.getChallenge()).value()});
    }
    PEGA_ASSERT(false, "the greeting was not answered");
    return {};
  }

  kj::AsyncIoContext io_;
  ManualClock clock_;
  server::RpcCounters counters_;
  cluster::OwnNode own_{.node = Id128{1, 2}, .build = "fuzz", .secrets = {}};
  std::array<kj::byte, 32> challenge_{1, 2, 3};
  std::vector<std::byte> memory_;
  std::unique_ptr<server::CacheService> service_;
  std::unique_ptr<server::Background> background_;
  std::unique_ptr<cluster::Lanes> lanes_;
  std::unique_ptr<cluster::EpochWatches> watches_;
  std::unique_ptr<server::DirectReads> direct_;
  std::unique_ptr<server::PeerOffers> offers_;
  std::unique_ptr<server::PeerContext> context_;
  sockaddr_un address_{};
  UniqueFd listener_;
  std::unique_ptr<server::RpcServer> rpc_;
  std::uint64_t inputs_ = 0;
};

}  // namespace
}  // namespace pegaflow

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto* const target = new pegaflow::Target();
  if (size < 1) return 0;
  target->feed(data[0], reinterpret_cast<const char*>(data + 1), size - 1);
  return 0;
}
