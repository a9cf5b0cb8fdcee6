// libFuzzer: any bytes on a real connection to the real RPC server, in this process.
//
// The first byte chooses how the rest arrives: whole or in two parts (1), behind a bootstrap and
// with our pidfd beside its first byte (2), with an end behind it (4). After each input the server
// has no connection left, the store's invariants hold, and another client is still greeted.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <kj/async-io.h>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/codec.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/direct/direct_reads.h"
#include "server/fetches/fetches.h"
#include "server/rpc/client_gate.h"
#include "server/rpc/rpc_server.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kPoolBytes = 1 << 20;

/// One server for all inputs, as in production. Never ends: the fuzzer exits.
class Target {
 public:
  Target() : io_(kj::setupAsyncIo()), pidfd_(open_pidfd()) {
    set_log_level(LogLevel::kOff);
    pool_ = UniqueFd(::memfd_create("fuzz", MFD_CLOEXEC));
    address_.sun_family = AF_UNIX;
    const std::string path = "/tmp/pega-fuzz-" + std::to_string(::getpid()) + ".sock";
    path.copy(address_.sun_path, sizeof address_.sun_path - 1);
    ::unlink(path.c_str());
    listener_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto* const to = reinterpret_cast<const sockaddr*>(&address_);
    PEGA_ASSERT(::bind(listener_.get(), to, sizeof address_) == 0, "bind");
    PEGA_ASSERT(::listen(listener_.get(), 16) == 0, "listen");
    start();
    std::atexit(
        []() { ::unlink(("/tmp/pega-fuzz-" + std::to_string(::getpid()) + ".sock").c_str()); });
  }

  void feed(std::uint8_t how, const char* data, std::size_t size) {
    {
      const UniqueFd peer = connect();
      const bool in_two_parts = (how & 1U) != 0;
      const std::size_t first = in_two_parts ? size / 2 : size;
      const bool with_pidfd = (how & 2U) != 0;
      if (with_pidfd) send(peer.get(), bootstrap_.data(), bootstrap_.size(), false);
      send(peer.get(), data, first, with_pidfd);
      if (in_two_parts) {
        io_.waitScope.poll();
        send(peer.get(), data + first, size - first, false);
      }
      if ((how & 4U) != 0) ::shutdown(peer.get(), SHUT_WR);
      io_.waitScope.poll();
      drain(peer.get());
      io_.waitScope.poll();
    }
    // Messages that the server still sends are lost with the socket; its connection ends by itself.
    // One event-loop iteration at a time: next_turn() is a timer that has already expired.
    while (counters_.connections != 0 || service_->has_work()) {
      io_.unixEventPort.wait();
      io_.waitScope.poll();
    }
    const auto checked = service_->store().check();
    PEGA_ASSERT(checked, "{}", checked.error().detail);
    if (++inputs_ % 64 == 0) greet();
    // The process of the pidfd is this one and lives, so the slots that its connections may access
    // stay in quarantine; at the limit no client could register, and the inputs would reach
    // nothing.
    if (service_->stats().detached > 100) {
      stop();
      start();
    }
  }

 private:
  void start() {
    auto made = server::CacheService::create(
        {.store = {.pool_bytes = kPoolBytes}}, clock_,
        [this](const Id128& connection) { rpc_->end_connection(connection); });
    PEGA_ASSERT(made, "{}", made.error().detail);
    service_ = std::move(*made);
    background_ = std::make_unique<server::Background>(*service_, io_.provider->getTimer(), clock_);
    fetches_ = std::make_unique<server::Fetches>(*service_, nullptr, *background_,
                                                 io_.provider->getTimer(), clock_,
                                                 server::Fetches::Options());
    direct_ = std::make_unique<server::DirectReads>(*service_, io_.provider->getTimer(), clock_);
    context_.reset(new server::SessionContext{.service = *service_,
                                              .background = *background_,
                                              .counters = counters_,
                                              .port = io_.unixEventPort,
                                              .timer = io_.provider->getTimer(),
                                              .clock = clock_,
                                              .pool_fd = pool_.get(),
                                              .pool_bytes = kPoolBytes,
                                              .fetches = *fetches_,
                                              .local_fetches = *fetches_,
                                              .direct = *direct_,
                                              .server = Id128{1, 2},
                                              .build = "fuzz",
                                              .process_gone = [](const Id128&) {},
                                              .keys = {}});
    rpc_ = std::make_unique<server::RpcServer>(io_, server::RpcServer::Options(), counters_);
    rpc_->serve(client_service(*context_), listener_.get());
  }

  void stop() {
    io_.waitScope.poll();
    rpc_.reset();
    context_.reset();
    background_.reset();
    service_.reset();
  }

  static std::string bootstrap() {
    capnp::MallocMessageBuilder message;
    message.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
  }

  static UniqueFd open_pidfd() {
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  }

  [[nodiscard]] UniqueFd connect() const {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto* const to = reinterpret_cast<const sockaddr*>(&address_);
    PEGA_ASSERT(::connect(fd.get(), to, sizeof address_) == 0, "connect");
    return fd;
  }

  /// Sends as much as the socket takes: the rest of a long input is not needed.
  void send(int fd, const char* data, std::size_t size, bool with_pidfd) const {
    if (size == 0) return;
    iovec part{const_cast<char*>(data), size};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (with_pidfd) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      const int pidfd = pidfd_.get();
      std::memcpy(CMSG_DATA(header), &pidfd, sizeof pidfd);
    }
    (void)::sendmsg(fd, &message, MSG_NOSIGNAL);
  }

  static void drain(int fd) {
    char part[65536];
    while (::recv(fd, part, sizeof part, 0) > 0) {
    }
  }

  /// A well-behaved client is still served.
  void greet() {
    auto stream = io_.lowLevelProvider->wrapUnixSocketFd(
        connect().release(), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP);
    {
      capnp::TwoPartyClient client(*stream, 1);
      auto hello = client.bootstrap().castAs<wire::Gate>().helloRequest();
      hello.setMinimum(kWireMinimum);
      hello.setMaximum(kWireMaximum);
      write_id(Id128{3, 4}, hello.initProcess());
      const auto answer = hello.send().wait(io_.waitScope);
      PEGA_ASSERT(answer.getVersion() == kWireMaximum, "a valid client was rejected");
    }
    stream = nullptr;
    while (counters_.connections != 0) {
      io_.unixEventPort.wait();
      io_.waitScope.poll();
    }
  }

  kj::AsyncIoContext io_;
  SteadyClock clock_;
  server::RpcCounters counters_;
  std::string bootstrap_ = bootstrap();
  UniqueFd pidfd_;
  UniqueFd pool_;
  std::unique_ptr<server::CacheService> service_;
  std::unique_ptr<server::Background> background_;
  std::unique_ptr<server::Fetches> fetches_;
  std::unique_ptr<server::DirectReads> direct_;
  std::unique_ptr<server::SessionContext> context_;
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
