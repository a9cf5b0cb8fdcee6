#include <cerrno>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include <doctest/doctest.h>

#include "engine/pool/placement.h"
#include "engine/pool/pool.h"
#include "engine/types/shape.h"
#include "tests/support/numa_machines.h"
#include "tests/support/refuse.h"
#include "tests/support/skip.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kPage = 4096;
const std::atomic<bool> kGoOn{false};

/// Memory that was not touched yet.
class Untouched {
 public:
  explicit Untouched(std::uint64_t size) : size_(size) {
    base_ = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(base_ != MAP_FAILED);
  }
  ~Untouched() { ::munmap(base_, size_); }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;
  [[nodiscard]] std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(base_), size_};
  }

 private:
  void* base_;
  std::uint64_t size_;
};

/// Parts of a pool that all come from the one NUMA node that every machine has: the behavior of a
/// kernel with several, as far as one shows it.
std::vector<NumaNode> node_0(std::size_t times) {
  NumaNode node{.number = 0, .cores = allowed_cores(), .has_memory = true, .distances = {}};
  return std::vector<NumaNode>(times, node);
}

std::vector<NumaNode> nodes_of(const testing::NumaMachine& machine) {
  return testing::NumaFiles(machine).read().memory_nodes();
}

/// Whether this kernel places memory at all; where it does not, only the refusals can be tested.
bool may_place() {
  const Untouched memory(2 * kMiB);
  return place_pool(memory.bytes(), kPage, engine::NumaPolicy::kAuto, node_0(2)).refused.empty();
}

