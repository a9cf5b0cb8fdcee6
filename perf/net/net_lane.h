#pragma once
/// \file
/// The lane that `pegaflow-perf net` measures.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "perf/net/net_memory.h"
#include "transport/fabric.h"

namespace pegaflow::perf {

/// The options of one end of a lane; the other end has its own NICs.
struct NetLane {
  std::string backend = "tcp";       ///< "tcp" or "ucx".
  std::vector<std::string> rails{};  ///< For "ucx": NICs and ports; empty: all with a link.
  std::string ucx_library{};         ///< For "ucx": the file of libucp; empty: the installed one.
  bool ucx_over_tcp = false;         ///< Rails are network interfaces. For tests: see UcxFabric.
  unsigned connections = 0;          ///< For "tcp". 0 here and below: the lane's default.
  std::uint64_t piece_bytes = 0;
  std::uint64_t window_bytes = 0;
  std::string memory = "host";  ///< "host", or with "ucx" "cuda" or "cuda:1": see parse_memory().
};

/// Fills in the rails: the given ones, or all NICs with a link.
/// Errors: kInvalidArgument for an unknown backend or memory, or options that do not fit the
/// backend; kRefused when no NIC has a link.
Result<NetLane> with_rails(NetLane lane);

/// Opens the GPU of the lane's memory; null for memory of the host. Errors: those of
/// parse_memory() and open_gpu().
Result<std::shared_ptr<cuda::Gpu>> gpu_of(const NetLane& lane);

/// Creates the lane with `sink` for its batches, for memory of the host and of `gpu` unless that is
/// null. `listen` is for "tcp". Errors: the lane's.
Result<std::unique_ptr<Fabric>> make_lane(const NetLane& lane, const std::string& listen,
                                          const Clock& clock, Fabric::CompletionSink sink,
                                          const std::shared_ptr<cuda::Gpu>& gpu);

}  // namespace pegaflow::perf
