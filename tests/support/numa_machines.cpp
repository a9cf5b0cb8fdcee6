#include "tests/support/numa_machines.h"

#include <cstdlib>
#include <fstream>
#include <stdexcept>

#include <fmt/format.h>

namespace pegaflow::testing {
namespace {

void write(const std::filesystem::path& path, const std::string& line) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path);
  file << line << '\n';
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

/// `count` nodes of `cores` cores, all second threads after the first ones; `distance` returns the
/// distance of two nodes.
template <typename Distance>
NumaMachine even(const std::string& name, std::uint32_t count, std::uint32_t cores,
                 Distance&& distance) {
  NumaMachine machine{.name = name,
                      .online = fmt::format("0-{}", count - 1),
                      .has_memory = fmt::format("0-{}", count - 1),
                      .cores_online = fmt::format("0-{}", 2 * count * cores - 1),
                      .nodes = {}};
  for (std::uint32_t node = 0; node < count; ++node) {
    const std::uint32_t first = node * cores;
    const std::uint32_t second = (count + node) * cores;
    std::string row;
    for (std::uint32_t other = 0; other < count; ++other) {
      row += fmt::format("{}{}", other == 0 ? "" : " ", other == node ? 10 : distance(node, other));
    }
    machine.nodes.push_back({.number = node,
                             .cpulist = fmt::format("{}-{},{}-{}", first, first + cores - 1, second,
                                                    second + cores - 1),
                             .distance = row});
  }
  return machine;
}

}  // namespace

NumaMachine one_node() {
  return {.name = "one node",
          .online = "0",
          .has_memory = "0",
          .cores_online = "0-7",
          .nodes = {{.number = 0, .cpulist = "0-7", .distance = "10"}}};
}

NumaMachine two_sockets() {
  return even("two sockets", 2, 56, [](auto, auto) { return 21; });
}

NumaMachine threads_off() {
  NumaMachine machine = even("threads off", 2, 28, [](auto, auto) { return 21; });
  machine.cores_online = "0-55";
  return machine;
}

NumaMachine four_nodes() {
  return even("four nodes", 4, 16, [](auto, auto) { return 12; });
}

NumaMachine eight_nodes() {
  return even("eight nodes", 8, 16, [](auto a, auto b) { return a / 4 == b / 4 ? 12 : 32; });
}

NumaMachine memoryless_nodes() {
  return {.name = "memoryless nodes",
          .online = "0-3",
          .has_memory = "0,2",
          .cores_online = "0-63",
          .nodes = {{.number = 0, .cpulist = "0-7,32-39", .distance = "10 16 16 16"},
                    {.number = 1, .cpulist = "16-23,48-55", .distance = "16 10 16 16"},
                    {.number = 2, .cpulist = "8-15,40-47", .distance = "16 16 10 16"},
                    {.number = 3, .cpulist = "24-31,56-63", .distance = "16 16 16 10"}}};
}

NumaMachine cxl_memory() {
  NumaMachine machine = even("CXL memory", 2, 32, [](auto, auto) { return 21; });
  machine.online = machine.has_memory = "0-2";
  machine.nodes[0].distance = "10 21 14";
  machine.nodes[1].distance = "21 10 24";
  machine.nodes.push_back({.number = 2, .cpulist = "", .distance = "14 24 10"});
  return machine;
}

NumaMachine grace_hopper() {
  NumaMachine machine{.name = "Grace Hopper",
                      .online = "0-8",
                      .has_memory = "0-1",
                      .cores_online = "0-71",
                      .nodes = {}};
  for (std::uint32_t node = 0; node < 9; ++node) {
    std::string row;
    for (std::uint32_t other = 0; other < 9; ++other) {
      const int distance = other == node ? 10 : node == 0 || other == 0 ? 80 : 255;
      row += fmt::format("{}{}", other == 0 ? "" : " ", distance);
    }
    machine.nodes.push_back({.number = node, .cpulist = node == 0 ? "0-71" : "", .distance = row});
  }
  return machine;
}