TEST_SUITE("PoolPlacement") {
  TEST_CASE("policies have names, and other names are rejected") {
    for (const engine::NumaPolicy policy :
         {engine::NumaPolicy::kAuto, engine::NumaPolicy::kInterleave, engine::NumaPolicy::kOff}) {
      CHECK(engine::numa_policy(to_string(policy)).value() == policy);
    }
    const auto wrong = engine::numa_policy("sideways");
    REQUIRE_FALSE(wrong);
    CHECK(wrong.error().code == Errc::kInvalidArgument);
    CHECK(wrong.error().detail.find("interleave") != std::string::npos);
  }

  TEST_CASE("with one NUMA node, or none, there is nothing to place") {
    const Untouched memory(kMiB);
    for (const engine::NumaPolicy policy :
         {engine::NumaPolicy::kAuto, engine::NumaPolicy::kInterleave}) {
      for (const std::size_t nodes : {0, 1}) {
        const auto placement = place_pool(memory.bytes(), kPage, policy, node_0(nodes));
        CHECK(placement.policy == engine::NumaPolicy::kOff);
        CHECK(placement.numa_nodes.empty());
        CHECK(placement.refused.empty());
        CHECK(to_string(placement) == "off");
      }
    }
    CHECK(
        place_pool(memory.bytes(), kPage, engine::NumaPolicy::kOff, node_0(2)).numa_nodes.empty());
  }

  TEST_CASE("each NUMA node has its part of the pool, with the ranges of the store") {
    if (!may_place()) PEGA_SKIP("this kernel refuses mbind");
    const Untouched memory(64 * kMiB + 12 * kPage);
    auto placement = place_pool(memory.bytes(), kPage, engine::NumaPolicy::kAuto, node_0(4));
    CHECK(placement.policy == engine::NumaPolicy::kAuto);
    REQUIRE(placement.ranges.size() == 4);
    const auto dealt = engine::numa_ranges(memory.bytes().size(), 4);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(placement.ranges[i].begin == dealt[i].begin);
      CHECK(placement.ranges[i].end == dealt[i].end);
    }
    CHECK(placement.ranges.back().end == memory.bytes().size());
    CHECK(to_string(placement) == "auto, NUMA nodes 0 0 0 0");
  }

  TEST_CASE("pages are verified on their NUMA nodes") {
    const auto pool = engine::Pool::create(
        {.size_bytes = 16 * kMiB, .numa = engine::NumaPolicy::kAuto, .numa_nodes = node_0(2)},
        kGoOn, {});
    REQUIRE(pool);
    engine::PoolPlacement placement = pool->placement();
    if (!placement.in_place) PEGA_SKIP("this kernel does not say where a page is");
    CHECK(placement.in_place == 1.0);

    // As if the second part had been meant for a NUMA node that was full.
    placement.numa_nodes[1].number = 7;
    verify_placement(pool->bytes(), placement);
    CHECK(placement.in_place == 0.5);
  }

  TEST_CASE("a pool is whole and its threads keep their cores, however many parts it has") {
    const auto cores = allowed_cores();
    std::vector<NumaNode> nodes = node_0(3);
    nodes[0].cores = {cores.front()};
    nodes[1].cores = {cores.back()};
    nodes[2].cores = {65'000};  // This thread may not use it: then from anywhere.
    for (const unsigned threads : {1U, 2U, 7U}) {
      const auto pool = engine::Pool::create({.size_bytes = 200 * kMiB + 5 * kPage,
                                              .threads = threads,
                                              .numa = engine::NumaPolicy::kAuto,
                                              .numa_nodes = nodes},
                                             kGoOn, {});
      REQUIRE(pool);
      std::vector<unsigned char> there(pool->size_bytes() / kPage);
      REQUIRE(::mincore(pool->bytes().data(), pool->size_bytes(), there.data()) == 0);
      std::size_t missing = 0;
      for (const unsigned char page : there) missing += (page & 1U) == 0 ? 1 : 0;
      CHECK(missing == 0);
      CHECK(allowed_cores() == cores);
    }
  }

  TEST_CASE("a pool that is too small to be divided lies anywhere") {
    const Untouched memory(kPage);
    const auto placement = place_pool(memory.bytes(), kPage, engine::NumaPolicy::kAuto, node_0(2));
    CHECK(placement.policy == engine::NumaPolicy::kOff);
    CHECK(placement.refused.empty());
  }

  TEST_CASE("with too many NUMA nodes the pool lies on the first of them") {
    if (!may_place()) PEGA_SKIP("this kernel refuses mbind");
    const Untouched memory(64 * kMiB);
    const auto placement = place_pool(memory.bytes(), kPage, engine::NumaPolicy::kAuto, node_0(16));
    CHECK(placement.ranges.size() == engine::kMaxNumaNodes);
    CHECK(placement.numa_nodes.size() == engine::kMaxNumaNodes);
    // Page by page it lies on all of them.
    const Untouched other(kMiB);
    const auto interleaved =
        place_pool(other.bytes(), kPage, engine::NumaPolicy::kInterleave, node_0(16));
    CHECK(interleaved.policy == engine::NumaPolicy::kInterleave);
    CHECK(interleaved.numa_nodes.size() == 16);
    CHECK(interleaved.ranges.empty());
  }

  TEST_CASE("unknown NUMA nodes are refused, and the pool lies anywhere") {
    for (const engine::NumaPolicy policy :
         {engine::NumaPolicy::kAuto, engine::NumaPolicy::kInterleave}) {
      const auto pool =
          engine::Pool::create({.size_bytes = 8 * kMiB,
                                .numa = policy,
                                .numa_nodes = {{.number = 901, .cores = {0}, .distances = {}},
                                               {.number = 902, .cores = {0}, .distances = {}}}},
                               kGoOn, {});
      REQUIRE(pool);
      CHECK(pool->placement().policy == engine::NumaPolicy::kOff);
      CHECK(pool->placement().ranges.empty());
      CHECK(pool->placement().refused.find("mbind") != std::string::npos);
      CHECK_FALSE(pool->placement().in_place);
    }
  }

  TEST_CASE("where a filter refuses the system call there is a pool, and advice") {
    std::thread([] {  // The filter ends with its thread.
      if (!testing::answer_mbind_with(EPERM))
        PEGA_SKIP("this kernel has no filters of system calls");
      for (const auto& machine : {testing::two_sockets(), testing::eight_nodes()}) {
        const auto pool = engine::Pool::create({.size_bytes = 8 * kMiB,
                                                .numa = engine::NumaPolicy::kAuto,
                                                .numa_nodes = nodes_of(machine)},
                                               kGoOn, {});
        REQUIRE(pool);
        CHECK(pool->placement().policy == engine::NumaPolicy::kOff);
        CHECK(pool->placement().numa_nodes.empty());
        CHECK(pool->placement().refused.find("SYS_NICE") != std::string::npos);
        CHECK(to_string(pool->placement()).find("refused") != std::string::npos);
      }
    })
        .join();
  }

  TEST_CASE("machines with several NUMA nodes have a part of the pool on each that has memory") {
    std::thread([] {
      if (!testing::answer_mbind_with(0)) {  // Their NUMA nodes do not exist here.
        PEGA_SKIP("this kernel has no filters of system calls");
      }
      const auto numbers_on = [](const testing::NumaMachine& machine) {
        const Untouched memory(256 * kMiB);
        const auto placement =
            place_pool(memory.bytes(), kPage, engine::NumaPolicy::kAuto, nodes_of(machine));
        CHECK(placement.ranges.size() == placement.numa_nodes.size());
        std::vector<std::uint32_t> numbers;
        for (const NumaNode& node : placement.numa_nodes) numbers.push_back(node.number);
        return numbers;
      };
      using Numbers = std::vector<std::uint32_t>;
      CHECK(numbers_on(testing::one_node()).empty());
      CHECK(numbers_on(testing::two_sockets()) == Numbers{0, 1});
      CHECK(numbers_on(testing::eight_nodes()) == Numbers{0, 1, 2, 3, 4, 5, 6, 7});
      CHECK(numbers_on(testing::memoryless_nodes()) == Numbers{0, 2});
      CHECK(numbers_on(testing::grace_hopper()).empty());
      CHECK(numbers_on(testing::power9()) == Numbers{0, 8});
      CHECK(numbers_on(testing::sixteen_nodes()) == Numbers{0, 1, 2, 3, 4, 5, 6, 7});
    }).join();
  }
}

}  // namespace
}  // namespace pegaflow
