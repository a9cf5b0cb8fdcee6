// The steps of a read from another host, over a fabric that the test carries out.
#include "transport/network_reads.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tests/unit/transport/network_engines.h"

namespace pegaflow::testing {
namespace {

/// A fabric whose reads end when the test says so.
class ScriptedFabric final : public Fabric {
 public:
  explicit ScriptedFabric(CompletionSink sink) : sink_(std::move(sink)) {}

  Result<RegionId> register_region(const Memory& memory) override {
    memories.push_back(memory);
    regions_.emplace_back(memory.base, memory.bytes);
    return RegionId{static_cast<std::uint32_t>(regions_.size())};
  }
  Result<void> lend(RegionId, TimePoint) override { return {}; }
  void unregister_region(RegionId) override {}
  [[nodiscard]] FabricDescriptor describe() const override {
    FabricDescriptor all;
    for (std::uint32_t i = 0; i < regions_.size(); ++i) {
      all.regions.push_back({.region = RegionId{i + 1}, .size_bytes = regions_[i].size()});
    }
    return all;
  }
  Result<PeerId> connect(const FabricDescriptor&) override { return PeerId{1}; }
  Result<void> disconnect(PeerId) override { return {}; }
  Result<void> read(Batch batch) override {
    if (accepts == 0) return fail(Errc::kBusy, "the queue is full");
    --accepts;
    reads.push_back(std::move(batch));
    return {};
  }
  Result<void> cancel(std::uint64_t ticket) override {
    cancelled.push_back(ticket);
    return {};
  }

  // ---- the test

  /// Carries out a read from `owner`, another fabric, and reports it.
  void carry_out(std::size_t index, const ScriptedFabric& owner) {
    const Batch& batch = reads[index];
    for (const Chunk& chunk : batch.chunks) {
      std::memcpy(place(chunk.local_region, chunk.local_offset),
                  owner.place(chunk.remote_region, chunk.remote_offset), chunk.size_bytes);
    }
    sink_({.ticket = batch.ticket,
           .chunks = std::vector<std::optional<Errc>>(batch.chunks.size()),
           .detail = {}});
  }
  /// Reports a read whose chunks from `first` on failed.
  void fail_from(std::size_t index, std::size_t first, Errc error, bool quiesced = true) {
    std::vector<std::optional<Errc>> chunks(reads[index].chunks.size());
    std::fill(chunks.begin() + static_cast<std::ptrdiff_t>(first), chunks.end(), error);
    sink_({.ticket = reads[index].ticket,
           .chunks = std::move(chunks),
           .detail = "the script",
           .quiesced = quiesced});
  }
  void quiesce(std::size_t index) {
    sink_({.ticket = reads[index].ticket, .chunks = {}, .detail = {}});
  }

  /// The kinds of the regions, in the order of their registration.
  [[nodiscard]] std::vector<MemoryKind> kinds() const {
    std::vector<MemoryKind> kinds;
    for (const Memory& memory : memories) kinds.push_back(memory.kind);
    return kinds;
  }

  std::vector<Memory> memories;
  std::size_t accepts = SIZE_MAX;  ///< Reads from now on.
  std::vector<Batch> reads;
  std::vector<std::uint64_t> cancelled;

 private:
  [[nodiscard]] std::byte* place(RegionId region, std::uint64_t offset) const {
    return regions_.at(static_cast<std::uint32_t>(region) - 1).data() + offset;
  }

  const CompletionSink sink_;
  std::vector<std::span<std::byte>> regions_;
};

/// Two engines with such fabrics.
struct Scripted {
  explicit Scripted(const NetworkDevice::Options& options = {}, std::uint64_t blocks = 16,
                    std::uint64_t segment_bytes = 64)
      : owner(make(owner_fabric), four_segments(segment_bytes, blocks), 4 << 20),
        reader(make(fabric), four_segments(segment_bytes, blocks), 4 << 20, 64, options) {
    for (std::uint64_t block = 0; block < std::min<std::uint64_t>(blocks, 16); ++block) {
      owner.write(block, 100 + block);
      owner.guard(block).store(500 + block);
    }
    REQUIRE(reader.device->add_peer(kOtherHost, owner.shared()));
  }

  static NetworkDevice::MakeFabric make(ScriptedFabric*& made) {
    return [&made](Fabric::CompletionSink sink) -> Result<std::unique_ptr<Fabric>> {
      auto fabric = std::make_unique<ScriptedFabric>(std::move(sink));
      made = fabric.get();
      return fabric;
    };
  }
  /// Waits until the reader's thread has handled what was reported so far. It reports a batch
  /// without pages once in each of its iterations, and the second of them begins after this call.
  void settle() {
    for (int i = 0; i < 2; ++i) {
      REQUIRE(reader.device->submit(load(kMarker + ++markers, {})));
      completed(kMarker + markers);
    }
  }
  Device::Completion completed(std::uint64_t ticket) {
    for (std::size_t count = 1;; ++count) {
      Device::Completion last = reader.completions.wait_for(count)[count - 1];
      if (last.ticket == ticket) return last;
    }
  }
  bool has_completed(std::uint64_t ticket) {
    settle();
    const auto all = reader.completions.wait_for(1);
    return std::ranges::count(all, ticket, &Device::Completion::ticket) > 0;
  }

