#include "transport/ucx/nic.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <system_error>

namespace pegaflow::ucx {
namespace {

namespace fs = std::filesystem;

/// The first line of a file; empty when there is none.
std::string line_of(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

template <typename T>
std::optional<T> number_in(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

bool matches(const Nic& nic, const std::string& word) {
  if (word.ends_with('*')) return nic.name().starts_with(word.substr(0, word.size() - 1));
  return word == nic.name() || word == nic.device;
}

bool any_matches(const Nic& nic, std::span<const std::string> words) {
  return std::any_of(words.begin(), words.end(),
                     [&nic](const std::string& word) { return matches(nic, word); });
}

/// The NUMA node of a device, by its folder. -1 there: the kernel does not know, as on machines
/// with one NUMA node and for cards in software.
std::optional<std::uint32_t> node_in(const fs::path& device) {
  const auto node = number_in<std::int64_t>(line_of(device / "numa_node"));
  if (!node || *node < 0) return std::nullopt;
  return static_cast<std::uint32_t>(*node);
}

/// The bridges in front of a device, from the root complex on: "pci0000:15", "0000:15:01.0", and so
/// on. Empty for a device that is not on PCI.
std::vector<std::string> bridges_of(const fs::path& device) {
  std::error_code error;
  const fs::path real = fs::canonical(device, error);
  std::vector<std::string> names;
  if (error) return names;
  const auto is_root = [](const fs::path& part) { return part.string().starts_with("pci"); };
  for (auto part = std::find_if(real.begin(), real.end(), is_root); part != real.end(); ++part) {
    names.push_back(part->string());
  }
  if (!names.empty()) names.pop_back();  // The device itself.
  return names;
}

}  // namespace

std::optional<std::uint32_t> numa_node_of(std::string_view name, const fs::path& sysfs) {
  const std::string device(name.substr(0, name.find(':')));
  return node_in(sysfs / "class/infiniband" / device / "device");
}

std::vector<Nic> nearest_to(std::string_view pci_address, std::span<const Nic> nics,
                            const fs::path& sysfs) {
  const fs::path device = sysfs / "bus/pci/devices" / pci_address;
  const std::vector<std::string> path = bridges_of(device);
  const std::optional<std::uint32_t> node = node_in(device);
  // By the number of common bridges, and of those with the same by the NUMA node: all devices of a
  // virtual machine may be at one root.
  std::vector<std::size_t> ranks;
  for (const Nic& nic : nics) {
    const std::vector<std::string> other =
        bridges_of(sysfs / "class/infiniband" / nic.device / "device");
    const auto [differ, end] = std::ranges::mismatch(path, other);
    const auto common = static_cast<std::size_t>(differ - path.begin());
    ranks.push_back(2 * common + (node && node == nic.numa_node ? 1 : 0));
  }
  std::vector<Nic> nearest;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == std::ranges::max(ranks)) nearest.push_back(nics[i]);
  }
  return nearest;
}

std::vector<Nic> find_nics(const fs::path& sysfs) {
  std::vector<Nic> nics;
  const fs::path root = sysfs / "class/infiniband";
  for (const std::string& device : names_in(root)) {
    for (const std::string& port : names_in(root / device / "ports")) {
      const auto number = number_in<unsigned>(port);
      if (!number) continue;
      const fs::path folder = root / device / "ports" / port;
      nics.push_back(
          {.device = device,
           .port = *number,
           .is_active = line_of(folder / "state").ends_with("ACTIVE"),
           .link_layer = line_of(folder / "link_layer"),
           .gigabits_per_second = number_in<double>(line_of(folder / "rate")).value_or(0),
           .numa_node = numa_node_of(device, sysfs)});
    }
  }
  return nics;
}

NicChoice choose_nics(std::span<const Nic> nics, std::span<const std::string> allow,
                      std::span<const std::string> deny) {
  NicChoice choice;
  for (const Nic& nic : nics) {
    if (!allow.empty() && !any_matches(nic, allow)) {
      choice.refused.push_back(nic.name() + ": it is not among the allowed ones");
    } else if (any_matches(nic, deny)) {
      choice.refused.push_back(nic.name() + ": it is denied");
    } else if (!nic.is_active) {
      choice.refused.push_back(nic.name() + ": its link is down");
    } else {
      choice.rails.push_back(nic);
    }
  }
  for (const std::string& word : allow) {
    const bool known = std::any_of(nics.begin(), nics.end(),
                                   [&word](const Nic& nic) { return matches(nic, word); });
    if (!known) choice.refused.push_back(word + ": there is no such card");
  }
  return choice;
}

}  // namespace pegaflow::ucx
