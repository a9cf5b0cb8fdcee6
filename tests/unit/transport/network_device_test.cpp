#include "transport/network_device.h"

#include <limits>
#include <stdexcept>
#include <string>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/transport/network_conformance.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::testing {
namespace {

using Direction = Device::Direction;

struct TcpBackend {
  static constexpr int kRounds = 30;
  static constexpr bool kMayEnd = true;
  static Result<std::unique_ptr<Fabric>> make(Fabric::CompletionSink sink) {
    static const SteadyClock clock;
    return TcpFabric::create({}, clock, std::move(sink));
  }
};

/// Small pieces, and one connection with a window that is hardly larger than a piece.
struct NarrowTcpBackend {
  static constexpr int kRounds = 15;
  static constexpr bool kMayEnd = true;
  static Result<std::unique_ptr<Fabric>> make(Fabric::CompletionSink sink) {
    static const SteadyClock clock;
    return TcpFabric::create({.connections = 1, .piece_bytes = 5000, .window_bytes = 12000}, clock,
                             std::move(sink));
  }
};

TEST_CASE_TEMPLATE_INVOKE(network_conformance, TcpBackend, NarrowTcpBackend);

/// An engine that is read, and one that reads, of 8 blocks each.
struct Pair {
  Pair()
      : owner(&TcpBackend::make, four_segments(512, 8), 1 << 20, 16),
        reader(&TcpBackend::make, four_segments(512, 8)),
        memory(owner.shared()) {
    for (std::uint64_t block = 0; block < 8; ++block) owner.write(block, 50 + block);
  }
  /// The error of adding what the test has changed in `memory`, which is then whole again.
  Error refused() {
    Error error = error_of(reader.device->add_peer(kOtherHost, memory));
    memory = owner.shared();
    return error;
  }
  Error rejected(const Device::Batch& batch) const {
    return error_of(reader.device->submit(batch));
  }

  NetworkEngine owner;
  NetworkEngine reader;
  PeerMemory memory;
};

UniqueFd own_pidfd() {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
}

/// A device whose memory no process of this host can read, as that of a GPU without CUDA IPC.
class Unshared final : public Device {
 public:
  Result<void> attach(std::span<const PageLayout>, std::span<std::byte>, CompletionSink) override {
    return {};
  }
  void detach() override {}
  Result<PeerMemory> share(const PageLayout&, std::span<std::byte>) override {
    return fail(Errc::kRefused, "no process of this host can read it");
  }
  Result<Event> record_event(Queue) override { return Event{17}; }
  Result<bool> complete_early(std::uint64_t ticket, Queue, Duration) override {
    return ticket == 3;
  }
  Result<void> submit(Batch) override { return {}; }
  void cancel(std::uint64_t ticket) override { cancelled.push_back(ticket); }

  std::vector<std::uint64_t> cancelled;
};

struct UnsharedFixture {
  UnsharedFixture()
      : memory(1 << 16),
        guards(8),
        layout(four_segments(64, 4)(memory)),
        inner(std::make_shared<Unshared>()),
        device(NetworkDevice::create(inner, layout, &TcpBackend::make, clock, {}).value()) {}

