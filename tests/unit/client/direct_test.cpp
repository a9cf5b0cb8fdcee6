// The guards of blocks that other engines read, and what a mover knows of those engines.
#include <csignal>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "client/direct/guards.h"
#include "client/direct/pools.h"
#include "client/direct/sources.h"
#include "client/mover.h"
#include "tests/support/engine_memory.h"
#include "tests/support/slow_device.h"
#include "transport/pool_peer.h"

namespace pegaflow::testing {
namespace {

UniqueFd pidfd_of(pid_t process) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
}

/// Another process, which does nothing.
class Idle {
 public:
  Idle() : process_(::fork()) {
    while (process_ == 0) ::pause();
  }
  ~Idle() { end(); }
  [[nodiscard]] UniqueFd pidfd() const { return pidfd_of(process_); }
  void end() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(std::exchange(process_, -1), nullptr, 0);
  }

 private:
  pid_t process_;
};

TEST_SUITE("guards") {
  TEST_CASE("a reader sees a guard that is open until it is closed") {
    const auto guards = Guards::create(4).value();
    const PeerGuards seen = PeerGuards::map(guards->fd(), 4).value();
    const Guard guard = guards->open().value();
    CHECK(seen.is_open(guard));
    CHECK_FALSE(seen.is_open({guard.place, guard.value + 1}));

    guards->close(guard);

    CHECK_FALSE(seen.is_open(guard));
    const Guard next = guards->open().value();
    CHECK(next.place == guard.place);
    CHECK(next.value != guard.value);
    CHECK_FALSE(seen.is_open(guard));
    CHECK(seen.is_open(next));
  }

  TEST_CASE("a closed word, and a place that does not exist, are no open guards") {
    const auto guards = Guards::create(2).value();
    const PeerGuards seen = PeerGuards::map(guards->fd(), 2).value();
    CHECK_FALSE(seen.is_open({0, 0}));
    CHECK_FALSE(seen.is_open({2, 1}));
    CHECK_FALSE(PeerGuards().is_open({0, 1}));
  }

  TEST_CASE("at the limit there is no guard until one is closed") {
    const auto guards = Guards::create(2).value();
    const Guard first = guards->open().value();
    REQUIRE(guards->open());
    CHECK_FALSE(guards->open());
    guards->close(first);
    CHECK(guards->open());
  }

  TEST_CASE("guards that end are closed for the readers that still have them") {
    auto guards = Guards::create(2).value();
    const PeerGuards seen = PeerGuards::map(guards->fd(), 2).value();
    const Guard one = guards->open().value();
    const Guard other = guards->open().value();

    guards->close_all();
    CHECK_FALSE(seen.is_open(one));
    CHECK_FALSE(guards->open());
    guards.reset();
    CHECK_FALSE(seen.is_open(other));
  }

  TEST_CASE("two arrays have no value in common") {
    const auto one = Guards::create(1).value();
    const auto other = Guards::create(1).value();
    CHECK(one->open()->value != other->open()->value);
  }

  TEST_CASE("memory that is smaller, or that may shrink, is refused") {
    const auto guards = Guards::create(2).value();
    CHECK(PeerGuards::map(guards->fd(), 3).error().code == Errc::kRefused);
    CHECK(PeerGuards::map(guards->fd(), 0).error().code == Errc::kRefused);
    const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(unsealed.get(), 4096) == 0);
    CHECK(PeerGuards::map(unsealed.get(), 2).error().code == Errc::kRefused);
    CHECK_FALSE(PeerGuards::map(-1, 2));
  }
}

struct Reader {
  Reader() : own(engine_memory(2, 4096, 8)), theirs(engine_memory(2, 4096, 8)), pool(65536) {
    REQUIRE(device.attach(own.layout(), pool, [](Device::Completion&&) {}));
  }
  ~Reader() {
    device.detach();
    sources.clear();
  }
  [[nodiscard]] PeerMemory memory() const {
    const auto segments = theirs.layout().segments();
    return {.segments = {segments.begin(), segments.end()}, .block_count = 8};
  }
  Result<void> add(std::uint64_t source, UniqueFd process) {
    return sources.add(source, memory(), std::move(process), guards->fd(), 4);
  }

