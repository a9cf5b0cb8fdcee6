#include "base/os/numa.h"

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/numa_machines.h"

namespace pegaflow {
namespace {

using testing::NumaFiles;
using testing::NumaMachine;
using Numbers = std::vector<std::uint32_t>;

Numbers numbers_of(const std::vector<NumaNode>& nodes) {
  Numbers numbers;
  for (const NumaNode& node : nodes) numbers.push_back(node.number);
  return numbers;
}

/// The NUMA nodes of a machine on which a pool would lie.
Numbers pool_nodes(const NumaMachine& machine) {
  return numbers_of(NumaFiles(machine).read().memory_nodes());
}

TEST_SUITE("NUMA") {
  TEST_CASE("the kernel's lists are parsed, and any other text is rejected") {
    CHECK(parse_number_list("0\n").value() == Numbers{0});
    CHECK(parse_number_list("\t0-3 ").value() == Numbers{0, 1, 2, 3});
    CHECK(parse_number_list("0-1,4,6-7\n").value() == Numbers{0, 1, 4, 6, 7});
    CHECK(parse_number_list("4,0-1,1").value() == Numbers{0, 1, 4});
    CHECK(parse_number_list("").value().empty());
    CHECK(parse_number_list("\n").value().empty());
    for (const char* const wrong :
         {"a", "1-", "-1", "3-1", "0,", ",0", "0;1", "0 1", "65536", "0-65536", "99999999999"}) {
      INFO(std::string(wrong));
      const auto read = parse_number_list(wrong);
      REQUIRE_FALSE(read);
      CHECK(read.error().code == Errc::kInvalidArgument);
    }
  }

  TEST_CASE("a pool lies on the NUMA nodes that have memory and cores") {
    CHECK(pool_nodes(testing::one_node()) == Numbers{0});
    CHECK(pool_nodes(testing::two_sockets()) == Numbers{0, 1});
    CHECK(pool_nodes(testing::four_nodes()) == Numbers{0, 1, 2, 3});
    CHECK(pool_nodes(testing::eight_nodes()) == Numbers{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(pool_nodes(testing::memoryless_nodes()) == Numbers{0, 2});
    CHECK(pool_nodes(testing::sixteen_nodes()).size() == 16);
  }

  TEST_CASE("memory without cores belongs to a device and is not used") {
    CHECK(pool_nodes(testing::cxl_memory()) == Numbers{0, 1});
    CHECK(pool_nodes(testing::grace_hopper()) == Numbers{0});
    CHECK(pool_nodes(testing::power9()) == Numbers{0, 8});
  }

  TEST_CASE("NUMA nodes that the process may not use do not count") {
    NumaMachine machine = testing::eight_nodes();
    machine.mems_allowed = "4-5";
    CHECK(pool_nodes(machine) == Numbers{4, 5});
    machine.mems_allowed = "no list";
    CHECK(pool_nodes(machine).size() == 8);  // No list of allowed nodes was read.
  }

  TEST_CASE("cores that are offline belong to no NUMA node") {
    const auto topology = NumaFiles(testing::threads_off()).read();
    REQUIRE(topology.nodes().size() == 2);
    CHECK(topology.nodes()[0].cores.size() == 28);
    CHECK(topology.nodes()[1].cores.front() == 28);
    CHECK(topology.node_of(Numbers{27}) == 0);
    CHECK_FALSE(topology.node_of(Numbers{56}));

    NumaMachine half = testing::two_sockets();
    half.cores_online = "56-111";
    CHECK(pool_nodes(half) == Numbers{1});
  }

  TEST_CASE("a process that is bound to the cores of one NUMA node has that node") {
    const auto topology = NumaFiles(testing::two_sockets()).read();
    CHECK(topology.node_of(Numbers{0, 55, 112}) == 0);
    CHECK(topology.node_of(Numbers{56, 223}) == 1);
    CHECK_FALSE(topology.node_of(Numbers{55, 56}));
    CHECK_FALSE(topology.node_of(Numbers{224}));
    CHECK_FALSE(topology.node_of(Numbers{}));
  }

  TEST_CASE("the nearest memory of a NUMA node without memory") {
    const auto machine = NumaFiles(testing::cxl_memory()).read();
    const auto pool = machine.memory_nodes();
    CHECK(machine.nearest(0, pool) == 0);
    CHECK(machine.nearest(1, pool) == 1);
    CHECK(machine.nearest(2, pool) == 0);  // 14 to node 0, 24 to node 1.
    CHECK_FALSE(machine.nearest(3, pool));
    CHECK_FALSE(machine.nearest(0, {}));

    const auto power9 = NumaFiles(testing::power9()).read();
    CHECK(power9.nearest(8, power9.memory_nodes()) == 1);
    CHECK(power9.nearest(254, power9.memory_nodes()) == 0);  // As far from both.
  }

  TEST_CASE("recorded: GPU memory is not used, and offline threads belong to no NUMA node") {
    const auto power9 = NumaFiles(testing::recorded_power9()).read();
    CHECK(power9.nodes().size() == 8);
    CHECK(numbers_of(power9.memory_nodes()) == Numbers{0, 8});
    CHECK(power9.nodes()[0].cores.size() == 16);
    CHECK(power9.node_of(Numbers{0, 15}) == 0);
    CHECK(power9.node_of(Numbers{88, 103}) == 8);
    CHECK_FALSE(power9.node_of(Numbers{16}));
    CHECK(power9.nearest(8, power9.memory_nodes()) == 1);
    CHECK(power9.nearest(250, power9.memory_nodes()) == 0);  // As far from both.
  }

  TEST_CASE(
      "recorded: an offline NUMA node is missing, even if other nodes list a distance to it") {
    const auto rest = NumaFiles(testing::recorded_without_node_0()).read();
    CHECK(numbers_of(rest.memory_nodes()) == Numbers{1});
    CHECK(rest.nodes()[0].cores == Numbers{5, 7, 9, 11, 13, 15, 17, 19});
    CHECK(rest.nodes()[0]
              .distances.empty());  // Two distances for one node: to which nodes is unknown.
    CHECK(rest.nearest(1, rest.memory_nodes()) == 0);
  }

  TEST_CASE("recorded: the nearest of four NUMA nodes at different distances") {
    const auto kunpeng = NumaFiles(testing::recorded_kunpeng()).read();
    const auto pool = kunpeng.memory_nodes();
    REQUIRE(numbers_of(pool) == Numbers{0, 1, 2, 3});
    CHECK(kunpeng.node_of(Numbers{95, 64}) == 2);
    CHECK(kunpeng.nearest(1, std::span(pool).subspan(2)) == 0);  // 25 to node 2, 32 to node 3.
    CHECK(kunpeng.nearest(2, std::span(pool).first(2)) == 1);    // 32 to node 0, 25 to node 1.
  }

  TEST_CASE("invalid distances are ignored") {
    NumaMachine machine = testing::two_sockets();
    machine.nodes[0].distance = "10 21 21";
    machine.nodes[1].distance = "far";
    const auto topology = NumaFiles(machine).read();
    CHECK(topology.nodes()[0].distances.empty());
    CHECK(topology.nodes()[1].distances.empty());
    const auto pool = topology.memory_nodes();
    CHECK(topology.nearest(1, pool) == 1);
    CHECK_FALSE(topology.nearest(1, std::span(pool).first(1)));
  }

  TEST_CASE("a machine without valid NUMA files has no NUMA nodes") {
    CHECK(NumaTopology::read({.sysfs = "/nonexistent", .process_status = "/nonexistent"})
              .nodes()
              .empty());
    NumaMachine machine = testing::two_sockets();
    machine.online = "all of them";
    CHECK(NumaFiles(machine).read().nodes().empty());
    machine = testing::two_sockets();
    machine.has_memory = "";
    CHECK(pool_nodes(machine).empty());
    machine = testing::two_sockets();
    machine.nodes.pop_back();  // Its files are missing.
    CHECK(pool_nodes(machine) == Numbers{0});
  }

  TEST_CASE("this machine has a NUMA node, and all cores of this thread belong to the machine") {
    const auto here = NumaTopology::read();
    const Numbers cores = allowed_cores();
    CHECK_FALSE(cores.empty());
    if (here.nodes().empty()) {
      MESSAGE("this kernel has no /sys/devices/system/node");
      return;
    }
    CHECK_FALSE(here.memory_nodes().empty());
    if (here.nodes().size() == 1) CHECK(here.node_of(cores) == here.nodes()[0].number);
  }

  TEST_CASE("a thread is bound only to cores that it may use") {
    std::thread([] {
      const Numbers before = allowed_cores();
      REQUIRE_FALSE(before.empty());
      CHECK_FALSE(keep_thread_on({}));
      CHECK_FALSE(keep_thread_on(Numbers{65000}));
      CHECK_FALSE(keep_thread_on(Numbers{100'000}));
      CHECK(allowed_cores() == before);
      CHECK(keep_thread_on(Numbers{before.back(), 65000}));
      CHECK(allowed_cores() == Numbers{before.back()});
      CHECK(keep_thread_on(before));
      CHECK(allowed_cores() == before);
    }).join();
  }
}

}  // namespace
}  // namespace pegaflow
