#include <algorithm>
#include <array>
#include <bit>
#include <csignal>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <linux/sched.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/pidfd.h"
#include "base/os/unique_fd.h"
#include "tests/support/engine_memory.h"
#include "tests/support/forked.h"
#include "tests/support/refuse.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "tests/unit/transport/completions.h"
#include "transport/host/host_device.h"
#include "transport/host/peer_reader.h"

namespace pegaflow {
namespace {

using harness::Mapping;
using testing::Completions;
using testing::Forked;
using Direction = Device::Direction;

constexpr std::uint64_t kPeer = 7;
constexpr std::uint64_t kContent = 1234;

UniqueFd pidfd_of(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

/// Another process with this number, which copies the memory of this one and waits for its end. No
/// value where that needs more rights.
std::optional<pid_t> fork_as(pid_t number) {
  clone_args arguments{};
  arguments.exit_signal = SIGCHLD;
  arguments.set_tid = std::bit_cast<std::uintptr_t>(&number);
  arguments.set_tid_size = 1;
  const auto pid = static_cast<pid_t>(::syscall(SYS_clone3, &arguments, sizeof arguments));
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) ::pause();
  }
  if (pid < 0) return std::nullopt;
  return pid;
}

void wait_for_end(int pidfd) {
  pollfd wanted{pidfd, POLLIN, 0};
  REQUIRE(::poll(&wanted, 1, 30'000) == 1);
}

/// Another engine: in its process `memory` has the pattern of kContent, at the same addresses at
/// which this process has zeros.
struct PeerProcess {
  static void fill(const Mapping& memory) { harness::write_pattern(memory.bytes(), kContent); }

  explicit PeerProcess(
      std::size_t bytes, const std::function<void(const Mapping&)>& then = [](const Mapping&) {})
      : memory(Mapping::anonymous(bytes).value()),
        child([&] {
          fill(memory);
          then(memory);
        }),
        pidfd(pidfd_of(child.pid())),
        content(bytes) {
    harness::write_pattern(content, kContent);
  }

  [[nodiscard]] PeerMemory description(std::span<const Segment> segments,
                                       std::uint64_t blocks) const {
    return {.segments = {segments.begin(), segments.end()},
            .block_count = blocks,
            .process = pidfd.get()};
  }
  [[nodiscard]] PeerMemory description(const PageLayout& layout) const {
    return description(layout.segments(), layout.block_count());
  }
  /// The bytes that the peer has in a segment of a block.
  [[nodiscard]] const std::byte* content_of(const Segment& segment, std::uint64_t block) const {
    return content.data() + (segment.base - memory.bytes().data()) +
           block * segment.block_stride_bytes;
  }

  Mapping memory;
  Forked child;
  UniqueFd pidfd;
  std::vector<std::byte> content;
};

Error error_of(const Result<void>& result) {
  REQUIRE_FALSE(result);
  return result.error();
}

/// Segments of these sizes for as many blocks as fit: either in one allocation each, or block by
/// block, so that segments and blocks may adjoin each other.
std::vector<Segment> place(std::span<std::byte> memory, std::span<const std::uint64_t> sizes,
                           std::uint64_t& blocks, std::mt19937_64& random) {
  const std::uint64_t gap = random() % 3 == 0 ? 0 : random() % 100;
  std::uint64_t step = 0;
  for (const std::uint64_t size : sizes) step += size + gap;
  blocks = std::min(blocks, memory.size() / step);
  const bool by_block = random() % 2 == 0;
  std::vector<Segment> segments;
  std::byte* at = memory.data();
  for (const std::uint64_t size : sizes) {
    segments.push_back({at, by_block ? step : size + gap, size});
    at += by_block ? size + gap : (size + gap) * blocks;
  }
  return segments;
}

/// A HostDevice whose one layout and the peer's are the same blocks at the same addresses.
struct Fixture {
  explicit Fixture(
      int threads, std::uint64_t blocks = 64, std::uint64_t block_bytes = 64 * 1024,
      const std::function<void(const Mapping&)>& then = [](const Mapping&) {})
      : peer(blocks * block_bytes, then),
        layout(PageLayout::create(
                   {{peer.memory.bytes().data(), block_bytes, block_bytes / 2},
                    {peer.memory.bytes().data() + block_bytes / 2, block_bytes, block_bytes / 2}},
                   blocks)
                   .value()),
        pool(layout.page_bytes()),
        device(HostDevice::create({.threads = threads}).value()) {
    REQUIRE(device->attach(layout, pool, completions.sink()));
  }

  /// Reads each block of the peer into the block with the same number.
  [[nodiscard]] Device::Batch batch(std::uint64_t ticket, std::uint32_t first = 0) const {
    Device::Batch batch{.ticket = ticket, .direction = Direction::kLoad, .copies = {}};
    batch.peer = kPeer;
    for (std::uint32_t i = first; i < layout.block_count(); ++i) batch.copies.push_back({i, i});
    return batch;
  }
  [[nodiscard]] bool holds(std::uint64_t block) const {
    const std::uint64_t bytes = layout.page_bytes();
    return std::memcmp(peer.memory.bytes().data() + block * bytes,
                       peer.content.data() + block * bytes, bytes) == 0;
  }
  [[nodiscard]] std::size_t count_held(std::size_t first, std::size_t count) const {
    std::size_t held = 0;
    for (std::size_t block = first; block < first + count; ++block) held += holds(block) ? 1 : 0;
    return held;
  }

  PeerProcess peer;
  PageLayout layout;
  std::vector<std::byte> pool;
  Completions completions;
  std::unique_ptr<HostDevice> device;
};

/// Ends the child with this text unless `right`.
void expect(bool right, const std::string& text) {
  if (!right) throw std::runtime_error(text);
}

void check_round(const PeerProcess& peer, std::mt19937_64& random, std::size_t segment_count) {
  std::vector<std::uint64_t> sizes(segment_count);
  for (std::uint64_t& size : sizes) size = 1 + random() % (segment_count > 100 ? 60 : 20'000);
  std::vector<std::byte> mine(1 << 20);
  std::uint64_t blocks = 1 + random() % 60;
  std::uint64_t peer_blocks = 1 + random() % 60;
  const std::vector<Segment> theirs = place(peer.memory.bytes(), sizes, peer_blocks, random);
  const auto layout = PageLayout::create(place(mine, sizes, blocks, random), blocks).value();
  std::vector<std::byte> pool(layout.page_bytes());
  Completions completions;
  auto device = HostDevice::create({.threads = static_cast<int>(1 + random() % 4)}).value();
  REQUIRE(device->attach(layout, pool, completions.sink()));
  REQUIRE(device->add_peer(kPeer, peer.description(theirs, peer_blocks)));

  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
  std::vector<std::byte> expected(mine.size());
  std::size_t batches = 0;
  for (std::size_t next = 0; next < blocks;) {
    Device::Batch batch{.ticket = ++batches, .direction = Direction::kLoad, .copies = {}};
    batch.peer = kPeer;
    for (std::size_t left = 1 + random() % 30; left > 0 && next < blocks; --left, ++next) {
      const std::uint64_t from = random() % peer_blocks;
      batch.copies.push_back({order[next], from});
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const Segment& local = layout.segments()[i];
        std::copy_n(
            peer.content_of(theirs[i], from), sizes[i],
            expected.data() + (local.base - mine.data()) + order[next] * local.block_stride_bytes);
      }
    }
    REQUIRE(device->submit(std::move(batch)));
  }

  for (const Device::Completion& done : completions.wait_for(batches)) CHECK_FALSE(done.error);
  CHECK(mine == expected);
}

TEST_SUITE("HostDevice and its peers") {
  TEST_CASE("blocks of a peer arrive over random layouts, orders, threads and batches") {
    std::mt19937_64 random(testing::seed());
    const PeerProcess peer(1 << 20);
    for (int round = 0; round < 60; ++round) check_round(peer, random, 1 + random() % 6);
  }

  TEST_CASE("a page may have more segments than a call of the kernel takes") {
    std::mt19937_64 random(testing::seed());
    const PeerProcess peer(1 << 20);
    for (const std::size_t segments : {1023UL, 1024UL, 1025UL, 3000UL}) {
      check_round(peer, random, segments);
      check_round(peer, random, segments);
    }
  }

  TEST_CASE("a checksum is that of the page that was read, for the pages that request one") {
    Fixture f(2);
    REQUIRE(f.device->add_peer(kPeer, f.peer.description(f.layout)));
    Device::Batch batch = f.batch(1);
    for (std::size_t i = 0; i < batch.copies.size(); i += 3) batch.copies[i].checksum = true;

    REQUIRE(f.device->submit(batch));

    const auto done = f.completions.wait_for(1);
    REQUIRE(done[0].checksums.size() == batch.copies.size());
    for (std::size_t i = 0; i < batch.copies.size(); ++i) {
      const std::span page(f.peer.content.data() + i * f.layout.page_bytes(),
                           f.layout.page_bytes());
      CHECK(done[0].checksums[i] == (i % 3 == 0 ? PageChecksum::of(page) : kNoChecksum));
    }
  }

  TEST_CASE("an engine of the same process is a peer too") {
    const UniqueFd own = pidfd_of(::getpid());
    testing::EngineMemory from = testing::engine_memory(3, 5'000, 8);
    testing::EngineMemory to = testing::engine_memory(3, 5'000, 8, 0);
    from.fill(5, 99);
    std::vector<std::byte> pool(1);
    Completions completions;
    auto device = HostDevice::create({}).value();
    REQUIRE(device->attach(to.layout(), pool, completions.sink()));
    REQUIRE(device->add_peer(
        kPeer, {.segments = {from.layout().segments().begin(), from.layout().segments().end()},
                .block_count = 8,
                .process = own.get()}));

    Device::Batch batch{.ticket = 1, .direction = Direction::kLoad, .copies = {{2, 5}}};
    batch.peer = kPeer;
    REQUIRE(device->submit(batch));

    CHECK_FALSE(completions.wait_for(1)[0].error);
    CHECK(to.holds(2, 99));
  }
}

TEST_SUITE("HostDevice and failing peers") {
  TEST_CASE("no page of a peer that has ended counts, whether it was reaped or not") {
    for (const bool reaped : {false, true}) {
      Fixture f(1);
      REQUIRE(f.device->add_peer(kPeer, f.peer.description(f.layout)));
      f.completions.hold();
      REQUIRE(f.device->submit({.ticket = 1, .direction = Direction::kLoad, .copies = {}}));
      f.completions.wait_for(1);  // The only thread is in the sink.
      REQUIRE(f.device->submit(f.batch(2)));
      f.peer.child.signal(SIGKILL);
      wait_for_end(f.peer.pidfd.get());
      if (reaped) f.peer.child.kill();

      f.completions.release();

      const auto done = f.completions.wait_for(2);
      REQUIRE(done[1].error);
      CHECK(done[1].error->code == Errc::kGone);
      CHECK(done[1].copied == 0);
      CHECK(error_of(f.device->add_peer(8, f.peer.description(f.layout))).code == Errc::kGone);
    }
  }

  TEST_CASE(
      "a process that received the number of a peer that has ended is not read in its place") {
    Fixture f(1);
    const pid_t number = f.peer.child.pid();
    REQUIRE(f.device->add_peer(kPeer, f.peer.description(f.layout)));
    f.completions.hold();
    REQUIRE(f.device->submit({.ticket = 1, .direction = Direction::kLoad, .copies = {}}));
    f.completions.wait_for(1);  // The only thread is in the sink.
    REQUIRE(f.device->submit(f.batch(2)));
    f.peer.child.kill();
    const std::optional<pid_t> other = fork_as(number);

    f.completions.release();

    const Device::Completion done = f.completions.wait_for(2)[1];
    if (other) {
      ::kill(*other, SIGKILL);
      ::waitpid(*other, nullptr, 0);
    }
    REQUIRE(done.error);
    CHECK(done.error->code == Errc::kGone);
    CHECK(done.copied == 0);
    if (!other) PEGA_SKIP("this user may not choose the number of a process");
  }

  TEST_CASE("when a peer is killed at any time, the pages that count are its own") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 40; ++round) {
      Fixture f(1 + static_cast<int>(random() % 3), 256);
      REQUIRE(f.device->add_peer(kPeer, f.peer.description(f.layout)));
      Device::Batch batch = f.batch(1);
      for (Device::Copy& copy : batch.copies) copy.checksum = true;
      REQUIRE(f.device->submit(batch));
      for (std::size_t spins = random() % 4'000'000; spins > 0; --spins) {
        asm volatile("" ::: "memory");
      }

      f.peer.child.kill();

      const Device::Completion done = f.completions.wait_for(1)[0];
      CHECK(f.count_held(0, done.copied) == done.copied);
      CHECK(done.error.has_value() == (done.copied < batch.copies.size()));
      if (done.error) CHECK(done.error->code == Errc::kGone);
      for (std::size_t i = 0; i < done.checksums.size(); ++i) {
        CHECK((done.checksums[i] == kNoChecksum) == (i >= done.copied));
      }
    }
  }

  TEST_CASE("no page counts from the first unreadable one on, with any number of threads") {
    constexpr std::uint64_t kBytes = 64 * 1024;
    for (int threads = 1; threads <= 4; ++threads) {
      Fixture f(threads, 64, kBytes, [](const Mapping& memory) {
        for (const std::size_t block : {21, 23, 50}) {
          expect(::munmap(memory.bytes().data() + block * kBytes, kBytes) == 0, "munmap failed");
        }
      });
      REQUIRE(f.device->add_peer(kPeer, f.peer.description(f.layout)));
      Device::Batch batch = f.batch(1);
      for (Device::Copy& copy : batch.copies) copy.checksum = true;
      REQUIRE(f.device->submit(batch));
      REQUIRE(f.device->submit(f.batch(2, 23)));  // Whose first page is unreadable.

      auto done = f.completions.wait_for(2);
      std::ranges::sort(done, {}, &Device::Completion::ticket);
      CHECK(done[0].copied == 21);
      CHECK(f.count_held(0, 21) == 21);
      CHECK(done[0].checksums[20] != kNoChecksum);
      CHECK(std::all_of(done[0].checksums.begin() + 21, done[0].checksums.end(),
                        [](std::uint64_t checksum) { return checksum == kNoChecksum; }));
      CHECK(done[1].copied == 0);
      for (const Device::Completion& one : done) {
        REQUIRE(one.error);
        CHECK(one.error->code == Errc::kIo);
        CHECK(one.error->detail.starts_with("process_vm_readv from process"));
      }
    }
  }

  TEST_CASE("after a cancel or detach at any time, the pages that count are complete") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 40; ++round) {
      Fixture f(1 + static_cast<int>(random() % 3), 256);
      REQUIRE(f.device->add_peer(kPeer, f.peer.description(f.layout)));
      REQUIRE(f.device->submit(f.batch(1)));
      for (std::size_t spins = random() % 2'000'000; spins > 0; --spins) {
        asm volatile("" ::: "memory");
      }

      if (round % 2 == 0) {
        f.device->cancel(1);
      } else {
        f.device->detach();
      }

      const Device::Completion done = f.completions.wait_for(1)[0];
      CHECK(f.count_held(0, done.copied) == done.copied);
      CHECK(f.count_held(done.copied, 256 - done.copied) == 0);
      CHECK(done.error.has_value() == (done.copied < 256));
      if (done.error) CHECK(done.error->code == Errc::kCancelled);
    }
  }
}

TEST_SUITE("HostDevice::add_peer") {
  TEST_CASE("memory that does not fit this engine's is rejected") {
    Fixture f(1, 4);
    PeerMemory memory = f.peer.description(f.layout);
    const auto code = [&] { return error_of(f.device->add_peer(kPeer, memory)).code; };

    memory.segments[1].size_bytes -= 1;
    CHECK(code() == Errc::kRefused);
    memory = f.peer.description(f.layout);
    memory.segments.pop_back();
    CHECK(code() == Errc::kRefused);
    memory.segments.clear();
    CHECK(error_of(f.device->add_peer(kPeer, memory)).detail ==
          "add peer: its 0 segments differ in number or size from the 2 of this engine");

    memory = f.peer.description(f.layout);
    memory.block_count = 0;
    CHECK(code() == Errc::kInvalidArgument);
    memory.block_count = ~std::uint64_t{0};
    CHECK(code() == Errc::kInvalidArgument);
    memory.block_count = 2;
    memory.segments[1].block_stride_bytes = ~std::uint64_t{0} - 100;
    CHECK(code() == Errc::kInvalidArgument);

    memory = f.peer.description(f.layout);
    memory.segments[0].base = nullptr;
    CHECK(code() == Errc::kIo);

    memory = f.peer.description(f.layout);
    memory.handles.resize(memory.segments.size());
    const Error on_gpu = error_of(f.device->add_peer(kPeer, memory));
    CHECK(on_gpu.code == Errc::kRefused);
    CHECK(on_gpu.detail == "add peer: its memory is on a GPU, and that of this engine is not");
  }

  TEST_CASE("names are not 0, belong to one peer, and end with remove_peer() or detach()") {
    Fixture f(1, 4);
    const PeerMemory memory = f.peer.description(f.layout);
    CHECK(error_of(f.device->add_peer(0, memory)).code == Errc::kInvalidArgument);
    REQUIRE(f.device->add_peer(kPeer, memory));
    CHECK(error_of(f.device->add_peer(kPeer, memory)).code == Errc::kInvalidArgument);

    f.device->remove_peer(kPeer);
    f.device->remove_peer(99);  // An unknown name.
    CHECK(error_of(f.device->submit(f.batch(1))).detail == "batch 1: unknown peer 7");
    REQUIRE(f.device->add_peer(kPeer, memory));

    f.device->detach();
    CHECK(error_of(f.device->add_peer(8, memory)).code == Errc::kGone);
    REQUIRE(f.device->attach(f.layout, f.pool, f.completions.sink()));
    CHECK(error_of(f.device->submit(f.batch(1))).code == Errc::kInvalidArgument);
  }

  TEST_CASE("batches with a peer that are saves, of another layout or out of range are rejected") {
    Fixture f(1, 4);
    f.device->detach();
    const std::array<PageLayout, 2> layouts{f.layout, f.layout};
    REQUIRE(f.device->attach(layouts, f.pool, f.completions.sink()));
    PeerMemory memory = f.peer.description(f.layout);
    memory.block_count = 3;
    REQUIRE(f.device->add_peer(kPeer, memory));
    const auto code = [&](Direction direction, std::size_t layout, const Device::Copy& copy) {
      Device::Batch batch{.ticket = 1, .direction = direction, .copies = {copy}};
      batch.layout = layout;
      batch.peer = kPeer;
      return error_of(f.device->submit(batch)).code;
    };

    CHECK(code(Direction::kSave, 0, {0, 0}) == Errc::kInvalidArgument);
    CHECK(code(Direction::kLoad, 1, {0, 0}) == Errc::kInvalidArgument);
    CHECK(code(Direction::kLoad, 0, {4, 0}) == Errc::kInvalidArgument);
    CHECK(code(Direction::kLoad, 0, {0, 3}) == Errc::kInvalidArgument);
    Device::Batch good{.ticket = 1, .direction = Direction::kLoad, .copies = {{3, 2}}};
    good.peer = kPeer;
    REQUIRE(f.device->submit(good));
    CHECK_FALSE(f.completions.wait_for(1)[0].error);
  }

  TEST_CASE("a descriptor other than a pidfd is refused") {
    Fixture f(1, 4);
    PeerMemory memory = f.peer.description(f.layout);
    memory.process = STDERR_FILENO;
    CHECK(error_of(f.device->add_peer(kPeer, memory)).code == Errc::kRefused);
    memory.process = -1;
    CHECK(error_of(f.device->add_peer(kPeer, memory)).code == Errc::kRefused);
  }

  TEST_CASE("a process outside of this engine's PID namespace is refused") {
    if (!testing::may_make_pid_namespaces()) PEGA_SKIP("this user may not make a PID namespace");
    const PeerProcess peer(4096);
    const auto layout = PageLayout::create({{peer.memory.bytes().data(), 4096, 4096}}, 1).value();
    // The child's /proc is that of the outer namespace and lists the peer.
    const Forked inside(
        [&] {
          const auto reader = PeerReader::open(peer.description(layout), layout);
          expect(!reader && reader.error().code == Errc::kRefused, "the peer was not refused");
          expect(reader.error().detail.find("PID namespace") != std::string::npos,
                 reader.error().detail);
        },
        {.new_pid_namespace = true});
  }

  TEST_CASE("a kernel that forbids reads of other processes is named in the error") {
    const PeerProcess peer(4096);
    const auto layout = PageLayout::create({{peer.memory.bytes().data(), 4096, 4096}}, 1).value();
    const Forked filtered([&] {
      const auto named = [](const Error& error) {
        expect(error.code == Errc::kRefused, to_string(error));
        expect(error.detail.find("kernel.yama.ptrace_scope") != std::string::npos, error.detail);
        expect(error.detail.find("CAP_SYS_PTRACE") != std::string::npos, error.detail);
      };
      const PeerReader before = PeerReader::open(peer.description(layout), layout).value();
      expect(testing::forbid_reads_of_processes(), "the kernel has no filters");
      const std::array<Device::Copy, 1> copies{{{0, 0}}};
      const PeerReader::Outcome outcome = before.read(layout, copies);
      expect(outcome.copied == 0 && outcome.error.has_value(), "the read was not refused");
      named(*outcome.error);

      std::vector<std::byte> pool(1);
      auto device = HostDevice::create({}).value();
      expect(device->attach(layout, pool, [](Device::Completion&&) {}).has_value(), "attach");
      const auto added = device->add_peer(kPeer, peer.description(layout));
      expect(!added, "the peer was added");
      named(added.error());
    });
  }
}

/// A device that implements only what it must.
class PlainDevice final : public Device {
 public:
  Result<void> attach(std::span<const PageLayout>, std::span<std::byte>, CompletionSink) override {
    return {};
  }
  void detach() override {}
  Result<Event> record_event(Queue) override { return Event::kNow; }
  Result<void> submit(Batch) override { return {}; }
  void cancel(std::uint64_t) override {}
};

TEST_SUITE("Device") {
  TEST_CASE("a device that cannot read peers refuses them") {
    PlainDevice device;
    CHECK(error_of(device.add_peer(kPeer, {})).code == Errc::kRefused);
    device.remove_peer(kPeer);
  }
}

}  // namespace
}  // namespace pegaflow
