#include "pyclient/network.h"

#include <cstdlib>
#include <utility>

#include <fmt/ranges.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "transport/host/host_device.h"
#include "transport/network_device.h"
#include "transport/ucx/nic.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"network"};

/// The name for all cards whose link is up.
constexpr const char* kAllCards = "auto";
/// For tests, as the server has it: network interfaces over which UCX runs on TCP.
constexpr const char* kTestVariable = "PEGAFLOW_TEST_UCX_OVER_TCP";

/// The rails, for UCX on cards or on the interfaces of a test.
Result<UcxFabric::Options> rails_of(const NetworkChoice& choice) {
  UcxFabric::Options options{.rails = {}, .library = choice.ucx_library};
  if (const char* const interfaces = std::getenv(kTestVariable)) {
    options.rails = {interfaces};
    options.sockets = true;
    kLog.warn(
        "UCX over TCP is for tests: any host that reaches interface={} may read all memory of this "
        "process",
        interfaces);
    return options;
  }
  const bool is_any = choice.nics == std::vector<std::string>{kAllCards};
  const ucx::NicChoice found =
      ucx::choose_nics(ucx::find_nics(), is_any ? std::vector<std::string>() : choice.nics, {});
  for (const ucx::Nic& nic : found.rails) options.rails.push_back(nic.name());
  if (!options.rails.empty()) return options;
  return fail(
      Errc::kRefused, "no RDMA card of this machine fits pegaflow.direct_nics {}{}",
      fmt::join(choice.nics, ","),
      found.refused.empty() ? std::string() : fmt::format(" ({})", fmt::join(found.refused, "; ")));
}

}  // namespace

Result<std::shared_ptr<Device>> with_network(std::shared_ptr<Device> device,
                                             const PageLayout& layout,
                                             const NetworkChoice& choice) {
  if (std::dynamic_pointer_cast<HostDevice>(device) == nullptr) {
    return fail(Errc::kRefused, "engines of other hosts read ordinary memory only, not a GPU's");
  }
  static const SteadyClock clock;
  PEGA_TRY_LET(const UcxFabric::Options options, rails_of(choice));
  const TimePoint begin = clock.now();
  PEGA_TRY_LET(
      auto network,
      NetworkDevice::create(std::move(device), layout,
                            [&](Fabric::CompletionSink sink) -> Result<std::unique_ptr<Fabric>> {
                              return UcxFabric::create(options, clock, std::move(sink));
                            },
                            clock, {}));
  kLog.info("engines of other hosts may read this one's blocks cards={} took={}",
            fmt::join(options.rails, ","), format_duration(clock.now() - begin));
  return std::shared_ptr<Device>(std::move(network));
}

}  // namespace pegaflow
