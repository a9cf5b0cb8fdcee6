// Several kinds of blocks in the client, without a server.
#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "client/mover.h"
#include "client/mover/copying_loads.h"
#include "client/mover/page_copies.h"
#include "tests/support/engine_memory.h"
#include "tests/support/slow_device.h"
#include "transport/checksum.h"

namespace pegaflow {
namespace {

using Blocks = std::vector<std::uint32_t>;

std::string text(const Result<void>& result) {
  REQUIRE_FALSE(result);
  CHECK(result.error().code == Errc::kInvalidArgument);
  return result.error().detail;
}

Mover::Options offline() {
  Mover::Options options;
  options.link.socket_path = "/nonexistent/pegaflow.sock";
  options.link.instance = "engine";
  return options;
}

struct Fixture {
  testing::EngineMemory small = testing::engine_memory(1, 512, 8);
  testing::EngineMemory large = testing::engine_memory(2, 3000, 20);
  testing::SlowDevice device;
  MoverKinds kinds{
      .kinds = {{.rule = BlockRule::kPrefix, .block_tokens = 16, .members = {large.layout()}},
                {.rule = BlockRule::kTrailing,
                 .tokens = 40,
                 .block_tokens = 16,
                 .members = {small.layout(), large.layout()}},
                {.rule = BlockRule::kState, .block_tokens = 64}},
      .unit_tokens = 16,
      .alignment_tokens = 64};
  Mover::Options options = offline();
};

TEST_SUITE("several kinds of blocks without a server") {
  TEST_CASE("a page of a kind is as large as its members' pages") {
    Fixture f;
    const auto mover = Mover::start(f.options, f.kinds, f.device).value();
    CHECK(mover->page_bytes() == std::vector<std::uint64_t>{6000, 6512, 0});
  }

  TEST_CASE("kinds that cannot be registered are rejected with the reason") {
    Fixture f;
    const auto reason = [&](auto change) {
      MoverKinds kinds = f.kinds;
      change(kinds);
      const auto started = Mover::start(f.options, kinds, f.device);
      REQUIRE_FALSE(started);
      CHECK(started.error().code == Errc::kInvalidArgument);
      return started.error().detail;
    };
    CHECK(reason([](MoverKinds& k) { k.kinds.clear(); }) ==
          "0 kinds of blocks; 1 to 16 are possible");
    CHECK(reason([](MoverKinds& k) { k.kinds.resize(17); }) ==
          "17 kinds of blocks; 1 to 16 are possible");
    CHECK(reason([](MoverKinds& k) { k.unit_tokens = 0; }).find("units of 0 tokens") == 0);
    CHECK(reason([](MoverKinds& k) { k.alignment_tokens = 0; }).find("alignment of 0") !=
          std::string::npos);
    CHECK(reason([](MoverKinds& k) { k.kinds = {k.kinds[2]}; }) ==
          "no kind of blocks has a member: this rank has no KV cache");
    CHECK(reason([&](MoverKinds& k) {
            const std::uint64_t half = (std::uint64_t{1} << 29) + 1;
            std::byte* const base = f.small.layout().segments().front().base;
            const PageLayout big = PageLayout::create({{base, half, half}}, 1).value();
            k.kinds[1].members = {big, big};
          }) == "kind 1 of blocks has pages of 1073741826 bytes; at most 1073741824 are cached");
  }

  TEST_CASE("invalid jobs are rejected before anything else, by name") {
    Fixture f;
    const auto mover = Mover::start(f.options, f.kinds, f.device).value();
    const Id128 id = Id128::random();
    const auto save = [&](std::size_t kind, std::size_t keys, const Blocks& blocks) {
      return text(mover->save(id, 1, kind, std::vector<BlockKey>(keys), blocks, {}));
    };
    CHECK(save(3, 1, {0}) == "kind 3 of 3 kinds of blocks");
    CHECK(save(1, 2, {0, 1, 2}) == "3 blocks for 2 keys of kind 1, which has 2 for each key");
    CHECK(save(2, 1, {0}) == "1 blocks for 1 keys of kind 2, which has 0 for each key");
    CHECK(save(1, 0, {}).find("0 blocks in a job") == 0);
    CHECK(save(1, 2, {7, 19, 7, 20}) == "block 20 of 20");
    CHECK(save(1, 2, {7, 19, 8, 19}) == "block 8 of 8");  // Each member has blocks of its own.

    const std::vector<KindRange> claimed{{0, 4, 4}, {1, 5, 3}};
    const auto load = [&](const std::vector<LoadRange>& ranges) {
      return text(mover->load(1, id, ranges, claimed));
    };
    const Blocks two{0, 1};
    CHECK(load({}) == "a load without a range of blocks");
    CHECK(load({{{0, 3, 2}, two}}) ==
          "2 blocks of kind 0 from 3 on are not claimed (4 from 4 on are)");
    CHECK(load({{{0, 7, 2}, two}}) ==
          "2 blocks of kind 0 from 7 on are not claimed (4 from 4 on are)");
    CHECK(load({{{2, 3, 1}, {}}}) == "1 blocks of kind 2 from 3 on are not claimed (none is)");
    CHECK(load({{{0, 4, 2}, two}, {{0, 6, 2}, two}}) == "a load has two ranges of kind 0");
    CHECK(load({{{1, 5, 2}, two}}) == "2 blocks for 2 keys of kind 1, which has 2 for each key");
    CHECK(load({{{0, 4, 0}, {}}}).find("0 blocks in a job") == 0);
    CHECK(mover->load(1, id, std::vector<LoadRange>{{{0, 6, 2}, two}}, claimed).error().code ==
          Errc::kPeerLost);
    CHECK(text(mover->load(1, id, std::vector<LoadRange>{{{0, SIZE_MAX, 2}, two}}, claimed))
              .find("not claimed") != std::string::npos);
  }

  TEST_CASE("a block that is cut into cells has one number and one page for all of them") {
    Fixture f;
    f.options.ranks = 2;
    f.options.rank = 1;
    f.options.shard = 2;
    f.options.shards = 4;
    f.options.cells = 2;
    const std::vector<PageLayout> cells{f.large.layout(), f.large.layout()};
    const auto mover = Mover::start_cells(f.options, cells, f.device).value();
    CHECK(mover->page_bytes() == std::vector<std::uint64_t>{12000});
    const Id128 id = Id128::random();
    const auto save = [&](std::size_t keys, const Blocks& blocks) {
      return mover->save(id, 1, 0, std::vector<BlockKey>(keys), blocks, {});
    };
    CHECK(text(save(1, {0, 1})) == "2 blocks for 1 keys of kind 0, which has 1 for each key");
    CHECK(text(save(2, {0, 20})) == "block 20 of 20");
    CHECK(save(2, {0, 19}).error().code == Errc::kPeerLost);
  }

  TEST_CASE("cells that cannot be registered are rejected with the reason") {
    Fixture f;
    f.options.cells = 2;
    f.options.shards = 2;
    const auto reason = [&](const std::vector<PageLayout>& cells) {
      const auto started = Mover::start_cells(f.options, cells, f.device);
      REQUIRE_FALSE(started);
      CHECK(started.error().code == Errc::kInvalidArgument);
      return started.error().detail;
    };
    CHECK(reason({f.large.layout()}) == "1 layouts for 2 cells");
    CHECK(reason({f.large.layout(), f.small.layout()}) == "cells of 6000 and 512 bytes");
    std::byte* const base = f.small.layout().segments().front().base;
    const std::uint64_t half = (std::uint64_t{1} << 29) + 1;
    const PageLayout big = PageLayout::create({{base, half, half}}, 1).value();
    CHECK(reason({big, big}) == "2 cells of 536870913 bytes; at most 1073741824 are cached");
    f.options.shard = 1;
    CHECK(reason({f.large.layout(), f.large.layout()}) ==
          "shard 1 of 2 for rank 0 of 1 with 2 cells");
    f.options.shard = 0;
    CHECK(Mover::start(f.options, f.kinds, f.device).error().detail ==
          "2 cells beside several kinds of blocks");
  }

  TEST_CASE("the checksum of a page with several parts follows from theirs, in their order") {
    using Sums = std::vector<std::uint64_t>;
    CHECK(checksum_of_parts(Sums{7}) == 7);
    CHECK(checksum_of_parts(Sums{7, 8}) != checksum_of_parts(Sums{8, 7}));
    CHECK(checksum_of_parts(Sums{7, kNoChecksum}) == kNoChecksum);
    CHECK(checksum_of_parts(Sums{kNoChecksum}) == kNoChecksum);
    const Sums pair{7, 8};
    CHECK(checksum_of_parts(pair) == PageChecksum::of(std::as_bytes(std::span(pair))));
  }
}

/// A device that has the early completion that the test names.
class PromisingDevice final : public Device {
 public:
  using Device::attach;
  Result<void> attach(std::span<const PageLayout>, std::span<std::byte>, CompletionSink) override {
    return {};
  }
  void detach() override {}
  Result<Event> record_event(Queue) override { return Event::kNow; }
  Result<void> submit(Batch) override { return {}; }
  void cancel(std::uint64_t) override {}
  Result<bool> complete_early(std::uint64_t ticket, Queue, Duration) override {
    asked.push_back(ticket);
    return std::find(ready.begin(), ready.end(), ticket) != ready.end();
  }
  std::vector<std::uint64_t> ready;
  std::vector<std::uint64_t> asked;
};

TEST_SUITE("CopyingLoads") {
  TEST_CASE("a load is completed early with the last of its batches that is not over") {
    PromisingDevice device;
    CopyingLoads loads;
    loads.add(1, {10, 11, 12}, {.load = 7, .blocks = 5}, {});
    const auto follow = [&] { return loads.follow(device, {}, {}, {}).size(); };

    device.ready = {10, 11};
    CHECK(follow() == 0);
    CHECK(device.asked == std::vector<std::uint64_t>{12});  // No queue waits for the others.
    CHECK_FALSE(loads.leave(1, 10, true));
    device.ready = {11, 12};
    CHECK(follow() == 1);
    CHECK(follow() == 0);

    CHECK(loads.leave(1, 12, true));
    CHECK(loads.leave(1, 11, true));
    CHECK_FALSE(loads.leave(1, 11, true));  // It is over.
  }

  TEST_CASE("a load of which a batch failed or was rejected is not completed early") {
    PromisingDevice device;
    device.ready = {10, 11};
    CopyingLoads loads;
    loads.add(1, {10, 11}, {}, {});
    loads.add(2, {10, 11}, {}, {});

    CHECK_FALSE(loads.leave(1, 10, false));
    loads.remove(2);

    CHECK(loads.follow(device, {}, {}, {}).empty());
    CHECK_FALSE(loads.leave(1, 11, true));
  }
}

}  // namespace
}  // namespace pegaflow