NumaMachine power9() {
  NumaMachine machine{
      .name = "POWER9",
      .online = "0,8,252-255",
      .has_memory = "0,8,252-255",
      .cores_online = "0-127",
      .nodes = {{.number = 0, .cpulist = "0-63", .distance = "10 40 80 80 80 80"},
                {.number = 8, .cpulist = "64-127", .distance = "40 10 80 80 80 80"}}};
  for (std::uint32_t node = 252; node < 256; ++node) {
    std::string row = "80 80";
    for (std::uint32_t other = 252; other < 256; ++other) {
      row += other == node ? " 10" : " 80";
    }
    machine.nodes.push_back({.number = node, .cpulist = "", .distance = row});
  }
  return machine;
}

NumaMachine sixteen_nodes() {
  return even("sixteen nodes", 16, 4, [](auto a, auto b) { return a / 2 == b / 2 ? 12 : 21; });
}

NumaMachine recorded_power9() {
  return {.name = "recorded POWER9",
          .online = "0,8,250-255",
          .has_memory = "0,8,250-255",
          .cores_online = "0-15,88-103",
          .nodes = {{.number = 0, .cpulist = "0-87", .distance = "10 40 80 80 80 80 80 80"},
                    {.number = 8, .cpulist = "88-175", .distance = "40 10 80 80 80 80 80 80"},
                    {.number = 250, .cpulist = "", .distance = "80 80 10 80 80 80 80 80"},
                    {.number = 251, .cpulist = "", .distance = "80 80 80 10 80 80 80 80"},
                    {.number = 252, .cpulist = "", .distance = "80 80 80 80 10 80 80 80"},
                    {.number = 253, .cpulist = "", .distance = "80 80 80 80 80 10 80 80"},
                    {.number = 254, .cpulist = "", .distance = "80 80 80 80 80 80 10 80"},
                    {.number = 255, .cpulist = "", .distance = "80 80 80 80 80 80 80 10"}}};
}

NumaMachine recorded_without_node_0() {
  return {
      .name = "recorded without node 0",
      .online = "1",
      .has_memory = "0-1",
      .cores_online = "4-20",
      .nodes = {{.number = 1, .cpulist = "1,3,5,7,9,11,13,15,17,19,21,23", .distance = "21 10"}}};
}

NumaMachine recorded_kunpeng() {
  return {.name = "recorded Kunpeng 920",
          .online = "0-3",
          .has_memory = "0-3",
          .cores_online = "0-127",
          .nodes = {{.number = 0, .cpulist = "0-31", .distance = "10 16 32 33"},
                    {.number = 1, .cpulist = "32-63", .distance = "16 10 25 32"},
                    {.number = 2, .cpulist = "64-95", .distance = "32 25 10 16"},
                    {.number = 3, .cpulist = "96-127", .distance = "33 32 16 10"}}};
}

NumaFiles::NumaFiles(const NumaMachine& machine) {
  char name[] = "/tmp/pega-numa-XXXXXX";
  if (::mkdtemp(name) == nullptr) throw std::runtime_error("no directory under /tmp");
  root_ = name;
  write(nodes() / "online", machine.online);
  write(nodes() / "has_memory", machine.has_memory);
  write(root_ / "sys/devices/system/cpu/online", machine.cores_online);
  write(root_ / "status", "Name:\ttest\nMems_allowed_list:\t" + machine.mems_allowed);
  for (const NumaMachine::Node& node : machine.nodes) {
    const auto own = nodes() / fmt::format("node{}", node.number);
    write(own / "cpulist", node.cpulist);
    write(own / "distance", node.distance);
  }
}

NumaFiles::~NumaFiles() {
  std::error_code ignored;  // A directory that is left under /tmp does not fail a test.
  std::filesystem::remove_all(root_, ignored);
}

std::filesystem::path NumaFiles::nodes() const { return root_ / "sys/devices/system/node"; }

NumaTopology::Sources NumaFiles::sources() const {
  return {.sysfs = root_ / "sys", .process_status = root_ / "status"};
}

}  // namespace pegaflow::testing
