#include "pyclient/network.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <fmt/ranges.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "transport/cuda/cuda_device.h"
#include "transport/cuda/gpu.h"
#include "transport/host/host_device.h"
#include "transport/network_check.h"
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

/// Far more than a card needs for a test read, of which most is the greeting.
constexpr Duration kCheckPatience = std::chrono::seconds(5);

/// The least rate of reads into a GPU, as a share of that into ordinary memory, at which blocks are
/// worth reading past the pool.
constexpr double kLeastShare = 0.8;

/// The rails, for UCX on cards or on the interfaces of a test. `gpu` is null for ordinary memory.
Result<UcxFabric::Options> rails_of(const NetworkChoice& choice,
                                    const std::shared_ptr<cuda::Gpu>& gpu) {
  UcxFabric::Options options{.rails = {}, .library = choice.ucx_library};
  if (gpu) options.gpu = cuda::Gpu::context_of(gpu);
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
  std::vector<ucx::Nic> nics = found.rails;
  if (gpu && is_any && !nics.empty()) {
    PEGA_TRY_LET(const std::string address, gpu->pci_address());
    nics = ucx::nearest_to(address, nics);
  }
  for (const ucx::Nic& nic : nics) options.rails.push_back(nic.name());
  if (!options.rails.empty()) return options;
  return fail(
      Errc::kRefused, "no RDMA card of this machine fits pegaflow.direct_nics {}{}",
      fmt::join(choice.nics, ","),
      found.refused.empty() ? std::string() : fmt::format(" ({})", fmt::join(found.refused, "; ")));
}

using MakeFabric = NetworkDevice::MakeFabric;

MakeFabric make_ucx(const UcxFabric::Options& options, const Clock& clock) {
  return [&options, &clock](Fabric::CompletionSink sink) -> Result<std::unique_ptr<Fabric>> {
    return UcxFabric::create(options, clock, std::move(sink));
  };
}

Result<void> check_gpu(const MakeFabric& make, const std::shared_ptr<cuda::Gpu>& gpu,
                       const Clock& clock) {
  PEGA_TRY_LET(const auto source, cuda::GpuMemory::create(gpu, network::kTestBytes));
  PEGA_TRY_LET(const auto target, cuda::GpuMemory::create(gpu, network::kTestBytes));
  const auto test_memory = [](cuda::GpuMemory& memory) {
    return network::TestMemory{
        .memory = memory.memory(),
        .write = [&memory](std::span<const std::byte> bytes) { return memory.write(bytes, 0); },
        .read = [&memory](std::span<std::byte> bytes) { return memory.read(bytes, 0); }};
  };
  return network::check_reads(make, test_memory(*source), test_memory(*target), clock,
                              kCheckPatience);
}

Result<void> check_host(const MakeFabric& make, const Clock& clock) {
  std::vector<std::byte> source(network::kTestBytes);
  std::vector<std::byte> target(network::kTestBytes);
  const auto test_memory = [](std::span<std::byte> memory) {
    return network::TestMemory{.memory = memory,
                               .write =
                                   [memory](std::span<const std::byte> bytes) {
                                     std::ranges::copy(bytes, memory.begin());
                                     return Result<void>();
                                   },
                               .read =
                                   [memory](std::span<std::byte> bytes) {
                                     std::ranges::copy(memory, bytes.begin());
                                     return Result<void>();
                                   }};
  };
  return network::check_reads(make, test_memory(source), test_memory(target), clock,
                              kCheckPatience);
}

