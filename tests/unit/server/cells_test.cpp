// Blocks that engines of several tensor-parallel sizes share: ranks that hold several shards.
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "server/cache/cache_service.h"
#include "tests/unit/server/page_size.h"
#include "transport/checksum.h"

namespace pegaflow::server {
namespace {

using testing::kPage;

constexpr std::uint32_t kGrid = 4;

std::vector<BlockKey> keys(std::uint64_t chain, std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t words[2] = {(chain * 1000 + i + 1) * 0x9E3779B97F4A7C15ULL, chain};
    std::memcpy(made[i].bytes.data(), words, sizeof words);
  }
  return made;
}

/// The registration of a rank of an engine whose name is its size.
Registration rank(std::uint32_t number, std::uint32_t size) {
  const std::uint32_t cells = kGrid / size;
  return {.instance = std::to_string(size),
          .rank = number,
          .ranks = size,
          .shard = number * cells,
          .shards = kGrid,
          .factors = {{"weights", "shared"}},
          .page_bytes = cells * kPage,
          .cells = cells};
}

/// A service of 64 pages, and engines of 1, 2 and 4 ranks.
struct Fixture {
  explicit Fixture(const CacheService::Options& options = {.store = {.pool_bytes = 64 * kPage,
                                                                     .instance_share = 1.0,
                                                                     .server_share = 1.0}}) {
    auto made = CacheService::create(
        options, clock, [this](const Id128& connection) { service->disconnected(connection); });
    REQUIRE(made);
    service = std::move(*made);
  }
  ~Fixture() {
    while (service->work()) {
    }
    const auto checked = service->store().check();
    CHECK_MESSAGE(checked, (checked ? "" : checked.error().detail));
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  Id128 connect() const {
    const Id128 connection = Id128::random();
    REQUIRE(service->connected(connection, {.process = Id128::random(),
                                            .previous_connection = {},
                                            .build = "test",
                                            .watch = std::make_shared<int>(0)}));
    return connection;
  }
  /// The connections of an engine's ranks.
  std::vector<Id128> engine(std::uint32_t size) const {
    std::vector<Id128> ranks;
    for (std::uint32_t number = 0; number < size; ++number) {
      ranks.push_back(connect());
      REQUIRE(service->register_rank(ranks.back(), rank(number, size)));
    }
    return ranks;
  }
  std::vector<std::uint32_t> reserve(const Id128& rank, const JobId& job,
                                     std::span<const BlockKey> what) const {
    auto slots = service->reserve(rank, job, 0, what);
    REQUIRE(slots);
    return *slots;
  }
  void save(const std::vector<Id128>& ranks, std::span<const BlockKey> what) const {
    const JobId job{.scheduler = Id128::random(), .number = 1};
    for (const Id128& one : ranks) reserve(one, job, what);
    for (const Id128& one : ranks) REQUIRE(service->publish(one, job) == 0);
  }
  /// Claims blocks, opens them for a rank, and releases them.
  CacheService::Opened load(const Id128& rank, std::span<const BlockKey> what) {
    const Id128 token{7, ++last_};
    REQUIRE(service->claim(rank, token, what)->blocks == what.size());
    auto opened = service->open(rank, token, 0, what.size(), engine::PinId{last_});
    REQUIRE(opened);
    REQUIRE(service->release(rank, engine::PinId{last_}));
    REQUIRE(service->unclaim(rank, token));
    return *opened;
  }

  ManualClock clock;
  std::unique_ptr<CacheService> service;
  std::uint64_t last_ = 0;
};

TEST_SUITE("CacheService, cells") {
  TEST_CASE("each size finds what each other one saved, every rank at its own cells") {
    Fixture f;
    const std::map<std::uint32_t, std::vector<Id128>> engines = {
        {1, f.engine(1)}, {2, f.engine(2)}, {4, f.engine(4)}};
    for (const auto& [saver, ranks] : engines) {
      const std::vector<BlockKey> what = keys(saver, 3);
      f.save(ranks, what);
      const std::vector<std::uint32_t> frames = f.load(engines.at(1)[0], what).slots;
      for (const auto& [loader, others] : engines) {
        for (std::uint32_t number = 0; number < loader; ++number) {
          const std::vector<std::uint32_t> slots = f.load(others[number], what).slots;
          for (std::size_t i = 0; i < what.size(); ++i) {
            CHECK(slots[i] == frames[i] + number * kGrid / loader);
          }
        }
      }
    }
    CHECK(f.service->store().stats().insertions == 9);
  }

  TEST_CASE("a block is sealed once all ranks of its writer have published their cells") {
    Fixture f;
    const std::vector<Id128> two = f.engine(2);
    const std::vector<Id128> one = f.engine(1);
    const JobId job{.scheduler = Id128::random(), .number = 1};
    f.reserve(two[0], job, keys(1, 2));
    f.reserve(two[1], job, keys(1, 2));
    REQUIRE(f.service->publish(two[0], job) == 0);
    CHECK(f.service->lookup(one[0], keys(1, 2))->blocks == 0);

    REQUIRE(f.service->publish(two[1], job) == 0);

    CHECK(f.service->lookup(one[0], keys(1, 2))->blocks == 2);
    CHECK(f.service->stats().save_bytes == 2 * kGrid * kPage);
  }

  TEST_CASE("a rank that abandons its cells drops the block for all sizes") {
    Fixture f;
    const std::vector<Id128> two = f.engine(2);
    const JobId job{.scheduler = Id128::random(), .number = 1};
    f.reserve(two[0], job, keys(1, 2));
    f.reserve(two[1], job, keys(1, 2));
    REQUIRE(f.service->publish(two[0], job) == 0);
    REQUIRE(f.service->abandon(two[1], job));
    CHECK(f.service->lookup(two[0], keys(1, 2))->blocks == 0);
    f.save(f.engine(1), keys(1, 2));
    CHECK(f.service->lookup(two[0], keys(1, 2))->blocks == 2);
  }

  TEST_CASE("the checksum of a page follows from those of its cells") {
    Fixture f;
    const std::vector<Id128> one = f.engine(1);
    const std::vector<Id128> two = f.engine(2);
    using Sums = std::vector<std::uint64_t>;
    const JobId job{.scheduler = Id128::random(), .number = 1};
    f.reserve(one[0], job, keys(1, 2));
    CHECK(f.service->publish(one[0], job, Sums{1, 2}).error().detail == "2 checksums for 8 pages");
    REQUIRE(f.service->publish(one[0], job, Sums{1, 2, 3, 4, 5, 6, 0, 8}) == 0);

    CHECK(f.load(one[0], keys(1, 2)).checksums ==
          Sums{checksum_of_parts(Sums{1, 2, 3, 4}), kNoChecksum});
    CHECK(f.load(two[0], keys(1, 2)).checksums ==
          Sums{checksum_of_parts(Sums{1, 2}), checksum_of_parts(Sums{5, 6})});
    CHECK(f.load(two[1], keys(1, 2)).checksums == Sums{checksum_of_parts(Sums{3, 4}), kNoChecksum});
    // New blocks in the same slots have none.
    f.save(two, keys(2, 16));
    CHECK(f.load(one[0], keys(2, 16)).checksums.empty());
  }

  TEST_CASE("ranks that contradict each other, the namespace or the pool are refused by name") {
    Fixture f;
    f.engine(2);
    const auto refused = [&](auto&& change) {
      Registration wrong = rank(0, 1);
      change(wrong);
      const auto done = f.service->register_rank(f.connect(), wrong);
      REQUIRE_FALSE(done);
      return done.error().detail;
    };
    CHECK(refused([](Registration& r) { r.page_bytes = 4 * kPage + 2048; }) ==
          "register: pages of 18432 bytes for 4 cells: a cell has to be a multiple of 4096 bytes");
    CHECK(refused([](Registration& r) { r.page_bytes = 8 * kPage; }).find("whose pages have") !=
          std::string::npos);
    CHECK(refused([](Registration& r) {
            r.shards = 8;
            r.cells = 8;
            r.page_bytes = 8 * kPage;
          }).find("8 shards a block in namespace") != std::string::npos);
    const Id128 worker = f.connect();
    Registration three = rank(0, 2);
    three.instance = "third";
    REQUIRE(f.service->register_rank(worker, three));
    Registration other = rank(1, 2);
    other.instance = "third";
    other.cells = 1;
    CHECK(f.service->register_rank(f.connect(), other).error().detail ==
          "register: rank 1 reports 1 cells, others of instance third report 2");
  }

  TEST_CASE("an engine without a rank for some cells is never complete") {
    Fixture f;
    const Id128 first = f.connect();
    const Id128 second = f.connect();
    Registration same = rank(0, 2);
    REQUIRE(f.service->register_rank(first, same));
    same.rank = 1;
    REQUIRE(f.service->register_rank(second, same));
    CHECK_FALSE(f.service->lookup(first, keys(1, 1))->complete);
    CHECK(f.service->instances().front().state.find("no rank of instance 2 holds shard 2") !=
          std::string::npos);
  }

  TEST_CASE("the cells of a block are adjacent even if their ranks are on two NUMA nodes") {
    Fixture f({.store = {.pool_bytes = 64 * kPage, .numa_nodes = 2},
               .part_of_numa_node = {{0, 0}, {1, 1}}});
    std::vector<Id128> two;
    for (std::uint32_t number = 0; number < 2; ++number) {
      Registration own = rank(number, 2);
      own.node = static_cast<std::int32_t>(number);
      two.push_back(f.connect());
      REQUIRE(f.service->register_rank(two.back(), own));
    }
    f.save(two, keys(1, 2));
    const std::vector<Id128> one = f.engine(1);
    const std::vector<std::uint32_t> frames = f.load(one[0], keys(1, 2)).slots;
    CHECK(f.load(two[0], keys(1, 2)).slots == frames);
    CHECK(f.load(two[1], keys(1, 2)).slots == std::vector{frames[0] + 2, frames[1] + 2});
  }

  TEST_CASE("blocks whose shards lie on two NUMA nodes are refused to a rank of several") {
    Fixture f({.store = {.pool_bytes = 64 * kPage, .numa_nodes = 2},
               .part_of_numa_node = {{0, 0}, {1, 1}}});
    for (std::uint32_t number = 0; number < 4; ++number) {
      Registration own = rank(number, 4);
      own.cells = 0;  // As a client that claims this namespace without sharing its blocks.
      own.node = static_cast<std::int32_t>(number / 2);
      REQUIRE(f.service->register_rank(f.connect(), own));
    }
    const auto refused = f.service->register_rank(f.connect(), rank(0, 1));
    REQUIRE_FALSE(refused);
    CHECK(refused.error().detail.find("4 cells from shard 0 on in namespace") == 0);
  }

  TEST_CASE("a job of one rank of several cells is over for those that wait for it") {
    Fixture f;
    const std::vector<Id128> one = f.engine(1);
    const Id128 scheduler = Id128::random();
    const Id128 attached = f.connect();
    REQUIRE(f.service->attach(attached, "1", scheduler));
    const JobId job{.scheduler = scheduler, .number = 1};
    bool answered = false;
    f.service->await_job(attached, job, std::chrono::seconds(5), [&](const Result<void>& result) {
      answered = true;
      CHECK(result);
    });
    f.reserve(one[0], job, keys(1, 2));
    CHECK_FALSE(answered);
    REQUIRE(f.service->publish(one[0], job) == 0);
    CHECK(answered);
  }
}

}  // namespace
}  // namespace pegaflow::server