  EngineMemory own;
  EngineMemory theirs;
  std::vector<std::byte> pool;
  SlowDevice device;
  std::unique_ptr<Guards> guards = Guards::create(4).value();
  ManualClock clock;
  Sources sources{device, clock};
};

const std::vector<std::uint32_t> kThree = {5, 1, 7};

/// A device that takes any peer of another host, and reads nothing.
class FarDevice final : public Device {
 public:
  Result<void> attach(std::span<const PageLayout>, std::span<std::byte>, CompletionSink) override {
    return {};
  }
  void detach() override {}
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) override {
    if (memory.process >= 0 || !memory.network) return fail(Errc::kRefused, "not far");
    peers.insert(peer);
    return {};
  }
  void remove_peer(std::uint64_t peer) override { peers.erase(peer); }
  Result<Event> record_event(Queue) override { return Event::kNow; }
  Result<void> submit(Batch) override { return {}; }
  void cancel(std::uint64_t) override {}

  std::set<std::uint64_t> peers;
};

/// A pool of 8 pages of 12 KiB, two of which overlap in each multiple of 4 KiB.
FabricDescriptor pool_of(std::uint64_t bytes = 96 << 10) {
  return {.backend = "tcp",
          .incarnation = {1, 1},
          .address = {},
          .regions = {{.region = RegionId{5}, .size_bytes = bytes}}};
}

struct PoolReader {
  EngineMemory memory = engine_memory(3, 4096, 8);
  FarDevice device;
  ManualClock clock;
  Pools pools{device, memory.layout(), clock};
};

