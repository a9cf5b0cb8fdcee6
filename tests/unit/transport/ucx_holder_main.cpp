// A holder in a process of its own, for tests that kill it. Prints its description, lends 4 MiB of
// pattern number 1, without an end or for the given number of seconds, and ends with its standard
// input. For each byte of input it renews the lease and prints a line.
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include <fmt/format.h>

#include "base/hex.h"
#include "tests/support/fabric_node.h"
#include "tests/unit/transport/ucx_rails.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::testing {
namespace {

int hold(int seconds) {
  const SteadyClock clock;
  const auto end = [&] {
    return seconds == 0 ? TimePoint::max() : clock.now() + std::chrono::seconds(seconds);
  };
  auto fabric = UcxFabric::create(ucx_options(), clock, [](auto&&) {});
  if (!fabric) return 1;
  std::vector<std::byte> memory(4 << 20);
  fill_pattern(memory, 1);
  const RegionId region = (*fabric)->register_region(memory).value();
  if (!(*fabric)->lend(region, end())) return 1;
  const FabricDescriptor descriptor = (*fabric)->describe();
  std::printf("%s\n",
              fmt::format("{} {} {} {}", descriptor.incarnation.high, descriptor.incarnation.low,
                          to_hex(descriptor.address), to_hex(descriptor.regions.at(0).key))
                  .c_str());
  std::fflush(stdout);
  char byte = 0;
  while (::read(STDIN_FILENO, &byte, 1) > 0) {
    if (!(*fabric)->lend(region, end())) return 1;
    std::printf("lent\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace pegaflow::testing

int main(int argc, char** argv) {
  return pegaflow::testing::hold(argc > 1 ? std::atoi(argv[1]) : 0);
}
