#include "perf/net/net_lane.h"

#include <chrono>
#include <utility>

#include "transport/tcp/tcp_fabric.h"
#include "transport/ucx/nic.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::perf {

namespace {

constexpr std::chrono::seconds kPatience{20};

}  // namespace

Result<NetLane> with_rails(NetLane lane) {
  PEGA_TRY_LET(const std::optional<int> gpu, parse_memory(lane.memory));
  if (lane.backend == "tcp") {
    if (gpu) {
      return fail(Errc::kInvalidArgument,
                  "--memory {} needs --backend ucx: the socket lane is for host memory",
                  lane.memory);
    }
    if (lane.rails.empty() && !lane.ucx_over_tcp) return lane;
    return fail(Errc::kInvalidArgument, "--rails needs --backend ucx");
  }
  if (lane.backend != "ucx") {
    return fail(Errc::kInvalidArgument, "--backend: '{}' is not tcp or ucx", lane.backend);
  }
  if (!lane.rails.empty()) return lane;
  if (lane.ucx_over_tcp) {
    return fail(Errc::kInvalidArgument,
                "--ucx-over-tcp needs --rails with network interfaces, such as lo");
  }
  const ucx::NicChoice choice = ucx::choose_nics(ucx::find_nics(), {}, {});
  if (choice.rails.empty()) {
    return fail(Errc::kRefused, "no RDMA NIC of this machine has a link");
  }
  for (const ucx::Nic& nic : choice.rails) lane.rails.push_back(nic.name());
  return lane;
}

Result<std::shared_ptr<cuda::Gpu>> gpu_of(const NetLane& lane) {
  PEGA_TRY_LET(const std::optional<int> ordinal, parse_memory(lane.memory));
  if (!ordinal) return std::shared_ptr<cuda::Gpu>();
  return open_gpu(*ordinal);
}

Result<std::unique_ptr<Fabric>> make_lane(const NetLane& lane, const std::string& listen,
                                          const Clock& clock, Fabric::CompletionSink sink,
                                          const std::shared_ptr<cuda::Gpu>& gpu) {
  if (lane.backend == "ucx") {
    UcxFabric::Options options{
        .rails = lane.rails, .library = lane.ucx_library, .sockets = lane.ucx_over_tcp};
    if (gpu) options.gpu = cuda::Gpu::context_of(gpu);
    // The greeting is not measured, and it is slow on a software NIC.
    options.connect_timeout = options.stall_timeout = kPatience;
    if (lane.piece_bytes != 0) options.piece_bytes = lane.piece_bytes;
    if (lane.window_bytes != 0) options.window_bytes = lane.window_bytes;
    return UcxFabric::create(options, clock, std::move(sink));
  }
  TcpFabric::Options options{.listen = listen};
  if (lane.connections != 0) options.connections = lane.connections;
  if (lane.piece_bytes != 0) options.piece_bytes = lane.piece_bytes;
  if (lane.window_bytes != 0) options.window_bytes = lane.window_bytes;
  return TcpFabric::create(options, clock, std::move(sink));
}

}  // namespace pegaflow::perf