  static constexpr std::uint64_t kMarker = 1'000'000;
  ScriptedFabric* owner_fabric = nullptr;
  ScriptedFabric* fabric = nullptr;
  NetworkEngine owner;
  NetworkEngine reader;
  std::uint64_t markers = 0;
};

TEST_SUITE("a read from another host") {
  TEST_CASE("reads the guards when all of its pages have arrived") {
    Scripted s;
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}, {5, 1}}, {3, 1})));
    REQUIRE(s.fabric->reads.size() == 1);
    CHECK(s.fabric->reads[0].priority == Fabric::Priority::kForeground);
    s.fabric->carry_out(0, *s.owner_fabric);
    s.settle();

    REQUIRE(s.fabric->reads.size() == 2);
    CHECK_FALSE(s.has_completed(1));
    s.owner.guard(1).store(0);
    s.fabric->carry_out(1, *s.owner_fabric);

    const Device::Completion done = s.completed(1);
    CHECK(done.copied == 2);
    CHECK_FALSE(done.error);
    CHECK(done.guards == std::vector<std::uint64_t>{503, 0});
    CHECK(s.reader.holds(0, 103));
    CHECK(s.reader.holds(5, 101));
  }

  TEST_CASE("a block that is written during the read is found by its guard") {
    // The same events, in the right order of the steps and in the wrong one.
    for (const bool wrong_order : {false, true}) {
      CAPTURE(wrong_order);
      Scripted s({.mistakes = {.reads_guards_first = wrong_order}});
      const std::uint64_t open = s.owner.guard(3).load();
      REQUIRE(s.reader.device->submit(load(1, {{0, 3}}, {3})));
      if (wrong_order) {
        s.fabric->carry_out(0, *s.owner_fabric);
        s.settle();
      }
      s.owner.guard(3).store(0);
      s.owner.write(3, 999);
      for (std::size_t next = wrong_order ? 1 : 0; next < 2; ++next) {
        s.fabric->carry_out(next, *s.owner_fabric);
        s.settle();
      }

      const Device::Completion done = s.completed(1);
      REQUIRE(done.guards.size() == 1);
      const bool accepted = done.guards[0] == open;
      const bool right_bytes = s.reader.holds(0, 103);
      CHECK_FALSE(right_bytes);
      CHECK(accepted == wrong_order);
    }
  }

  TEST_CASE("ends when the fabric has quiesced it, not when it has failed") {
    Scripted s;
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}, {5, 1}, {2, 2}}, {3})));
    // Each pair of segments of a page adjoins.
    REQUIRE(s.fabric->reads[0].chunks.size() == 6);
    s.fabric->fail_from(0, 3, Errc::kPeerLost, false);
    CHECK_FALSE(s.has_completed(1));
    s.fabric->quiesce(0);

    const Device::Completion done = s.completed(1);
    CHECK(done.copied == 1);
    REQUIRE(done.error);
    CHECK(done.error->code == Errc::kPeerLost);
    CHECK(done.error->detail == "1 of 3 pages were read from another host: the script");
    CHECK(done.guards.empty());
    CHECK(s.fabric->reads.size() == 1);
  }

  TEST_CASE("keeps its pages when its guards cannot be read") {
    Scripted s;
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}}, {3})));
    s.fabric->carry_out(0, *s.owner_fabric);
    s.settle();
    s.fabric->fail_from(1, 0, Errc::kTimeout);
    const Device::Completion failed = s.completed(1);
    CHECK(failed.copied == 1);
    CHECK_FALSE(failed.error);
    CHECK(failed.guards.empty());

    REQUIRE(s.reader.device->submit(load(2, {{0, 3}}, {3})));
    s.fabric->accepts = 0;
    s.fabric->carry_out(2, *s.owner_fabric);
    const Device::Completion busy = s.completed(2);
    CHECK(busy.copied == 1);
    CHECK_FALSE(busy.error);
    CHECK(busy.guards.empty());
  }

  TEST_CASE("cancels the step that is in flight") {
    Scripted s;
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}}, {3})));
    REQUIRE(s.reader.device->submit(load(2, {{1, 4}}, {4})));
    s.reader.device->cancel(1);
    CHECK(s.fabric->cancelled == std::vector<std::uint64_t>{s.fabric->reads[0].ticket});
    s.fabric->fail_from(0, 0, Errc::kCancelled);
    const Device::Completion cancelled = s.completed(1);
    CHECK(cancelled.copied == 0);
    CHECK(cancelled.error->code == Errc::kCancelled);

    s.fabric->carry_out(1, *s.owner_fabric);
    s.settle();
    s.reader.device->cancel(2);
    CHECK(s.fabric->cancelled.back() == s.fabric->reads[2].ticket);
    s.fabric->fail_from(2, 0, Errc::kCancelled);
    const Device::Completion arrived = s.completed(2);
    CHECK(arrived.copied == 1);
    CHECK_FALSE(arrived.error);
    CHECK(arrived.guards.empty());
  }

  TEST_CASE("reads no guards once it was cancelled, although all pages arrived") {
    Scripted s;
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}}, {3})));
    s.reader.device->cancel(1);
    s.fabric->carry_out(0, *s.owner_fabric);
    const Device::Completion done = s.completed(1);
    CHECK(done.copied == 1);
    CHECK_FALSE(done.error);
    CHECK(s.fabric->reads.size() == 1);
  }

  TEST_CASE("is split into parts, and the pages of the parts before a failure count") {
    // Two chunks a page, since the pairs of segments adjoin: more than two parts.
    constexpr std::uint32_t kPages = network::Reads::kPartChunks + 10;
    Scripted s({}, 16);
    const auto batch = [](std::uint64_t ticket) {
      std::vector<Device::Copy> copies;
      // Backward, so that pages do not adjoin.
      for (std::uint32_t i = 0; i < kPages; ++i) copies.push_back({15 - i % 16, 15 - i % 16});
      return load(ticket, std::move(copies), {1});
    };
    REQUIRE(s.reader.device->submit(batch(1)));
    REQUIRE(s.fabric->reads.size() == 3);
    CHECK(s.fabric->reads[0].chunks.size() == network::Reads::kPartChunks);
    CHECK(s.fabric->reads[2].chunks.size() == 20);
    s.fabric->carry_out(2, *s.owner_fabric);
    s.fabric->fail_from(1, 2, Errc::kGone);
    CHECK_FALSE(s.has_completed(1));
    s.fabric->carry_out(0, *s.owner_fabric);
    const Device::Completion failed = s.completed(1);
    CHECK(failed.copied == network::Reads::kPartChunks / 2 + 1);
    CHECK(failed.error->code == Errc::kGone);

    s.fabric->accepts = 1;
    REQUIRE(s.reader.device->submit(batch(2)));
    CHECK(s.fabric->reads.size() == 4);
    s.fabric->carry_out(3, *s.owner_fabric);
    const Device::Completion busy = s.completed(2);
    CHECK(busy.copied == network::Reads::kPartChunks / 2);
    CHECK(busy.error->code == Errc::kBusy);
    CHECK(busy.guards.empty());

    s.fabric->accepts = 3;
    REQUIRE(s.reader.device->submit(batch(3)));
    for (std::size_t part = 4; part < 7; ++part) s.fabric->carry_out(part, *s.owner_fabric);
    CHECK(s.completed(3).copied == kPages);
  }

  TEST_CASE("shows its bytes to the device before the report, and fails where that fails") {
    Result<void> shown{};
    std::size_t count = 0;
    Scripted s({.show_bytes = [&] {
      ++count;
      return shown;
    }});
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}}, {3})));
    s.fabric->carry_out(0, *s.owner_fabric);
    s.settle();
    s.fabric->carry_out(1, *s.owner_fabric);
    CHECK(s.completed(1).guards == std::vector<std::uint64_t>{503});
    CHECK(count == 1);

    // What brought no bytes has none to show.
    REQUIRE(s.reader.device->submit(load(2, {{0, 3}})));
    s.fabric->fail_from(2, 0, Errc::kGone);
    CHECK(s.completed(2).error->code == Errc::kGone);
    REQUIRE(s.reader.device->submit(load(3, {}, {1})));
    s.fabric->carry_out(3, *s.owner_fabric);
    CHECK(s.completed(3).guards.size() == 1);
    CHECK(count == 1);

    shown = fail(Errc::kIo, "the GPU is broken");
    REQUIRE(s.reader.device->submit(load(4, {{0, 3}}, {3})));
    s.fabric->carry_out(4, *s.owner_fabric);
    s.settle();
    s.fabric->carry_out(5, *s.owner_fabric);
    const Device::Completion failed = s.completed(4);
    CHECK(failed.copied == 0);
    CHECK(failed.guards.empty());
    CHECK(failed.error->detail == "the GPU is broken");
  }

  TEST_CASE("is rejected when the fabric or the device has no room, and leaves nothing behind") {
    Scripted s({.max_batches = 2});
    s.fabric->accepts = 0;
    CHECK(error_of(s.reader.device->submit(load(1, {{0, 3}}))).detail == "the queue is full");
    CHECK(error_of(s.reader.device->submit(load(1, {}, {3}))).code == Errc::kBusy);
    s.fabric->accepts = SIZE_MAX;
    REQUIRE(s.reader.device->submit(load(1, {{0, 3}})));
    REQUIRE(s.reader.device->submit(load(2, {{1, 3}})));
    CHECK(error_of(s.reader.device->submit(load(3, {{2, 3}}))).detail ==
          "2 reads from other hosts are in flight");
    s.fabric->carry_out(0, *s.owner_fabric);
    s.completed(1);
    REQUIRE(s.reader.device->submit(load(3, {{2, 3}})));
    s.fabric->carry_out(1, *s.owner_fabric);
    s.fabric->carry_out(2, *s.owner_fabric);
    s.completed(3);
  }

  TEST_CASE("memory is registered as of its kind, and of a GPU no two allocations as one") {
    Scripted host({}, 8, 64);
    // Four segments in pairs: those of a pair overlap, and the pairs adjoin.
    CHECK(host.fabric->kinds() == std::vector<MemoryKind>(2, MemoryKind::kHost));
    Scripted gpu({.kind = MemoryKind::kCuda, .gpu = 3}, 8, 64);
    const std::vector<MemoryKind> expected{MemoryKind::kHost, MemoryKind::kCuda, MemoryKind::kCuda};
    CHECK(gpu.fabric->kinds() == expected);
    CHECK(gpu.fabric->memories[1].device == 3);
    // Its guards are ordinary memory.
    CHECK(gpu.reader.device->share(gpu.reader.layout, gpu.reader.guards.memory.bytes()));
    CHECK(gpu.fabric->kinds().back() == MemoryKind::kHost);
    CHECK(gpu.reader.device->share(gpu.reader.layout, gpu.reader.guards.memory.bytes())
              ->network->segments.size() == 4);
  }

  TEST_CASE("memory of a GPU that other processes cannot map is not shared at all") {
    // After vLLM's sleep mode a card would read pages that the GPU no longer has.
    struct Unshared final : Device {
      Result<void> attach(std::span<const PageLayout>, std::span<std::byte>,
                          CompletionSink) override {
        return {};
      }
      void detach() override {}
      Result<PeerMemory> share(const PageLayout&, std::span<std::byte>) override {
        return fail(Errc::kRefused, "expandable segments");
      }
      Result<Event> record_event(Queue) override { return Event::kNow; }
      Result<void> submit(Batch) override { return {}; }
      void cancel(std::uint64_t) override {}
    };
    static const SteadyClock clock;
    for (const MemoryKind kind : {MemoryKind::kHost, MemoryKind::kCuda}) {
      ScriptedFabric* fabric = nullptr;
      TwiceMapped blocks(1 << 20);
      TwiceMapped guards(64);
      const PageLayout layout = four_segments(64, 8)(blocks.memory.bytes());
      const auto device = NetworkDevice::create(std::make_shared<Unshared>(), layout,
                                                Scripted::make(fabric), clock, {.kind = kind});
      const auto shared = (*device)->share(layout, guards.memory.bytes());
      CHECK(shared.has_value() == (kind == MemoryKind::kHost));
      if (!shared) CHECK(shared.error().detail == "expandable segments");
    }
  }

  TEST_CASE("neighbors become one chunk where they adjoin on both sides, up to a mebibyte") {
    Scripted s({}, 8, 128 << 10);
    REQUIRE(s.reader.device->submit(load(1, {{0, 0}, {1, 1}, {2, 2}, {4, 3}})));
    const auto& chunks = s.fabric->reads[0].chunks;
    // K and V of a layer adjoin; layers and other blocks do not.
    REQUIRE(chunks.size() == 8);
    for (const Fabric::Chunk& chunk : chunks) CHECK(chunk.size_bytes == 256 << 10);
    s.fabric->carry_out(0, *s.owner_fabric);
    s.completed(1);

    const auto one = PageLayout::create({{s.reader.bytes().data(), 256 << 10, 256 << 10}}, 8);
    const std::vector<NetworkMemory::Place> own{{RegionId{1}, 0}};
    const network::RemoteBlocks remote{.segments = {{{RegionId{5}, 256 << 10}, 256 << 10}},
                                       .block_count = 8};
    const std::vector<Device::Copy> copies{{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4}, {6, 5}};
    const network::PagePlan plan = network::plan_pages(copies, *one, own, remote);
    REQUIRE(plan.chunks.size() == 3);
    CHECK(plan.chunks[0].size_bytes == 1 << 20);
    CHECK(plan.chunks[0].remote_offset == 256 << 10);
    CHECK(plan.last_chunks == std::vector<std::size_t>{0, 0, 0, 0, 1, 2});
  }
}

}  // namespace
}  // namespace pegaflow::testing