/// Removes the rails that do not read this engine's kind of memory. Errors: kRefused when none
/// does, with the reasons.
Result<void> check_rails(UcxFabric::Options& options, const std::shared_ptr<cuda::Gpu>& gpu,
                         const Clock& clock) {
  std::vector<std::string> good;
  std::vector<std::string> reasons;
  for (const std::string& rail : options.rails) {
    UcxFabric::Options alone = options;
    alone.rails = {rail};
    const MakeFabric make = make_ucx(alone, clock);
    const Result<void> checked = gpu ? check_gpu(make, gpu, clock) : check_host(make, clock);
    if (checked) {
      good.push_back(rail);
    } else {
      reasons.push_back(fmt::format("{}: {}", rail, to_string(checked.error())));
    }
  }
  if (good.empty()) {
    return fail(Errc::kRefused, "no card reads the memory of {}: {}",
                gpu ? fmt::format("GPU {}", gpu->ordinal()) : "this process",
                fmt::join(reasons, "; "));
  }
  for (const std::string& reason : reasons) kLog.warn("a card is not used reason=\"{}\"", reason);
  options.rails = std::move(good);
  return {};
}

/// Whether the cards read ordinary memory of other nodes, as pools are, into the GPU at kLeastShare
/// of the rate of reads into ordinary memory, or more.
bool writes_fast(const UcxFabric::Options& options, const std::shared_ptr<cuda::Gpu>& gpu,
                 const Clock& clock) {
  const MakeFabric make = make_ucx(options, clock);
  std::vector<std::byte> source(network::kRateBytes);
  std::vector<std::byte> target(network::kRateBytes);
  const auto on_gpu = cuda::GpuMemory::create(gpu, network::kRateBytes);
  const auto to_gpu = on_gpu ? network::read_rate(make, std::span(source), (*on_gpu)->memory(),
                                                  clock, kCheckPatience)
                             : Result<double>(tl::unexpected<Error>(on_gpu.error()));
  const auto to_host =
      network::read_rate(make, std::span(source), std::span(target), clock, kCheckPatience);
  const auto text = [](const Result<double>& rate) {
    return rate ? format_bytes(static_cast<std::uint64_t>(*rate)) + "/s" : to_string(rate.error());
  };
  const bool is_fast = to_gpu && to_host && *to_gpu >= kLeastShare * *to_host;
  kLog.info("reads of other nodes' memory cards={} gpu=\"{}\" host=\"{}\"{}",
            fmt::join(options.rails, ","), text(to_gpu), text(to_host),
            is_fast ? "" : ": blocks in pools of other nodes come through this node's");
  return is_fast;
}

}  // namespace

Result<NetworkOfWorker> with_network(std::shared_ptr<Device> device, const PageLayout& layout,
                                     const NetworkChoice& choice) {
  static const SteadyClock clock;
  const TimePoint begin = clock.now();
  std::shared_ptr<cuda::Gpu> gpu;
  NetworkDevice::Options with;
  if (const auto on_gpu = std::dynamic_pointer_cast<CudaDevice>(device)) {
    // CUDA shares no memory of expandable segments and of vLLM's sleep mode. After a sleep there
    // are other pages at its addresses, and a card would go on reading and writing the old ones.
    const Result<PeerMemory> plain = device->share(layout, {});
    if (!plain) return tl::unexpected<Error>(plain.error());
    gpu = on_gpu->gpu();
    with.kind = MemoryKind::kCuda;
    with.gpu = gpu->ordinal();
    PEGA_TRY_LET(const bool needs_flush, gpu->needs_flush());
    if (needs_flush) with.show_bytes = [gpu] { return gpu->show_network_writes(); };
  } else if (std::dynamic_pointer_cast<HostDevice>(device) == nullptr) {
    return fail(Errc::kRefused, "engines of other hosts cannot read this device's memory");
  }
  PEGA_TRY_LET(UcxFabric::Options options, rails_of(choice, gpu));
  PEGA_TRY(check_rails(options, gpu, clock));
  const bool is_fast = !gpu || writes_fast(options, gpu, clock);
  PEGA_TRY_LET(auto network, NetworkDevice::create(std::move(device), layout,
                                                   make_ucx(options, clock), clock, with));
  kLog.info("engines of other hosts may read this one's blocks cards={} took={}",
            fmt::join(options.rails, ","), format_duration(clock.now() - begin));
  return NetworkOfWorker{.device = std::move(network), .is_fast = is_fast};
}

}  // namespace pegaflow
