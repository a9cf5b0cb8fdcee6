#pragma once
/// \file
/// Which RDMA cards this machine has, as the kernel says it.

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
  double gigabits_per_second = 0;  ///< Of the link; 0: the kernel does not say.
  std::optional<std::uint32_t> numa_node;

  /// As UCX and our options name it: "mlx5_0:1".
  [[nodiscard]] std::string name() const { return device + ":" + std::to_string(port); }
  bool operator==(const Nic&) const = default;
};

/// All ports, by device and number. What cannot be read counts as not there. `sysfs` is another
/// place in tests: a recorded tree.
std::vector<Nic> find_nics(const std::filesystem::path& sysfs = "/sys");

/// The node of memory beside a card, by "mlx5_0:1" or "mlx5_0"; none where the kernel does not say.
std::optional<std::uint32_t> numa_node_of(std::string_view name,
                                          const std::filesystem::path& sysfs = "/sys");

/// Which ports are used, and why the others are not.
struct NicChoice {
  std::vector<Nic> rails;
  std::vector<std::string> refused;  ///< "mlx5_1:1: its link is down".
};

/// Those whose link is up, that `allow` names (empty: all), and that `deny` does not. A word of
/// either is "mlx5_0:1", "mlx5_0" for all its ports, or begins a name: "mlx5_*".
NicChoice choose_nics(std::span<const Nic> nics, std::span<const std::string> allow,
                      std::span<const std::string> deny);

}  // namespace pegaflow::ucx
