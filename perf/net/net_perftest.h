#pragma once
/// \file
/// The bound of `pegaflow-perf net --backend ucx`: UCX's own benchmark over the same NICs.

#include <cstdint>
#include <string>

#include "base/error.h"
#include "harness/child.h"
#include "perf/net/net_lane.h"

namespace pegaflow::perf {

/// `ucx_perftest` (package ucx-utils) that waits for one client. It inherits the environment's
/// UCX_* variables.
class PerftestServer {
 public:
  /// Returns once it listens, on all addresses. Errors: kRefused when the program is missing or
  /// ends; kTimeout when it does not listen; the kernel's.
  static Result<PerftestServer> start(const NetLane& lane);
  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

 private:
  PerftestServer(harness::TemporaryDirectory directory, harness::Child child, std::uint16_t port)
      : directory_(std::move(directory)), child_(std::move(child)), port_(port) {}
  harness::TemporaryDirectory directory_;  // Outlives the child, which writes into it.
  harness::Child child_;
  std::uint16_t port_;
};

struct Perftest {
  double p50_us = 0;
  double gigabytes_per_second = 0;  ///< Rate of all measured operations.
};

/// Runs `count` GETs of `size_bytes` from the server at `host`, `outstanding` of them in flight.
/// Errors: kRefused with the program's text when it is missing or fails; kTimeout after two
/// minutes; kCorrupt when its output has another form.
Result<Perftest> run_perftest(const NetLane& lane, const std::string& host, std::uint16_t port,
                              std::uint64_t size_bytes, std::uint64_t count, unsigned outstanding);

/// Parses the last line of the output with `-f -v`.
/// Errors: kCorrupt when that line has not eight numbers.
Result<Perftest> parse_perftest(const std::string& output);

}  // namespace pegaflow::perf
