// An owner is a process: it is killed, stopped and restarted while a reader reads from it.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <new>

#include <sys/mman.h>
#include <sys/wait.h>

#include <doctest/doctest.h>

#include "tests/support/fabric_node.h"
#include "tests/support/forked.h"
#include "tests/support/shifted_clock.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kBytes = 16 << 20;
constexpr std::size_t kPage = 256 << 10;
constexpr std::uint64_t kHolderSeed = 3;
const SteadyClock kClock;

/// Messages of the child to its parent.
struct Shared {
  Id128 incarnation;
  char address[64];
};

class HolderProcess {
 public:
  HolderProcess()
      : shared_(new(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{}),
        process_([this] {
          static const SteadyClock clock;
          static std::vector<std::byte> memory(kBytes);
          fill_pattern(memory, kHolderSeed);
          static const auto fabric =
              TcpFabric::create({}, clock, [](Fabric::Completion&&) {}).value();
          const RegionId region = fabric->register_region(memory).value();
          if (!fabric->lend(region, TimePoint::max())) throw std::runtime_error("lend");
          shared_->incarnation = fabric->describe().incarnation;
          fabric->address().copy(shared_->address, sizeof shared_->address - 1);
        }) {}
  ~HolderProcess() { ::munmap(shared_, sizeof(Shared)); }
  HolderProcess(const HolderProcess&) = delete;
  HolderProcess& operator=(const HolderProcess&) = delete;

  [[nodiscard]] FabricDescriptor describe() const {
    const auto* const text = reinterpret_cast<const std::byte*>(shared_->address);
    return {.backend = "tcp",
            .incarnation = shared_->incarnation,
            .address = {text, text + std::strlen(shared_->address)},
            .regions = {{.region = RegionId{0}, .size_bytes = kBytes}}};
  }
  [[nodiscard]] const Forked& process() const { return process_; }
  void kill() { process_.kill(); }

 private:
  Shared* shared_;
  Forked process_;
};

FabricNode::Make reader_maker(const Clock& clock = kClock) {
  return [&clock](Fabric::CompletionSink sink) -> std::unique_ptr<Fabric> {
    return TcpFabric::create({.connect_timeout = kHang, .stall_timeout = kHang}, clock,
                             std::move(sink))
        .value();
  };
}

std::vector<Fabric::Chunk> pages(const FabricNode& reader) {
  std::vector<Fabric::Chunk> chunks;
  for (std::uint64_t at = 0; at < kBytes; at += kPage) {
    chunks.push_back({.remote_region = RegionId{0},
                      .remote_offset = at,
                      .local_region = reader.region,
                      .local_offset = at,
                      .size_bytes = kPage});
  }
  return chunks;
}

/// Every completed page has the right bytes; the others have that error. Returns the number of
/// completed pages.
std::size_t check_pages(const FabricNode& reader, const Fabric::Completion& completion,
                        Errc expected) {
  std::size_t good = 0;
  for (std::size_t i = 0; i < completion.chunks.size(); ++i) {
    if (completion.chunks[i]) {
      CHECK(*completion.chunks[i] == expected);
      continue;
    }
    ++good;
    bool right = true;
    for (std::uint64_t at = i * kPage; at < (i + 1) * kPage; ++at) {
      right = right && reader.memory[at] == pattern_at(kHolderSeed, at);
    }
    CHECK(right);
  }
  return good;
}

TEST_SUITE("an owner's process") {
  TEST_CASE("is killed in the middle of reads: each read completes, and arrived bytes are right") {
    for (int round = 0; round < 5; ++round) {
      HolderProcess holder;
      FabricNode reader(reader_maker(), kBytes, 4);
      const auto peer = reader.fabric->connect(holder.describe()).value();
      for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) {
        REQUIRE(reader.fabric->read(
            {.ticket = ticket, .peer = peer, .deadline = late(), .chunks = pages(reader)}));
      }
      if (round > 0) (void)reader.inbox.take(1);

      holder.kill();

      // All reads before a slot is examined: they share the slots.
      for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) (void)reader.inbox.take(ticket);
      for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) {
        check_pages(reader, reader.inbox.take(ticket), Errc::kPeerLost);
      }
    }
  }

  TEST_CASE("is stopped: it is detected as lost, and a new one is read from at once") {
    HolderProcess stopped;
    HolderProcess other;
    ShiftedClock clock;
    FabricNode reader(reader_maker(clock), kBytes, 4);
    const auto read = [&](std::uint64_t ticket, Fabric::PeerId peer,
                          std::vector<Fabric::Chunk> chunks) {
      // Time passes faster here than any deadline could allow for.
      REQUIRE(reader.fabric->read({.ticket = ticket,
                                   .peer = peer,
                                   .deadline = TimePoint::max(),
                                   .chunks = std::move(chunks)}));
    };
    const auto peer = reader.fabric->connect(stopped.describe()).value();
    read(1, peer, pages(reader));
    CHECK(check_pages(reader, reader.inbox.take(1), Errc::kInternal) == kBytes / kPage);

    stopped.process().signal(SIGSTOP);
    int status = 0;
    REQUIRE(::waitpid(stopped.process().pid(), &status, WUNTRACED) == stopped.process().pid());
    REQUIRE(WIFSTOPPED(status));

    read(2, peer, pages(reader));
    // A connection that was dialed again is waited for as well, so it may take more than one
    // time-out.
    const TimePoint last = kClock.now() + kHang;
    while (reader.inbox.completed(2) == 0 && kClock.now() < last) {
      wait_for_iterations(*reader.fabric);
      clock.advance(kHang);
    }
    CHECK(check_pages(reader, reader.inbox.take(2), Errc::kPeerLost) == 0);
    const auto second = reader.fabric->connect(other.describe()).value();
    read(3, second, pages(reader));
    CHECK(check_pages(reader, reader.inbox.take(3), Errc::kInternal) == kBytes / kPage);

    // The stopped owner's late messages are discarded. It had requests before it was lost, and has
    // continued when it answers a new one.
    std::fill(reader.memory.begin(), reader.memory.end(), std::byte{0x5E});
    const auto anew = reader.fabric->connect(stopped.describe()).value();
    read(4, anew, {pages(reader)[0]});
    stopped.process().signal(SIGCONT);
    CHECK_FALSE(reader.inbox.take(4).chunks[0]);
    CHECK(std::all_of(reader.memory.begin() + kPage, reader.memory.end(),
                      [](std::byte byte) { return byte == std::byte{0x5E}; }));
  }

  TEST_CASE("ends, and another process has its address: nothing is read") {
    HolderProcess holder;
    HolderProcess other;
    FabricDescriptor mixed = other.describe();
    mixed.incarnation = holder.describe().incarnation;
    FabricNode reader(reader_maker(), kBytes, 4);
    const auto peer = reader.fabric->connect(mixed).value();

    CHECK(check_pages(reader, reader.read(peer, pages(reader)), Errc::kGone) == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