TEST_SUITE("pools of other nodes") {
  TEST_CASE("a pool is a peer with a page at each multiple of 4 KiB") {
    const EngineMemory memory = engine_memory(3, 4096, 8);
    const PeerMemory peer = pool_as_peer(memory.layout(), pool_of()).value();
    CHECK(peer.block_count == 22);
    REQUIRE(peer.segments.size() == 3);
    CHECK(peer.segments[2].block_stride_bytes == 4096);
    CHECK(peer.network->segments[2].offset == 8192);
    CHECK(peer.network->segments[2].region == RegionId{5});
    CHECK_FALSE(peer.network->guards);
    CHECK(pool_as_peer(memory.layout(), pool_of(12288)).value().block_count == 1);
    CHECK(pool_as_peer(memory.layout(), pool_of(12287)).error().code == Errc::kInvalidArgument);
    FabricDescriptor none = pool_of();
    none.regions.clear();
    CHECK(pool_as_peer(memory.layout(), none).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a pool is connected once, and a page beyond it is not read") {
    PoolReader f;
    CHECK(f.pools.begin(3, kThree).error().code == Errc::kGone);
    REQUIRE(f.pools.add(3, pool_of()));
    REQUIRE(f.pools.add(3, pool_of()));
    CHECK(f.device.peers.size() == 1);
    CHECK(f.pools.known() == std::vector<std::uint64_t>{3});
    const std::uint64_t peer = f.pools.begin(3, kThree).value();
    CHECK(f.device.peers.contains(peer));
    f.pools.end(3, std::nullopt);
    CHECK(f.pools.begin(3, std::vector<std::uint32_t>{21}));
    f.pools.end(3, std::nullopt);
    CHECK(f.pools.begin(3, std::vector<std::uint32_t>{22}).error().code == Errc::kInternal);
    f.pools.clear();
    CHECK(f.device.peers.empty());
  }

  TEST_CASE("a pool that could not be read is not read for a while, and then connected again") {
    PoolReader f;
    REQUIRE(f.pools.add(3, pool_of()));
    const std::uint64_t peer = f.pools.begin(3, kThree).value();
    REQUIRE(f.pools.begin(3, kThree));
    f.pools.end(3, Error{Errc::kCancelled, "the load was cancelled"});
    REQUIRE(f.pools.begin(3, kThree));
    f.pools.end(3, Error{Errc::kTimeout, "planted"});
    CHECK(f.pools.begin(3, kThree).error().code == Errc::kRefused);
    f.clock.advance(Pools::kPause);
    // One read has not ended.
    CHECK(f.pools.known() == std::vector<std::uint64_t>{3});
    CHECK(f.pools.begin(3, kThree).error().code == Errc::kRefused);
    f.pools.end(3, std::nullopt);
    CHECK(f.pools.known().empty());
    CHECK(f.device.peers.empty());
    REQUIRE(f.pools.add(3, pool_of()));
    CHECK(f.pools.begin(3, kThree).value() != peer);
    f.pools.end(3, std::nullopt);
  }

  TEST_CASE("beyond the limit the pool that was not read for the longest time is forgotten") {
    PoolReader f;
    for (std::uint64_t pool = 1; pool <= Pools::kMost; ++pool)
      REQUIRE(f.pools.add(pool, pool_of()));
    REQUIRE(f.pools.begin(1, kThree));
    REQUIRE(f.pools.begin(2, kThree));
    f.pools.end(2, std::nullopt);
    REQUIRE(f.pools.add(1000, pool_of()));
    CHECK(f.device.peers.size() == Pools::kMost);
    CHECK(f.pools.begin(3, kThree).error().code == Errc::kGone);
    CHECK(f.pools.begin(2, kThree));
    f.pools.end(1, std::nullopt);
    f.pools.end(2, std::nullopt);
  }
}

TEST_SUITE("engines of other hosts whose memory is read") {
  TEST_CASE("blocks count as far as their guards had their values behind them") {
    FarDevice device;
    ManualClock clock;
    Sources sources(device, clock);
    REQUIRE(sources.add_far(9, {.block_count = 8, .network = NetworkMemory{}}, 4));
    CHECK(sources.known() == std::vector<std::uint64_t>{9});
    const std::vector<BlockGuard> both = {{{.place = 3, .value = 77}, 2},
                                          {{.place = 1, .value = 78}, 1}};
    const auto read = [&](const std::vector<std::uint64_t>& values) {
      const Sources::Reading reading = sources.begin(9, kThree, both).value();
      CHECK(reading.guards == std::vector<std::uint32_t>{3, 1});
      return sources.end(9, both, values);
    };
    CHECK(read({77, 78}) == 3);
    CHECK(read({77, 0}) == 2);
    CHECK(read({77, 79}) == 2);
    CHECK(read({0, 78}) == 0);
    CHECK(read({77}) == 2);
    CHECK(read({}) == 0);
    CHECK(sources.begin(9, kThree, std::vector<BlockGuard>{{{.place = 4, .value = 1}, 3}})
              .error()
              .code == Errc::kInternal);
  }

  TEST_CASE("one that cannot be read is left alone, and stays known meanwhile") {
    FarDevice device;
    ManualClock clock;
    Sources sources(device, clock);
    REQUIRE(sources.add_far(9, {.block_count = 8, .network = NetworkMemory{}}, 4));
    CHECK(sources.suspend(9, {Errc::kPeerLost, "planted"}));
    CHECK(sources.suspend(9, {Errc::kPeerLost, "planted"}));
    const std::vector<BlockGuard> guards = {{{.place = 0, .value = 1}, 3}};
    CHECK(sources.begin(9, kThree, guards).error().code == Errc::kRefused);
    CHECK(sources.known() == std::vector<std::uint64_t>{9});
    CHECK_FALSE(sources.suspend(10, {Errc::kPeerLost, "planted"}));
    // The server no longer has it.
    sources.forget(9);
    CHECK(device.peers.empty());
    CHECK(sources.known().empty());
  }

  TEST_CASE("after a while it is asked for and read again") {
    FarDevice device;
    ManualClock clock;
    Sources sources(device, clock);
    REQUIRE(sources.add_far(9, {.block_count = 8, .network = NetworkMemory{}}, 4));
    CHECK(sources.suspend(9, {Errc::kPeerLost, "planted"}));
    clock.advance(Sources::kPause - std::chrono::nanoseconds(1));
    CHECK(sources.known() == std::vector<std::uint64_t>{9});
    clock.advance(std::chrono::nanoseconds(1));
    CHECK(sources.known().empty());
    CHECK(device.peers.empty());
    REQUIRE(sources.add_far(9, {.block_count = 8, .network = NetworkMemory{}}, 4));
    CHECK(sources.begin(9, kThree, std::vector<BlockGuard>{{{.place = 0, .value = 1}, 3}}));
    CHECK(sources.end(9, {}) == 0);
  }

  TEST_CASE("one of this host is never left alone for a failed read") {
    Reader f;
    REQUIRE(f.add(9, pidfd_of(::getpid())));
    CHECK_FALSE(f.sources.suspend(9, {Errc::kTimeout, "planted"}));
    CHECK(f.sources.begin(9, kThree, std::vector<BlockGuard>{{f.guards->open().value(), 3}}));
    CHECK(f.sources.end(9, {}) == 0);
  }
}

TEST_SUITE("engines whose memory is read") {
  TEST_CASE("the blocks before the first closed guard are good") {
    Reader f;
    REQUIRE(f.add(9, pidfd_of(::getpid())));
    CHECK(f.sources.known() == std::vector<std::uint64_t>{9});
    const Guard first = f.guards->open().value();
    const Guard second = f.guards->open().value();
    const std::vector<BlockGuard> both = {{first, 2}, {second, 1}};
    const auto read = [&] {
      REQUIRE(f.sources.begin(9, kThree, both));
      return f.sources.end(9, both);
    };
    CHECK(read() == 3);

    f.guards->close(second);
    CHECK(read() == 2);
    f.guards->close(first);
    CHECK(read() == 0);
  }

  TEST_CASE("no block of a process that has ended is good, and it is forgotten") {
    Reader f;
    Idle process;
    REQUIRE(f.add(9, process.pidfd()));
    const std::vector<BlockGuard> guards = {{f.guards->open().value(), 3}};
    REQUIRE(f.sources.begin(9, kThree, guards));

    process.end();

    CHECK(f.sources.known().size() == 1);  // It is being read.
    CHECK(f.sources.end(9, guards) == 0);
    CHECK(f.sources.known().empty());
    CHECK(f.sources.begin(9, kThree, guards).error().code == Errc::kGone);
    CHECK(f.add(10, process.pidfd()).error().code == Errc::kGone);
  }

  TEST_CASE("an engine is watched until it is forgotten, and is forgotten when it ends") {
    Reader f;
    Idle process;
    int watched = -1;
    const auto alive = std::make_shared<int>(0);
    f.sources.watch_with([&](int pidfd) -> std::shared_ptr<void> {
      watched = pidfd;
      return alive;
    });
    REQUIRE(f.add(9, process.pidfd()));
    CHECK(watched >= 0);
    CHECK(alive.use_count() == 2);
    f.sources.forget_ended();
    CHECK(f.sources.knows(9));

    process.end();
    f.sources.forget_ended();

    CHECK_FALSE(f.sources.knows(9));
    CHECK(alive.use_count() == 1);
    CHECK(f.device.peers() == 0);
  }

  TEST_CASE("guards that do not cover the blocks, and blocks that do not exist, are invalid") {
    Reader f;
    REQUIRE(f.add(9, pidfd_of(::getpid())));
    const Guard guard = f.guards->open().value();
    const auto code = [&](const std::vector<std::uint32_t>& blocks,
                          const std::vector<BlockGuard>& guards) {
      return f.sources.begin(9, blocks, guards).error().code;
    };
    CHECK(code(kThree, {}) == Errc::kInternal);
    CHECK(code(kThree, {{guard, 2}}) == Errc::kInternal);
    CHECK(code(kThree, {{guard, 4}}) == Errc::kInternal);
    CHECK(code(kThree, {{guard, 0}, {guard, 3}}) == Errc::kInternal);
    CHECK(code(kThree, {{{4, 1}, 3}}) == Errc::kInternal);
    CHECK(code(kThree, {{{0, 0}, 3}}) == Errc::kInternal);
    CHECK(code({5, 8, 7}, {{guard, 3}}) == Errc::kInternal);
  }

  TEST_CASE("an engine that cannot be read is remembered and refused") {
    Reader f;
    PeerMemory other = f.memory();
    other.segments.pop_back();
    CHECK(f.sources.add(7, other, pidfd_of(::getpid()), f.guards->fd(), 4).error().code ==
          Errc::kRefused);
    CHECK(f.sources.add(8, f.memory(), pidfd_of(::getpid()), f.guards->fd(), 5).error().code ==
          Errc::kRefused);
    REQUIRE(f.add(9, pidfd_of(::getpid())));
    f.sources.refuse(9, {Errc::kRefused, "as the device found"});

    CHECK(f.sources.known() == std::vector<std::uint64_t>{7, 8, 9});
    const std::vector<BlockGuard> guards = {{f.guards->open().value(), 3}};
    for (const std::uint64_t source : {7, 8, 9}) {
      CHECK(f.sources.begin(source, kThree, guards).error().code == Errc::kRefused);
    }
  }

  TEST_CASE("an engine whose turn was over is left alone for a while, and then asked for again") {
    Reader f;
    SUBCASE("before the first byte") {
      PeerMemory other = f.memory();
      other.segments.pop_back();
      const auto added = f.sources.add(9, other, pidfd_of(::getpid()), f.guards->fd(), 4, true);
      CHECK(added.error().code == Errc::kRefused);
    }
    SUBCASE("behind it") {
      REQUIRE(f.sources.add(9, f.memory(), pidfd_of(::getpid()), f.guards->fd(), 4, true));
      f.sources.refuse(9, {Errc::kRefused, "as the device found"});
    }
    f.clock.advance(Sources::kPause - std::chrono::nanoseconds(1));
    CHECK(f.sources.known() == std::vector<std::uint64_t>{9});
    const std::vector<BlockGuard> guards = {{f.guards->open().value(), 3}};
    CHECK(f.sources.begin(9, kThree, guards).error().code == Errc::kRefused);
    f.clock.advance(std::chrono::nanoseconds(1));

    CHECK(f.sources.known().empty());
    REQUIRE(f.add(9, pidfd_of(::getpid())));
    CHECK(f.sources.begin(9, kThree, guards));
    CHECK(f.sources.end(9, guards) == 3);
  }

  TEST_CASE("at the limit the engine that was not read for the longest time is forgotten") {
    Reader f;
    for (std::uint64_t i = 1; i <= Sources::kMost; ++i) REQUIRE(f.add(i, pidfd_of(::getpid())));
    const std::vector<BlockGuard> guards = {{f.guards->open().value(), 3}};
    REQUIRE(f.sources.begin(1, kThree, guards));
    f.sources.end(1, guards);

    REQUIRE(f.add(100, pidfd_of(::getpid())));
    CHECK(f.sources.knows(1));
    CHECK_FALSE(f.sources.knows(2));
    for (const std::uint64_t source : f.sources.known()) {
      REQUIRE(f.sources.begin(source, kThree, guards));
    }
    CHECK(f.add(101, pidfd_of(::getpid())).error().code == Errc::kBusy);
  }

  TEST_CASE("no engine outlives its connection") {
    Reader f;
    REQUIRE(f.add(9, pidfd_of(::getpid())));
    const std::uint64_t period = f.sources.period();

    f.sources.clear();

    CHECK(f.sources.known().empty());
    CHECK(f.sources.period() != period);
    CHECK(f.add(9, pidfd_of(::getpid())));
    f.device.detach();
    CHECK(f.add(10, pidfd_of(::getpid())).error().code == Errc::kGone);
  }
}

TEST_SUITE("direct groups") {
  TEST_CASE("a name that is too long or not printable, kinds and cells are invalid") {
    EngineMemory memory = engine_memory(2, 4096, 8);
    SlowDevice device;
    Mover::Options options;
    options.link.socket_path = "/nowhere/pega.sock";
    options.link.instance = "engine";
    const auto code = [&](const std::string& group) {
      options.direct_group = group;
      return Mover::start(options, memory.layout(), device).error().code;
    };
    CHECK(code(std::string(65, 'g')) == Errc::kInvalidArgument);
    CHECK(code("a\nb") == Errc::kInvalidArgument);
    options.direct_group = std::string(64, 'g');
    CHECK(Mover::start(options, memory.layout(), device));

    MoverKinds kinds{.kinds = {{.block_tokens = 16, .members = {memory.layout()}}},
                     .unit_tokens = 16,
                     .alignment_tokens = 16};
    CHECK(Mover::start(options, kinds, device).error().code == Errc::kInvalidArgument);
    options.cells = 1;
    CHECK(Mover::start(options, memory.layout(), device).error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::testing
