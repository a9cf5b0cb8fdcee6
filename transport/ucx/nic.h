#pragma once
/// \file
/// The RDMA cards of this machine, as the kernel lists them.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::ucx {

/// One port of a card.
struct Nic {
  std::string device;  ///< "mlx5_0".
  unsigned port = 1;
  bool is_active = false;          ///< The link is up.
  std::string link_layer;          ///< "InfiniBand" or "Ethernet".
  double gigabits_per_second = 0;  ///< Speed of the link; 0 when unknown.
  std::optional<std::uint32_t> numa_node;

  /// The name as UCX and our options write it: "mlx5_0:1".
  [[nodiscard]] std::string name() const { return device + ":" + std::to_string(port); }
  bool operator==(const Nic&) const = default;
};

/// Returns all ports, by device and number. Unreadable entries are left out. Tests pass a recorded
/// tree as `sysfs`.
std::vector<Nic> find_nics(const std::filesystem::path& sysfs = "/sys");

/// Returns the NUMA node of a card, by "mlx5_0:1" or "mlx5_0"; none when the kernel does not know.
std::optional<std::uint32_t> numa_node_of(std::string_view name,
                                          const std::filesystem::path& sysfs = "/sys");

/// Returns the ports of `nics` that are nearest to a PCI device such as a GPU, by its name in
/// sysfs, "0000:3b:00.0": those behind the most of the bridges in front of it, and of these those
/// of its NUMA node, if there are any. What crosses the processor between a card and a GPU has half
/// of the speed or less.
std::vector<Nic> nearest_to(std::string_view pci_address, std::span<const Nic> nics,
                            const std::filesystem::path& sysfs = "/sys");

/// The ports to use, and for each other one the reason.
struct NicChoice {
  std::vector<Nic> rails;
  std::vector<std::string> refused;  ///< "mlx5_1:1: its link is down".
};

/// Chooses the ports whose link is up, that `allow` names (empty: all), and that `deny` does not.
/// An entry of either list is "mlx5_0:1", or "mlx5_0" for all its ports, or a prefix: "mlx5_*".
NicChoice choose_nics(std::span<const Nic> nics, std::span<const std::string> allow,
                      std::span<const std::string> deny);

}  // namespace pegaflow::ucx
