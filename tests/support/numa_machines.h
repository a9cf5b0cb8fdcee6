#pragma once
/// \file
/// The kernel's description of the NUMA nodes of other machines, as files that NumaTopology reads.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/os/numa.h"

namespace pegaflow::testing {

/// One machine, in the format of the kernel's files.
struct NumaMachine {
  struct Node {
    std::uint32_t number = 0;
    std::string cpulist;
    std::string distance;
  };
  std::string name;
  std::string online;
  std::string has_memory;
  std::string cores_online;
  std::vector<Node> nodes;
  std::string mems_allowed = "0-1023";  ///< The process's.
};

/// One NUMA node: every small machine.
NumaMachine one_node();
/// Two sockets with 56 cores of two threads each, as in a DGX H100.
NumaMachine two_sockets();
/// Two sockets whose second threads are switched off, on a kernel that lists them all the same.
NumaMachine threads_off();
/// A socket with four NUMA nodes (EPYC, NPS4).
NumaMachine four_nodes();
/// Two sockets with four NUMA nodes each (EPYC 7742, NPS4).
NumaMachine eight_nodes();
/// Four NUMA nodes, of which two have no memory (Threadripper 2990WX).
NumaMachine memoryless_nodes();
/// Two sockets, and a CXL card's memory that has no cores.
NumaMachine cxl_memory();
/// A processor with its memory, a GPU's memory as a NUMA node without cores, and seven empty ones
/// (GH200).
NumaMachine grace_hopper();
/// Two sockets as NUMA nodes 0 and 8, and four GPUs' memory as nodes 252 to 255 (POWER9, AC922).
NumaMachine power9();
/// Sixteen NUMA nodes: more than a pool is divided among.
NumaMachine sixteen_nodes();

// Recordings of real machines: sysfs in the test data of hwloc (tests/hwloc/linux/NAME.tar.bz2 of
// its repository), as of 2026.

/// POWER9 with six GPUs whose memory is NUMA nodes 250 to 255; most threads are off, and the nodes
/// list them all the same (nvidiagpunumanodes).
NumaMachine recorded_power9();
/// Node 0 was taken offline, but not its memory; the distances still list both
/// (offline-cpu0-node0).
NumaMachine recorded_without_node_0();
/// Kunpeng 920: two sockets of two NUMA nodes, each pair with another distance
/// (128arm-2pa2n8cluster4co).
NumaMachine recorded_kunpeng();

/// The files of a machine in a directory of its own, which the destructor removes.
class NumaFiles {
 public:
  explicit NumaFiles(const NumaMachine& machine);
  ~NumaFiles();
  NumaFiles(const NumaFiles&) = delete;
  NumaFiles& operator=(const NumaFiles&) = delete;

  [[nodiscard]] NumaTopology::Sources sources() const;
  /// The counterpart of /sys/devices/system/node.
  [[nodiscard]] std::filesystem::path nodes() const;
  [[nodiscard]] NumaTopology read() const { return NumaTopology::read(sources()); }

 private:
  std::filesystem::path root_;
};

}  // namespace pegaflow::testing
