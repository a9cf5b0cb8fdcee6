// The RDMA lane when the other process is killed, restarted or sends garbage, and its validation of
// descriptions. Over TCP on the loopback device.
#include <chrono>
#include <csignal>
#include <random>
#include <span>
#include <sstream>
#include <vector>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/hex.h"
#include "base/os/unique_fd.h"
#include "tests/support/fabric_node.h"
#include "tests/support/patience.h"
#include "tests/support/shifted_clock.h"
#include "tests/unit/transport/ucx_rails.h"
#include "transport/ucx/ucx_fabric.h"
#include "transport/ucx/wire.h"
#include "transport/ucx/worker.h"

namespace pegaflow::testing {
namespace {

std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
  static const SteadyClock clock;
  auto made = UcxFabric::create(ucx_options(), clock, std::move(sink));
  REQUIRE_MESSAGE(made, to_string(made.error()));
  return std::move(*made);
}

/// tests/unit/transport/ucx_holder, as a child process.
class HolderProcess {
 public:
  /// It lends for this many seconds; 0: without an end.
  explicit HolderProcess(int seconds = 0) {
    int to[2] = {-1, -1};
    int from[2] = {-1, -1};
    REQUIRE(::pipe2(to, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(from, O_CLOEXEC) == 0);
    input_ = UniqueFd(to[1]);
    const UniqueFd theirs(to[0]);
    const UniqueFd output(from[1]);
    output_ = UniqueFd(from[0]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
    std::string path = PEGA_UCX_HOLDER;
    std::string lease = std::to_string(seconds);
    char* const arguments[] = {path.data(), lease.data(), nullptr};
    REQUIRE(::posix_spawn(&pid_, path.c_str(), &actions, nullptr, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    std::istringstream words(line());
    std::string address;
    std::string key;
    words >> descriptor.incarnation.high >> descriptor.incarnation.low >> address >> key;
    descriptor.backend = "ucx";
    descriptor.address = from_hex(address);
    descriptor.regions = {
        {.region = RegionId{0}, .size_bytes = std::uint64_t{4} << 20, .key = from_hex(key)}};
  }
  ~HolderProcess() { kill(); }
  HolderProcess(const HolderProcess&) = delete;
  HolderProcess& operator=(const HolderProcess&) = delete;

  /// Renews the lease, from now on.
  void lend() {
    REQUIRE(::write(input_.get(), "+", 1) == 1);
    REQUIRE(line() == "lent");
  }
  void stop() const {
    REQUIRE(::kill(pid_, SIGSTOP) == 0);
    siginfo_t info{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOWAIT) == 0);
  }
  void go_on() const { REQUIRE(::kill(pid_, SIGCONT) == 0); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }

  FabricDescriptor descriptor;

 private:
  [[nodiscard]] std::string line() const {
    std::string text;
    char byte = 0;
    while (::read(output_.get(), &byte, 1) == 1 && byte != '\n') text += byte;
    return text;
  }

  UniqueFd input_;
  UniqueFd output_;
  pid_t pid_ = -1;
};

std::vector<Fabric::Chunk> pages(const FabricNode& reader, std::uint64_t size) {
  std::vector<Fabric::Chunk> chunks;
  for (std::uint64_t at = 0; at + size <= reader.memory.size(); at += size) {
    chunks.push_back({.remote_region = RegionId{0},
                      .remote_offset = at,
                      .local_region = reader.region,
                      .local_offset = at,
                      .size_bytes = size});
  }
  return chunks;
}

TEST_SUITE("UcxFabric, faults") {
  TEST_CASE("a peer that is killed in the middle of a read is lost, and no chunk has wrong bytes") {
    FabricNode reader(&make, 4 << 20, 2);
    const std::vector<Fabric::Chunk> chunks = pages(reader, 64 << 10);
    for (int round = 0; round < 3; ++round) {
      HolderProcess holder;
      const auto peer = reader.fabric->connect(holder.descriptor).value();
      REQUIRE(!reader.read(peer, {chunks[0]}).chunks[0]);
      fill_pattern(reader.memory, 2);
      for (std::uint64_t ticket = 1; ticket <= 8; ++ticket) {
        REQUIRE(reader.fabric->read({.ticket = 10 * static_cast<std::uint64_t>(round) + ticket,
                                     .peer = peer,
                                     .deadline = late(),
                                     .chunks = chunks}));
      }

      holder.kill();

      // All are quiesced before a place is checked: they share the places.
      std::vector<Fabric::Completion> ended;
      for (std::uint64_t ticket = 1; ticket <= 8; ++ticket) {
        ended.push_back(reader.inbox.take(10 * static_cast<std::uint64_t>(round) + ticket));
      }
      for (const Fabric::Completion& completion : ended) {
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          if (completion.chunks[i]) {
            CHECK(*completion.chunks[i] == Errc::kPeerLost);
            continue;
          }
          bool right = true;
          for (std::uint64_t at = chunks[i].local_offset;
               at < chunks[i].local_offset + chunks[i].size_bytes; ++at) {
            right = right && reader.memory[at] == pattern_at(1, at);
          }
          CHECK(right);
        }
      }
      CHECK(reader.read(peer, {chunks[0]}).chunks[0] == Errc::kPeerLost);
      REQUIRE(reader.fabric->disconnect(peer));

      // The next process at its address is greeted anew, by its own description.
      HolderProcess next;
      const auto again = reader.fabric->connect(next.descriptor).value();
      CHECK(!reader.read(again, {chunks[0]}).chunks[0]);
      REQUIRE(reader.fabric->disconnect(again));
    }
  }

  TEST_CASE("a read near the end of a lease that was renewed at the holder waits for the new end") {
    ShiftedClock clock;
    const auto make_shifted = [&](Fabric::CompletionSink sink) -> std::unique_ptr<Fabric> {
      auto made = UcxFabric::create(ucx_options(), clock, std::move(sink));
      REQUIRE_MESSAGE(made, to_string(made.error()));
      return std::move(*made);
    };
    FabricNode reader(make_shifted, 1 << 20, 2);
    HolderProcess holder(60);
    const auto peer = reader.fabric->connect(holder.descriptor).value();
    REQUIRE(!reader.read(peer, {pages(reader, 4096)[0]}).chunks[0]);
    // For the reader 59.5 s pass; its lease ends within half a second.
    clock.advance(std::chrono::milliseconds(59'500));
    holder.lend();

    // The holder is slow, and the old lease ends while the read is in flight.
    holder.stop();
    REQUIRE(reader.fabric->read({.ticket = 1,
                                 .peer = peer,
                                 .deadline = late() + std::chrono::minutes(2),
                                 .chunks = {pages(reader, 4096)[1]}}));
    wait_for_iterations(*reader.fabric);
    clock.advance(std::chrono::seconds(1));
    holder.go_on();

    const Fabric::Completion done = reader.inbox.take(1);
    CHECK_MESSAGE(!done.chunks[0], done.detail);
    CHECK(reader.memory[4096] == pattern_at(1, 4096));
  }

  TEST_CASE("a lease shorter than its renewal's time ahead is used") {
    FabricNode reader(&make, 1 << 20, 2);
    HolderProcess holder(1);
    const auto peer = reader.fabric->connect(holder.descriptor).value();
    holder.lend();
    const Fabric::Completion done = reader.read(peer, {pages(reader, 4096)[0]});
    CHECK_MESSAGE(!done.chunks[0], done.detail);
  }

  TEST_CASE("another process at the same address is not mistaken for the previous one") {
    FabricNode reader(&make, 4 << 20, 2);
    HolderProcess holder;
    FabricDescriptor before = holder.descriptor;
    before.incarnation = Id128::random();
    const auto peer = reader.fabric->connect(before).value();
    CHECK(reader.read(peer, {pages(reader, 4096)[0]}).chunks[0] == Errc::kPeerLost);
    CHECK(reader.memory[0] == pattern_at(2, 0));
  }

  TEST_CASE(
      "hellos that are truncated, damaged or from strangers are neither answered nor unpacked") {
    FabricNode holder(&make, 1 << 16, 1);
    const UcxFabric::Options options = ucx_options();
    const ucx::UcpApi* const api = ucx::UcpApi::load(ucx_options().library).value();
    const auto context =
        ucx::Context::open(*api, {.device = options.rails[0], .sockets = options.sockets}).value();
    const auto worker = ucx::Worker::create(*context).value();
    const ucx::FabricAddress address =
        ucx::unpack_address(holder.fabric->describe().address).value();
    const auto endpoint = ucx::Endpoint::connect(*worker, address.rails[0].address).value();
    const ucx::Message right{.kind = ucx::Message::Kind::kHello,
                             .from = 1,
                             .incarnation = holder.fabric->describe().incarnation};
    const auto sealed = ucx::seal_hello(right, worker->address());
    std::mt19937_64 chance(4711);

    for (std::size_t length = 0; length < sealed.size(); ++length) {
      endpoint->send(right, std::span(sealed).first(length));
    }
    for (std::size_t i = 0; i < sealed.size(); ++i) {
      auto damaged = sealed;
      damaged[i] ^= static_cast<std::byte>(1 + chance() % 255);
      endpoint->send(right, damaged);
    }
    endpoint->send(right, worker->address());  // Without a seal, as earlier versions send it.
    endpoint->send(right, std::vector<std::byte>(ucx::kMostPackedBytes));
    ucx::Message stranger = right;
    stranger.incarnation = Id128::random();
    endpoint->send(stranger, ucx::seal_hello(stranger, worker->address()));
    ucx::Message other = right;  // Complete, but not the message that was sealed.
    other.from = 2;
    endpoint->send(other, sealed);

    // Messages of one endpoint keep their order: the first response is to the last hello.
    ucx::Message last = right;
    last.from = 3;
    endpoint->send(last, ucx::seal_hello(last, worker->address()));
    std::vector<ucx::Worker::Arrived> arrived;
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (arrived.empty()) {
      REQUIRE(std::chrono::steady_clock::now() < end);
      worker->progress();
      arrived = worker->take_arrived();
    }
    CHECK(arrived.size() == 1);
    CHECK(arrived[0].message.to == 3);
    CHECK(arrived[0].message.verdict == ucx::Message::Verdict::kWelcome);
    endpoint->close(ucx::Endpoint::Close::kNow);
    while (!endpoint->closed()) worker->progress();
  }

  TEST_CASE("descriptions that are damaged or of another kind are rejected before UCX sees them") {
    FabricNode holder(&make, 1 << 16, 1);
    FabricNode reader(&make, 1 << 16, 2);
    const FabricDescriptor good = holder.fabric->describe();
    for (std::size_t i = 0; i < good.address.size(); ++i) {
      FabricDescriptor bad = good;
      bad.address[i] ^= std::byte{1};
      CHECK(reader.fabric->connect(bad).error().code == Errc::kInvalidArgument);
      bad.address = good.address;
      bad.address.resize(i);
      CHECK(reader.fabric->connect(bad).error().code == Errc::kInvalidArgument);
    }
    for (std::size_t i = 0; i < good.regions[0].key.size(); ++i) {
      FabricDescriptor bad = good;
      bad.regions[0].key[i] ^= std::byte{1};
      CHECK(reader.fabric->connect(bad).error().code == Errc::kInvalidArgument);
    }
    // Complete, but of another UCX version, or with keys for more rails than there are.
    FabricDescriptor other = good;
    ucx::FabricAddress address = ucx::unpack_address(good.address).value();
    address.ucx_version += 1;
    other.address = ucx::pack(address);
    CHECK(reader.fabric->connect(other).error().code == Errc::kRefused);
    other = good;
    ucx::RegionKey key = ucx::unpack_key(good.regions[0].key).value();
    key.rail_keys.push_back(key.rail_keys[0]);
    other.regions[0].key = ucx::pack(key);
    CHECK(reader.fabric->connect(other).error().code == Errc::kInvalidArgument);
    other = good;
    other.regions.resize(1025);
    CHECK(reader.fabric->connect(other).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("calls beyond its limits return errors") {
    const SteadyClock clock;
    FabricNode holder(&make, 1 << 16, 1);
    FabricInbox inbox;
    UcxFabric::Options few = ucx_options();
    few.batches = 1;
    few.chunks = 2;
    few.peers = 1;
    auto fabric = UcxFabric::create(few, clock, inbox.sink());
    REQUIRE(fabric);
    REQUIRE((*fabric)->connect(holder.fabric->describe()));
    CHECK((*fabric)->connect(holder.fabric->describe()).error().code == Errc::kBusy);
    CHECK((*fabric)
              ->read({.ticket = 1, .deadline = late(), .chunks = std::vector<Fabric::Chunk>(3)})
              .error()
              .code == Errc::kInvalidArgument);
    for (const UcxFabric::Options& wrong :
         {UcxFabric::Options{}, UcxFabric::Options{.rails = {"lo"}, .window_operations = 256},
          UcxFabric::Options{.rails = {"lo"}, .piece_bytes = 100},
          UcxFabric::Options{.rails = {"lo"}, .stall_timeout = Duration::zero()}}) {
      CHECK(UcxFabric::create(wrong, clock, inbox.sink()).error().code == Errc::kInvalidArgument);
    }
    const auto unknown = UcxFabric::create({.rails = {"no-such-card:1"}}, clock, inbox.sink());
    REQUIRE_FALSE(unknown);
    CHECK(unknown.error().code == Errc::kRefused);
  }
}

}  // namespace
}  // namespace pegaflow::testing
