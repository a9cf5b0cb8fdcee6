#pragma once
/// \file
/// Which lane `pegaflow-perf net` measures, and how it is made at either end.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/fabric.h"

namespace pegaflow::perf {

/// One end's side of it: the other end has cards of its own.
struct NetLane {
  std::string backend = "tcp";       ///< "tcp" or "ucx".
  std::vector<std::string> rails{};  ///< Of "ucx": cards and ports; empty: all whose link is up.
  bool ucx_over_tcp = false;         ///< Rails are network interfaces. A test: see UcxFabric.
  unsigned connections = 0;          ///< Of "tcp"; 0, as in the next two: the lane's own.
  std::uint64_t piece_bytes = 0;
  std::uint64_t window_bytes = 0;
};

/// With the rails that are used: those named, or all cards whose link is up.
/// Errors: kInvalidArgument for another backend, or words that the backend has no use for; kRefused
/// when there is no such card.
Result<NetLane> with_rails(NetLane lane);

/// The lane, with `sink` for its batches. `listen` is of "tcp". Errors: the lane's.
Result<std::unique_ptr<Fabric>> make_lane(const NetLane& lane, const std::string& listen,
                                          const Clock& clock, Fabric::CompletionSink sink);

}  // namespace pegaflow::perf
