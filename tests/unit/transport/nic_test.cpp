// The cards of a machine, read from recorded trees of sysfs.
#include "transport/ucx/nic.h"

#include <string>

#include <doctest/doctest.h>

#include "tests/support/sysfs_cards.h"

namespace pegaflow::ucx {
namespace {

using testing::Sysfs;

/// Two cards of a server with two sockets, as mlx5_core shows them, one of them with its second
/// port unplugged, and a card in software, which has no NUMA node.
void fill_with_server(Sysfs& sysfs) {
  sysfs.port("mlx5_0", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
  sysfs.node("mlx5_0", "0");
  sysfs.port("mlx5_1", "1", "4: ACTIVE", "100 Gb/sec (2X HDR)", "Ethernet");
  sysfs.port("mlx5_1", "2", "1: DOWN", "2.5 Gb/sec (1X SDR)", "Ethernet");
  sysfs.node("mlx5_1", "1");
  sysfs.port("rxe0", "1", "4: ACTIVE", "2.5 Gb/sec (1X SDR)", "Ethernet");
  sysfs.node("rxe0", "-1");
}

std::vector<std::string> names(const std::vector<Nic>& nics) {
  std::vector<std::string> all;
  for (const Nic& nic : nics) all.push_back(nic.name());
  return all;
}

using Words = std::vector<std::string>;

TEST_SUITE("Nic") {
  TEST_CASE("every port is found, with its link and its NUMA node") {
    Sysfs sysfs;
    fill_with_server(sysfs);

    const std::vector<Nic> nics = find_nics(sysfs.root());

    REQUIRE(names(nics) == Words{"mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "rxe0:1"});
    CHECK(nics[0] == Nic{.device = "mlx5_0",
                         .port = 1,
                         .is_active = true,
                         .link_layer = "InfiniBand",
                         .gigabits_per_second = 400,
                         .numa_node = 0});
    CHECK(nics[1].numa_node == 1);
    CHECK_FALSE(nics[2].is_active);
    CHECK(nics[2].gigabits_per_second == 2.5);
    CHECK_FALSE(nics[3].numa_node);
    CHECK(numa_node_of("mlx5_1:1", sysfs.root()) == 1);
    CHECK_FALSE(numa_node_of("mlx5_9:1", sysfs.root()));
  }

  TEST_CASE("a machine without cards has none, and invalid files are ignored") {
    Sysfs sysfs;
    CHECK(find_nics(sysfs.root()).empty());
    sysfs.port("mlx5_0", "1", "", "", "");
    sysfs.port("mlx5_0", "zero", "4: ACTIVE", "400 Gb/sec", "InfiniBand");
    sysfs.node("mlx5_0", "none");

    const std::vector<Nic> nics = find_nics(sysfs.root());

    REQUIRE(names(nics) == Words{"mlx5_0:1"});
    CHECK_FALSE(nics[0].is_active);
    CHECK(nics[0].gigabits_per_second == 0);
    CHECK_FALSE(nics[0].numa_node);
  }

  TEST_CASE("ports are used whose link is up, as far as the lists allow them") {
    Sysfs sysfs;
    fill_with_server(sysfs);
    const std::vector<Nic> nics = find_nics(sysfs.root());

    const NicChoice all = choose_nics(nics, {}, {});
    CHECK(names(all.rails) == Words{"mlx5_0:1", "mlx5_1:1", "rxe0:1"});
    CHECK(all.refused == Words{"mlx5_1:2: its link is down"});
    CHECK(names(choose_nics(nics, Words{"mlx5_*"}, {}).rails) == Words{"mlx5_0:1", "mlx5_1:1"});
    CHECK(names(choose_nics(nics, Words{"mlx5_*"}, Words{"mlx5_1"}).rails) == Words{"mlx5_0:1"});
    CHECK(names(choose_nics(nics, Words{"mlx5_1:1"}, {}).rails) == Words{"mlx5_1:1"});
    const NicChoice none = choose_nics(nics, Words{"mlx5_7"}, {});
    CHECK(none.rails.empty());
    CHECK(none.refused.back() == "mlx5_7: there is no such card");
  }

  TEST_CASE("the cards nearest to a GPU share its bridges, else its NUMA node") {
    Sysfs sysfs;
    const auto card = [&](const std::string& device, const std::string& path,
                          const std::string& node) {
      sysfs.port(device, "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
      sysfs.card_at(device, path, node);
    };
    card("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", "0");
    card("mlx5_1", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0", "0");
    card("mlx5_2", "pci0000:15/0000:15:02.0/0000:1a:00.0", "0");
    card("mlx5_3", "pci0000:80/0000:80:01.0/0000:81:00.0", "1");
    sysfs.port("rxe0", "1", "4: ACTIVE", "2.5 Gb/sec (1X SDR)", "Ethernet");
    const std::vector<Nic> nics = find_nics(sysfs.root());
    REQUIRE(nics.size() == 5);
    const auto nearest = [&](const std::string& address) {
      return names(nearest_to(address, nics, sysfs.root()));
    };

    // Behind the switch of two cards, behind a port of its own beside one, in another socket.
    sysfs.pci("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0", "0");
    CHECK(nearest("0000:1b:00.0") == Words{"mlx5_0:1", "mlx5_1:1"});
    sysfs.pci("pci0000:15/0000:15:02.0/0000:1c:00.0", "0");
    CHECK(nearest("0000:1c:00.0") == Words{"mlx5_2:1"});
    sysfs.pci("pci0000:90/0000:90:01.0/0000:91:00.0", "1");
    CHECK(nearest("0000:91:00.0") == Words{"mlx5_3:1"});
    // At one root, as in a virtual machine, the NUMA node decides.
    Sysfs machine;
    machine.port("mlx5_0", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
    machine.card_at("mlx5_0", "pci0000:00/0000:00:05.0", "0");
    machine.port("mlx5_1", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
    machine.card_at("mlx5_1", "pci0000:00/0000:00:06.0", "1");
    machine.pci("pci0000:00/0000:00:07.0", "1");
    CHECK(names(nearest_to("0000:00:07.0", find_nics(machine.root()), machine.root())) ==
          Words{"mlx5_1:1"});
    // Where nothing is known, all are as near.
    sysfs.pci("pci0000:a0/0000:a0:01.0/0000:a1:00.0");
    CHECK(nearest("0000:a1:00.0").size() == 5);
    CHECK(nearest("0000:ff:00.0").size() == 5);
    CHECK(nearest_to("0000:1b:00.0", {}, sysfs.root()).empty());
  }
}

}  // namespace
}  // namespace pegaflow::ucx
