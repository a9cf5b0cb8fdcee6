#pragma once
/// \file
/// RDMA cards of other machines, as files like those under /sys.

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <stdlib.h>

namespace pegaflow::testing {

/// Files about cards as in /sys, in a folder that the destructor removes.
class Sysfs {
 public:
  Sysfs() {
    std::string name = (std::filesystem::temp_directory_path() / "pega-sysfs-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp: " + name);
    root_ = name;
  }
  ~Sysfs() { std::filesystem::remove_all(root_); }
  Sysfs(const Sysfs&) = delete;
  Sysfs& operator=(const Sysfs&) = delete;

  void port(const std::string& device, const std::string& number, const std::string& state,
            const std::string& rate, const std::string& link_layer) {
    const std::filesystem::path folder = root_ / "class/infiniband" / device / "ports" / number;
    write(folder / "state", state);
    write(folder / "rate", rate);
    write(folder / "link_layer", link_layer);
  }
  void node(const std::string& device, const std::string& node) {
    write(root_ / "class/infiniband" / device / "device/numa_node", node);
  }
  /// A device on PCI, behind the named bridges: "pci0000:15/0000:15:01.0/0000:16:00.0". Its NUMA
  /// node is written to `node`.
  void pci(const std::string& path, const std::string& node = "-1") {
    const std::filesystem::path device = root_ / "devices" / path;
    write(device / "numa_node", node);
    link(root_ / "bus/pci/devices" / device.filename(), device);
  }
  /// A card at such a place.
  void card_at(const std::string& device, const std::string& path, const std::string& node = "-1") {
    pci(path, node);
    link(root_ / "class/infiniband" / device / "device", root_ / "devices" / path);
  }
  [[nodiscard]] const std::filesystem::path& root() const { return root_; }

 private:
  static void link(const std::filesystem::path& from, const std::filesystem::path& to) {
    std::filesystem::create_directories(from.parent_path());
    std::filesystem::create_directory_symlink(to, from);
  }
  static void write(const std::filesystem::path& file, const std::string& line) {
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << line << '\n';
  }
  std::filesystem::path root_;
};

}  // namespace pegaflow::testing
