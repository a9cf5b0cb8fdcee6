// Proves that version N - 1 is served: replays the messages of programs of protocol 3 against those
// of today.
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <capnp/rpc-twoparty.h>
#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "base/os/unique_fd.h"
#include "capnp/wire/codec.h"
#include "tests/golden/rpc_message.h"
#include "tests/golden/scenario.h"
#include "tests/golden/transcript.h"
#include "tests/support/server_process.h"

namespace pegaflow::testing {
namespace {

std::vector<RecordedMessage> transcript() { return read_transcript(PEGA_GOLDEN "/v3.txt"); }

/// Bytes of a transcript on a socket.
class RawPeer {
 public:
  explicit RawPeer(const std::string& path)
      : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    REQUIRE(::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    const timeval patience{.tv_sec = kHang.count(), .tv_usec = 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }

  /// Sends our own pidfd where the recorded message had its sender's.
  void send(const RecordedMessage& message) {
    const UniqueFd own(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    iovec part{const_cast<std::byte*>(message.bytes.data()), message.bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (message.descriptors != 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      cmsghdr* const rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = own.get();
      std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    REQUIRE(::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) ==
            static_cast<ssize_t>(message.bytes.size()));
  }

  /// The next message; `descriptors` counts those that came so far.
  std::vector<std::byte> receive() {
    for (;;) {
      if (const auto size = message_bytes(stream_)) {
        const auto end = stream_.begin() + static_cast<std::ptrdiff_t>(*size);
        std::vector<std::byte> message(stream_.begin(), end);
        stream_.erase(stream_.begin(), end);
        return message;
      }
      std::byte buffer[65536];
      iovec part{buffer, sizeof buffer};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      msghdr header{};
      header.msg_iov = &part;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
      REQUIRE_MESSAGE(got > 0, "the server ended the conversation: ",
                      std::string(got == 0 ? "end of stream" : std::strerror(errno)));
      if (const cmsghdr* const rights = CMSG_FIRSTHDR(&header); rights != nullptr) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
        ::close(fd);
        ++descriptors;
      }
      stream_.insert(stream_.end(), buffer, buffer + got);
    }
  }

  std::size_t descriptors = 0;

 private:
  UniqueFd socket_;
  std::vector<std::byte> stream_;
};

/// The method that each question of one connection called; no value for a bootstrap.
using Questions = std::map<std::uint32_t, std::optional<MethodId>>;

void note_question(const RecordedMessage& said, Questions& questions) {
  RpcMessage message(said.bytes);
  if (message.get().isBootstrap()) {
    questions[message.get().getBootstrap().getQuestionId()] = std::nullopt;
  } else if (message.get().isCall()) {
    const auto call = message.get().getCall();
    questions[call.getQuestionId()] = MethodId{call.getInterfaceId(), call.getMethodId()};
  }
}

/// The 16 bytes of an id on the wire.
std::vector<std::byte> raw(const Id128& id) {
  std::vector<std::byte> bytes(16);
  std::memcpy(bytes.data(), &id.high, 8);
  std::memcpy(bytes.data() + 8, &id.low, 8);
  return bytes;
}

void replace(std::vector<std::byte>& bytes, const Id128& was, const Id128& is) {
  const auto from = raw(was);
  const auto to = raw(is);
  auto at = bytes.begin();
  while ((at = std::search(at, bytes.end(), from.begin(), from.end())) != bytes.end()) {
    at = std::copy(to.begin(), to.end(), at);
  }
}

constexpr MethodId kHello{capnp::typeId<wire::Gate>(), 0};

/// The client of the transcript, against a server of today.
struct Replay {
  explicit Replay(const std::string& path) : socket(path) {}

  void client(const RecordedMessage& said) {
    if (peers.size() == said.connection) peers.push_back(std::make_unique<RawPeer>(socket));
    note_question(said, questions[said.connection]);
    RecordedMessage now = said;
    if (!old_server.is_none()) replace(now.bytes, old_server, new_server);
    peers.at(said.connection)->send(now);
  }

  /// Waits for the same response.
  void server(const RecordedMessage& said) {
    RpcMessage was(said.bytes);
    if (!was.get().isReturn()) return;  // The server releases a capability of its own.
    const std::uint32_t question = was.get().getReturn().getAnswerId();
    const auto method = questions[said.connection].at(question);
    const std::size_t descriptors = peers.at(said.connection)->descriptors;
    for (;;) {
      RpcMessage is(peers.at(said.connection)->receive());
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
      CHECK(peers.at(said.connection)->descriptors - descriptors == said.descriptors);
      ++answers;
      if (*method == kHello)
        hello(older.as<wire::Gate::HelloResults>(), newer.as<wire::Gate::HelloResults>());
      return;
    }
  }

  void hello(wire::Gate::HelloResults::Reader older, wire::Gate::HelloResults::Reader newer) {
    old_server = read_id(older.getServer());
    new_server = read_id(newer.getServer());
    CHECK(newer.getVersion() == 3);
  }

  std::string socket;
  std::vector<std::unique_ptr<RawPeer>> peers;
  std::map<std::size_t, Questions> questions;
  Id128 old_server;
  Id128 new_server;
  std::size_t answers = 0;
};

/// One recorded call and its response.
struct RecordedCall {
  std::vector<std::byte> call;
  std::vector<std::byte> answer;
};

/// The responses of the transcript's server on one connection, by method, in order.
using Answers = std::map<MethodId, std::deque<RecordedCall>>;

std::vector<Answers> recorded_answers() {
  std::vector<Answers> all;
  std::vector<std::map<std::uint32_t, std::vector<std::byte>>> open;
  for (const RecordedMessage& said : transcript()) {
    all.resize(std::max(all.size(), said.connection + 1));
    open.resize(all.size());
    RpcMessage message(said.bytes);
    if (message.get().isCall()) {
      open[said.connection][message.get().getCall().getQuestionId()] = said.bytes;
    } else if (message.get().isReturn()) {
      auto call = open[said.connection].extract(message.get().getReturn().getAnswerId());
      if (call.empty()) continue;
      RpcMessage asked(call.mapped());
      const MethodId method{asked.get().getCall().getInterfaceId(),
                            asked.get().getCall().getMethodId()};
      all[said.connection][method].push_back({call.mapped(), said.bytes});
    }
  }
  return all;
}

/// The deviations from the transcript. Thread-safe.
struct Complaints {
  void add(std::string line) {
    const std::lock_guard lock(mutex);
    lines.push_back(std::move(line));
  }
  std::mutex mutex;
  std::vector<std::string> lines;
};

/// A capability of the pool, like the recorded server's.
class PoolImpl final : public wire::Pool::Server {
 public:
  explicit PoolImpl(int fd) : fd_(fd) {}
  kj::Maybe<int> getFd() override { return fd_; }

 private:
  int fd_;
};

/// Returns the recorded responses, whatever the parameters; different parameters are a complaint.
template <typename Interface>
class RecordedServer final : public Interface::Server {
 public:
  RecordedServer(Answers& answers, Complaints& complaints, int pool)
      : answers_(answers), complaints_(complaints), pool_(pool) {}

  capnp::Capability::Server::DispatchCallResult dispatchCall(
      std::uint64_t interface_id, std::uint16_t method,
      capnp::CallContext<capnp::AnyPointer, capnp::AnyPointer> context) override {
    auto& recorded = answers_[{interface_id, method}];
    if (recorded.empty()) {
      complaints_.add(fmt::format("a call that no client of the transcript made: {} of {:x}",
                                  method, interface_id));
      kj::throwFatalException(KJ_EXCEPTION(FAILED, "not recorded"));
    }
    RpcMessage call(recorded.front().call);
    RpcMessage answer(recorded.front().answer);
    recorded.pop_front();
    const auto schema = method_of({interface_id, method});
    const auto type = schema.getParamType();
    for (std::string& line : differences(
             call.get().getCall().getParams().getContent().getAs<capnp::DynamicStruct>(type),
             context.getParams().getAs<capnp::DynamicStruct>(type),
             schema.getProto().getName().cStr())) {
      complaints_.add(std::move(line));
    }
    auto table = kj::heapArrayBuilder<kj::Maybe<kj::Own<capnp::ClientHook>>>(1);
    if (interface_id == capnp::typeId<wire::Gate>()) {
      table.add(capnp::ClientHook::from(wire::Session::Client(
          kj::heap<RecordedServer<wire::Session>>(answers_, complaints_, pool_))));
    } else {
      table.add(capnp::ClientHook::from(wire::Pool::Client(kj::heap<PoolImpl>(pool_))));
    }
    capnp::ReaderCapabilityTable capabilities(table.finish());
    context.getResults().set(
        capabilities.imbue(answer.get()).getReturn().getResults().getContent());
    return {kj::READY_NOW, false};
  }

 private:
  Answers& answers_;
  Complaints& complaints_;
  int pool_;
};

UniqueFd make_pool(std::size_t bytes) {
  UniqueFd pool(::memfd_create("golden", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(pool.get(), static_cast<off_t>(bytes)) == 0);
  REQUIRE(::fcntl(pool.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  return pool;
}

/// Listens, and serves one connection after the other with the recorded responses until all of them
/// have ended, or no message came for `kHang`.
void serve_recorded(const std::string& path, std::vector<Answers>& answers, Complaints& complaints,
                    int pool, kj::Own<kj::PromiseFulfiller<void>>&& listening) {
  auto io = kj::setupAsyncIo();
  auto listener =
      io.provider->getNetwork().parseAddress("unix:" + path).wait(io.waitScope)->listen();
  listening->fulfill();
  kj::Vector<kj::Promise<void>> ended;
  kj::Vector<kj::Own<capnp::TwoPartyServer>> servers;
  for (Answers& each : answers) {
    auto stream = io.provider->getTimer()
                      .timeoutAfter(kHang.count() * kj::SECONDS, listener->accept())
                      .wait(io.waitScope);
    // A stream that passes descriptors, over the accepted socket.
    KJ_IF_MAYBE (fd, stream->getFd()) {
      auto unix_stream = io.lowLevelProvider->wrapUnixSocketFd(
          ::fcntl(*fd, F_DUPFD_CLOEXEC, 0), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP |
                                                kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                                                kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK);
      auto server = kj::heap<capnp::TwoPartyServer>(
          kj::heap<RecordedServer<wire::Gate>>(each, complaints, pool));
      ended.add(server->accept(*unix_stream, 1).attach(kj::mv(unix_stream), kj::mv(stream)));
      servers.add(kj::mv(server));
    }
  }
  io.provider->getTimer()
      .timeoutAfter(kHang.count() * kj::SECONDS, kj::joinPromises(ended.releaseAsArray()))
      .wait(io.waitScope);
}

}  // namespace

TEST_SUITE("protocol 3") {
  TEST_CASE("a server of today answers an old client as an old server did") {
    ServerProcess server;
    Replay replay(server.socket());
    for (const RecordedMessage& said : transcript()) {
      said.is_from_client ? replay.client(said) : replay.server(said);
    }

    CHECK(replay.answers >= 20);
    CHECK(server.metric("pegaflow_rpc_requests_total{method=\"publish\",status=\"ok\"}") >= 1);
  }

  TEST_CASE("a client of today sends an old server the calls of an old client, and works with it") {
    TemporaryDirectory directory;
    const std::string path = (directory.path() / "old.sock").string();
    std::vector<Answers> answers = recorded_answers();
    REQUIRE(answers.size() == 2);
    Complaints complaints;
    const UniqueFd pool = make_pool(std::size_t{64} << 20);
    auto io = kj::setupAsyncIo();
    auto listening = kj::newPromiseAndCrossThreadFulfiller<void>();
    std::thread old_server([&] {
      KJ_IF_MAYBE (problem, kj::runCatchingExceptions([&] {
                     serve_recorded(path, answers, complaints, pool.get(),
                                    kj::mv(listening.fulfiller));
                   })) {
        complaints.add(problem->getDescription().cStr());
      }
    });
    std::string failure;
    try {
      listening.promise.wait(io.waitScope);
      run_golden_scenario(path);
    } catch (const std::exception& problem) {
      failure = problem.what();
    }
    old_server.join();

    CHECK(failure == "");
    for (const std::string& line : complaints.lines) FAIL_CHECK(line);
    for (const Answers& connection : answers) {
      for (const auto& [method, left] : connection) {
        INFO(method_of(method).getProto().getName().cStr());
        CHECK(left.empty());
      }
    }
  }
}

}  // namespace pegaflow::testing