  SteadyClock clock;
  std::vector<std::byte> memory;
  std::vector<std::uint64_t> guards;
  PageLayout layout;
  std::shared_ptr<Unshared> inner;
  std::unique_ptr<NetworkDevice> device;
};

TEST_SUITE("NetworkDevice::create") {
  Result<std::unique_ptr<NetworkDevice>> create(const PageLayout& layout,
                                                const NetworkDevice::Options& options) {
    static const SteadyClock clock;
    return NetworkDevice::create(HostDevice::create({}).value(), layout, &TcpBackend::make, clock,
                                 options);
  }

  TEST_CASE("options out of range are rejected") {
    std::vector<std::byte> memory(4096);
    const PageLayout layout = four_segments(64, 4)(memory);
    CHECK(create(layout, {.patience = Duration::zero()}).error().code == Errc::kInvalidArgument);
    CHECK(create(layout, {.max_batches = 0}).error().detail ==
          "the number of reads in flight is 0, outside of 1 to 1024");
    CHECK(create(layout, {.max_batches = 1025}).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("memory in too many ranges is refused, unless the ranges adjoin") {
    std::vector<std::byte> memory(4096);
    std::byte* const base = memory.data();
    const auto apart =
        PageLayout::create({{base, 64, 64}, {base + 512, 64, 64}, {base + 1024, 64, 64}}, 4);
    const auto adjoining =
        PageLayout::create({{base, 64, 64}, {base + 256, 64, 64}, {base + 512, 64, 64}}, 4);
    CHECK(create(*apart, {.max_regions = 3}));
    const auto refused = create(*apart, {.max_regions = 2});
    CHECK(refused.error().code == Errc::kRefused);
    CHECK(refused.error().detail ==
          "the memory of the engine's blocks consists of 3 ranges, and the network registers 2 at "
          "most");
    CHECK(create(*adjoining, {.max_regions = 1}));
  }

  TEST_CASE("a fabric that cannot be made is reported, and the other device stays attached") {
    static const SteadyClock clock;
    std::vector<std::byte> memory(4096);
    const PageLayout layout = four_segments(64, 4)(memory);
    const std::shared_ptr<Device> inner = HostDevice::create({}).value();
    std::vector<std::byte> pool(4096);
    Completions completions;
    REQUIRE(inner->attach(layout, pool, completions.sink()));
    const auto make = [](const Fabric::CompletionSink&) -> Result<std::unique_ptr<Fabric>> {
      return fail(Errc::kIo, "there is no network");
    };

    CHECK(NetworkDevice::create(inner, layout, make, clock, {}).error().detail ==
          "there is no network");
    REQUIRE(inner->submit({.ticket = 1, .direction = Direction::kLoad, .copies = {}}));
    completions.wait_for(1);
  }
}

TEST_SUITE("NetworkDevice::share") {
  TEST_CASE("the same guards are lent once, and others beside them") {
    Pair p;
    const PeerMemory again = p.owner.shared();
    CHECK(again.network->guards == p.memory.network->guards);
    CHECK(again.network->segments == p.memory.network->segments);
    CHECK(again.network->fabric.regions.size() == p.memory.network->fabric.regions.size());

    std::vector<std::uint64_t> more(4);
    const auto other =
        p.owner.device->share(p.owner.layout, std::as_writable_bytes(std::span(more)));
    CHECK(other->network->guards != p.memory.network->guards);
  }

  TEST_CASE("without guards, only processes of this host can read the memory") {
    Pair p;
    const auto shared = p.owner.device->share(p.owner.layout, {});
    CHECK_FALSE(shared->network);
    CHECK(shared->segments.size() == 4);
    UnsharedFixture f;
    CHECK(f.device->share(f.layout, {}).error().code == Errc::kRefused);
  }

  TEST_CASE("other hosts can read memory that processes of this host cannot") {
    UnsharedFixture f;
    const auto shared = f.device->share(f.layout, std::as_writable_bytes(std::span(f.guards)));
    REQUIRE(shared);
    CHECK(shared->segments.size() == 4);
    CHECK(shared->block_count == 4);
    CHECK(shared->handles.empty());
    REQUIRE(shared->network);
    NetworkEngine reader(&TcpBackend::make, four_segments(64, 4));
    CHECK(reader.device->add_peer(kOtherHost, *shared));
  }

  TEST_CASE("guards that are no words, and layouts that were not lent, are rejected") {
    Pair p;
    const auto error = [&](std::span<std::byte> guards) {
      return p.owner.device->share(p.owner.layout, guards).error();
    };
    const std::span<std::byte> guards = p.owner.guards.memory.bytes();
    CHECK(error(guards.first(12)).code == Errc::kInvalidArgument);
    CHECK(error(guards.subspan(4, 8)).code == Errc::kInvalidArgument);
    CHECK(
        p.owner.device->share(p.reader.layout, guards).error().detail.starts_with("segment 0 at"));
  }

  TEST_CASE("there are 16 arrays of guards at most") {
    Pair p;
    const std::span<std::byte> guards = p.owner.guards.memory.bytes();
    for (std::size_t i = 1; i < 16; ++i) {
      REQUIRE(p.owner.device->share(p.owner.layout, guards.first(8 * i)));
    }
    CHECK(p.owner.device->share(p.owner.layout, guards.subspan(8, 8)).error().code ==
          Errc::kOutOfCapacity);
  }
}

TEST_SUITE("NetworkDevice::unshare") {
  TEST_CASE("other hosts read neither blocks nor guards any longer, and nothing is shared again") {
    Pair p;
    NetworkDevice& owner = *p.owner.device;
    REQUIRE(p.reader.device->add_peer(kOtherHost, p.memory));
    REQUIRE(p.reader.device->submit(load(1, {{0, 0}}, {1})));
    CHECK(p.reader.completions.wait_for(1)[0].guards.size() == 1);

    owner.detach();
    owner.unshare();
    owner.unshare();
    REQUIRE(p.reader.device->submit(load(2, {{0, 0}})));
    REQUIRE(p.reader.device->submit(load(3, {}, {1})));

    for (const Device::Completion& done : p.reader.completions.wait_for(3)) {
      if (done.ticket == 1) continue;
      CHECK(done.error.has_value() == (done.ticket == 2));
      if (done.error) CHECK(done.error->code == Errc::kGone);
      CHECK(done.guards.empty());
    }
    CHECK_FALSE(owner.share(p.owner.layout, p.owner.guards.memory.bytes()));
    CHECK(error_of(owner.attach(p.owner.layout, p.owner.pool, p.owner.completions.sink())).code ==
          Errc::kInvalidArgument);
  }
}

TEST_SUITE("NetworkDevice::add_peer") {
  TEST_CASE("memory that does not fit this engine's is rejected") {
    Pair p;
    p.memory.segments[1].size_bytes -= 1;
    CHECK(p.refused().code == Errc::kRefused);
    p.memory.segments.pop_back();
    CHECK(p.refused().detail ==
          "add peer: its 3 segments differ in number or size from the 4 of this engine");
    p.memory.block_count = 0;
    CHECK(p.refused().code == Errc::kInvalidArgument);
    p.memory.network->segments.pop_back();
    CHECK(p.refused().detail == "add peer: 3 places for 4 segments");
  }

  TEST_CASE("blocks and guards outside of the regions that the peer describes are rejected") {
    Pair p;
    const auto invalid = [&](const std::string& named) {
      const Error error = p.refused();
      CAPTURE(error.detail);
      CHECK(error.code == Errc::kInvalidArgument);
      CHECK(error.detail.find(named) != std::string::npos);
    };
    p.memory.block_count = 9;
    invalid("segment 2 has 9 blocks of 512 bytes at a stride of 1024 from offset 8192 on");
    p.memory.block_count = std::numeric_limits<std::uint64_t>::max();
    invalid("segment 0 has 18446744073709551615 blocks");
    p.memory.segments[2].block_stride_bytes = std::numeric_limits<std::uint64_t>::max() / 7;
    invalid("segment 2 has");
    p.memory.network->segments[3].offset += 1;
    invalid("segment 3 has");
    p.memory.network->segments[3].offset = std::numeric_limits<std::uint64_t>::max();
    invalid("from offset 18446744073709551615");
    p.memory.network->segments[1].region = RegionId{99};
    invalid("segment 1 is in region 99");
    p.memory.network->guards = RegionId{98};
    invalid("its guards are in region 98");
    for (RegionDescriptor& region : p.memory.network->fabric.regions) {
      if (region.region == p.memory.network->guards) region.size_bytes = 127;
    }
    invalid("its guards have 127 bytes");
    p.memory.network->fabric.address.clear();
    invalid("");
    p.memory.network->fabric.backend = "ib";
    CHECK(p.refused().code == Errc::kRefused);
    CHECK(p.reader.device->add_peer(kOtherHost, p.memory));
  }

  TEST_CASE("names are not 0, belong to one peer of any host, and end with it or with detach()") {
    Pair p;
    NetworkDevice& device = *p.reader.device;
    const UniqueFd self = own_pidfd();
    PeerMemory local = p.memory;
    local.process = self.get();
    const auto code = [&](std::uint64_t name, const PeerMemory& memory) {
      return error_of(device.add_peer(name, memory)).code;
    };
    CHECK(code(0, p.memory) == Errc::kInvalidArgument);
    CHECK(code(0, local) == Errc::kInvalidArgument);
    REQUIRE(device.add_peer(1, p.memory));
    REQUIRE(device.add_peer(2, local));
    CHECK(code(1, local) == Errc::kInvalidArgument);
    CHECK(code(2, p.memory) == Errc::kInvalidArgument);
    CHECK(error_of(device.add_peer(1, p.memory)).detail ==
          "add peer: 1 is 0 or the name of another peer");

    device.remove_peer(1);
    device.remove_peer(2);
    device.remove_peer(99);  // An unknown name.
    REQUIRE(device.add_peer(1, local));
    REQUIRE(device.add_peer(2, p.memory));

    device.detach();
    device.detach();
    CHECK(code(3, p.memory) == Errc::kGone);
    REQUIRE(device.attach(p.reader.layout, p.reader.pool, p.reader.completions.sink()));
    Device::Batch batch = load(1, {{0, 0}});
    batch.peer = 2;
    CHECK(p.rejected(batch).detail == "batch 1: unknown peer 2");
    REQUIRE(device.add_peer(2, p.memory));
    REQUIRE(device.submit(batch));
    CHECK_FALSE(p.reader.completions.wait_for(1)[0].error);
  }

  TEST_CASE("a name that the other device has refused is free again") {
    Pair p;
    PeerMemory local = p.memory;
    local.process = STDERR_FILENO;
    CHECK(error_of(p.reader.device->add_peer(kOtherHost, local)).code == Errc::kRefused);
    CHECK(p.reader.device->add_peer(kOtherHost, p.memory));
  }

  TEST_CASE("a device without a network refuses the memory of another host") {
    Pair p;
    auto alone = HostDevice::create({}).value();
    CHECK(error_of(alone->add_peer(kOtherHost, p.memory)).detail ==
          "add peer: its memory is on another host, and this device has no network");
  }
}

TEST_SUITE("NetworkDevice::submit") {
  TEST_CASE("batches that are out of range or of another kind are rejected") {
    Pair p;
    p.reader.device->detach();
    const std::vector<PageLayout> layouts(2, p.reader.layout);
    REQUIRE(p.reader.device->attach(layouts, p.reader.pool, p.reader.completions.sink()));
    // Fewer blocks than the reader has.
    p.memory.block_count = 7;
    REQUIRE(p.reader.device->add_peer(kOtherHost, p.memory));
    const auto detail = [&](const Device::Batch& batch) {
      const Error error = p.rejected(batch);
      CHECK(error.code == Errc::kInvalidArgument);
      return error.detail;
    };
    CHECK(detail(load(1, {{8, 0}})) == "block 8 of 8, from block 0 of 7 of peer 7");
    CHECK(detail(load(1, {{0, 7}})) == "block 0 of 8, from block 7 of 7 of peer 7");
    CHECK(detail(load(1, {{0, 0}}, {16})) == "batch 1: guard 16 of 16 of peer 7");
    CHECK(detail(load(1, {{0, 0, true}})) ==
          "batch 1: block 0 is read from another host, without a checksum");
    Device::Batch batch = load(1, {{0, 0}});
    batch.direction = Direction::kSave;
    CHECK(detail(batch) == "batch 1: only loads of layout 0 read a peer");
    batch = load(1, {{0, 0}});
    batch.layout = 1;
    CHECK(detail(batch) == "batch 1: only loads of layout 0 read a peer");
    batch = load(1, {{0, 0}});
    batch.after = Device::Event{5};
    CHECK(detail(batch) == "batch 1: a read from another host cannot wait for event 5");
    batch = load(1, {{0, 0}});
    batch.peer = 12;
    CHECK(detail(batch) == "batch 1: unknown peer 12");

    REQUIRE(p.reader.device->submit(load(1, {{7, 6}}, {15})));
    CHECK_FALSE(p.reader.completions.wait_for(1)[0].error);
    CHECK(p.reader.holds(7, 56));
  }

  TEST_CASE("saves, loads and peers of this host work beside reads from another one") {
    Pair p;
    const UniqueFd self = own_pidfd();
    NetworkDevice& device = *p.reader.device;
    PeerMemory local = p.memory;
    local.process = self.get();
    REQUIRE(device.add_peer(kOtherHost, p.memory));
    REQUIRE(device.add_peer(8, local));
    p.reader.write(0, 1);
    REQUIRE(device.submit({.ticket = 1, .direction = Direction::kSave, .copies = {{0, 0}}}));
    p.reader.completions.wait_for(1);

    REQUIRE(device.submit({.ticket = 2, .direction = Direction::kLoad, .copies = {{1, 0}}}));
    REQUIRE(device.submit(load(3, {{2, 5}}, {0})));
    Device::Batch from_local = load(4, {{3, 6}});
    from_local.peer = 8;
    REQUIRE(device.submit(from_local));

    for (const Device::Completion& done : p.reader.completions.wait_for(4)) {
      CHECK_FALSE(done.error);
      CHECK(done.copied == 1);
    }
    CHECK(p.reader.holds(1, 1));
    CHECK(p.reader.holds(2, 55));
    CHECK(p.reader.holds(3, 56));
  }

  TEST_CASE("events, early completions and cancels of other batches go to the other device") {
    UnsharedFixture f;
    CHECK(f.device->record_event(Device::Queue::kDefault) == Device::Event{17});
    CHECK(f.device->complete_early(3, Device::Queue::kDefault, Duration{1}) == true);
    CHECK(f.device->complete_early(4, Device::Queue::kDefault, Duration{1}) == false);
    f.device->cancel(5);
    CHECK(f.inner->cancelled == std::vector<std::uint64_t>{5});
  }

  TEST_CASE("a device that is not attached accepts neither batches nor peers") {
    Pair p;
    p.reader.device->detach();
    CHECK(p.rejected(load(1, {{0, 0}})).code == Errc::kGone);
    CHECK(error_of(p.reader.device->add_peer(kOtherHost, p.memory)).code == Errc::kGone);
    REQUIRE(p.reader.device->attach(p.reader.layout, p.reader.pool, p.reader.completions.sink()));
    CHECK(error_of(
              p.reader.device->attach(p.reader.layout, p.reader.pool, p.reader.completions.sink()))
              .code == Errc::kInvalidArgument);
  }

  TEST_CASE("only a layout in the memory that was lent can be attached") {
    Pair p;
    p.reader.device->detach();
    const Error error = error_of(
        p.reader.device->attach(p.owner.layout, p.reader.pool, p.reader.completions.sink()));
    CHECK(error.code == Errc::kInvalidArgument);
    CHECK(error.detail.ends_with("is not in the memory that was registered with the network"));
  }

  TEST_CASE("in a child of fork() no call hangs") {
    Pair p;
    NetworkDevice& device = *p.reader.device;
    REQUIRE(device.add_peer(kOtherHost, p.memory));
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      const auto gone = [](const Result<void>& result) {
        return !result && result.error().code == Errc::kGone;
      };
      bool right = gone(device.submit(load(1, {{0, 0}}))) && gone(device.add_peer(9, p.memory)) &&
                   gone(device.add_peer(9, {})) &&
                   gone(device.submit({.ticket = 1, .direction = Direction::kLoad, .copies = {}}));
      right = right && !device.share(p.reader.layout, p.reader.guards.memory.bytes());
      device.cancel(1);
      device.remove_peer(kOtherHost);
      device.detach();
      p.reader.device.reset();
      ::_exit(right ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
