// Which lanes a node has between it and others, from its options and its cards.
#include "cluster/lanes.h"

#include <doctest/doctest.h>

#include "tests/support/skip.h"
#include "tests/support/sysfs_cards.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::testing {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Two ports that work and one that does not.
struct Machine {
  Machine() {
    sysfs.port("mlx5_0", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
    sysfs.port("mlx5_1", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
    sysfs.port("mlx5_2", "1", "1: DOWN", "400 Gb/sec (4X NDR)", "InfiniBand");
  }
  [[nodiscard]] Result<cluster::Lanes::Plan> plan(const cluster::Lanes::Cards& options) const {
    return cluster::Lanes::plan(options, "127.0.0.1:0", sysfs.root());
  }
  Sysfs sysfs;
};

using Words = std::vector<std::string>;

TEST_SUITE("Lanes") {
  TEST_CASE("every card whose link is up is used, and the others are reported with the reason") {
    if (!UcxFabric::load_library("")) PEGA_SKIP("built without UCX, or its library is missing");
    const Machine machine;
    const auto plan = machine.plan({}).value();

    CHECK(plan.cards == Words{"mlx5_0:1", "mlx5_1:1"});
    CHECK(plan.refused == Words{"mlx5_2:1: its link is down"});
    CHECK(plan.why_not.empty());
    CHECK(plan.listen == "127.0.0.1:0");
  }

  TEST_CASE("--nics selects cards, and --deny-nics excludes them") {
    if (!UcxFabric::load_library("")) PEGA_SKIP("built without UCX, or its library is missing");
    const Machine machine;
    cluster::Lanes::Cards named;
    named.nics = {"mlx5_1"};
    CHECK(machine.plan(named).value().cards == Words{"mlx5_1:1"});
    cluster::Lanes::Cards denied;
    denied.deny_nics = {"mlx5_1*"};
    CHECK(machine.plan(denied).value().cards == Words{"mlx5_0:1"});
  }

  TEST_CASE("without a usable card there are sockets, and the reason is reported") {
    const Sysfs bare;
    CHECK(has(cluster::Lanes::plan({}, "127.0.0.1:0", bare.root()).value().why_not,
              "has no RDMA card"));
    const Machine machine;
    cluster::Lanes::Cards off;
    off.nics = {"none"};
    CHECK(machine.plan(off).value().why_not == "--nics none");
    CHECK(machine.plan(off).value().cards.empty());
    cluster::Lanes::Cards down;
    down.nics = {"mlx5_2", "mlx5_9"};
    const auto plan = machine.plan(down).value();
    CHECK(plan.cards.empty());
    CHECK(has(plan.why_not, "mlx5_2:1: its link is down"));
    CHECK(has(plan.why_not, "mlx5_9: there is no such card"));
  }

  TEST_CASE("a UCX library that cannot be used leaves sockets, unless RDMA is required") {
    if (!UcxFabric::load_library("")) PEGA_SKIP("built without UCX, or its library is missing");
    const Machine machine;
    cluster::Lanes::Cards options;
    options.ucx_library = "/nonexistent/libucp.so.0";
    const auto plan = machine.plan(options).value();
    CHECK(plan.cards.empty());
    CHECK(plan.ucx_library.empty());
    CHECK(has(plan.why_not, "/nonexistent/libucp.so.0"));
    CHECK(machine.plan({}).value().why_not.empty());
    CHECK(has(machine.plan({}).value().ucx_library, "libucp.so"));

    options.require_rdma = true;
    const auto required = machine.plan(options);
    REQUIRE_FALSE(required);
    CHECK(required.error().code == Errc::kRefused);
    CHECK(has(required.error().detail, "--require-rdma: UCX: "));
    CHECK(has(required.error().detail, "/nonexistent/libucp.so.0"));
  }

  TEST_CASE("--require-rdma is an error on a machine without RDMA") {
    const Sysfs bare;
    cluster::Lanes::Cards options;
    options.require_rdma = true;
    const auto none = cluster::Lanes::plan(options, "127.0.0.1:0", bare.root());
    REQUIRE_FALSE(none);
    CHECK(none.error().code == Errc::kRefused);
    CHECK(has(none.error().detail, "--require-rdma: this machine has no RDMA card"));

    const Machine machine;
    options.nics = {"mlx5_2"};
    CHECK(has(machine.plan(options).error().detail, "its link is down"));
    options.nics = {"none"};
    CHECK(machine.plan(options).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a card that UCX does not know leaves sockets, unless RDMA is required") {
    if (!UcxFabric::load_library("")) PEGA_SKIP("built without UCX, or its library is missing");
    const Machine machine;
    const SteadyClock clock;
    std::vector<std::byte> pool(1 << 20);
    cluster::Lanes::Cards options;
    options.nics = {"mlx5_0"};
    const auto lanes = cluster::Lanes::open(machine.plan(options).value(), pool, clock, 4).value();

    REQUIRE(lanes->count() == 1);
    CHECK(lanes->name(0) == "tcp");
    CHECK(lanes->plan().cards.empty());
    CHECK(has(lanes->plan().why_not, "mlx5_0:1"));
    options.require_rdma = true;
    const auto required = cluster::Lanes::open(machine.plan(options).value(), pool, clock, 4);
    REQUIRE_FALSE(required);
    CHECK(has(required.error().detail, "mlx5_0:1"));
  }
}

}  // namespace
}  // namespace pegaflow::testing
