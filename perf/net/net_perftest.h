#pragma once
/// \file
/// The bound of `pegaflow-perf net --backend ucx`: UCX's own measurement, over the same cards.

#include <cstdint>
#include <string>

#include "base/error.h"
#include "harness/child.h"
#include "perf/net/net_lane.h"

namespace pegaflow::perf {

/// `ucx_perftest` (package ucx-utils) that waits for one other. Variables UCX_* of our environment
/// are its own, too.
class PerftestServer {
 public:
  /// Returns once it listens, at all addresses. Errors: kRefused when the program is not there or
  /// ends; kTimeout when it does not listen; the kernel's.
  static Result<PerftestServer> start(const NetLane& lane);
  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

 private:
  PerftestServer(harness::TemporaryDirectory directory, harness::Child child, std::uint16_t port)
      : directory_(std::move(directory)), child_(std::move(child)), port_(port) {}
  harness::TemporaryDirectory directory_;  // Goes after the child, which writes into it.
  harness::Child child_;
  std::uint16_t port_;
};

struct Perftest {
  double p50_us = 0;
  double gigabytes_per_second = 0;  ///< Of all operations that count.
};

/// `count` GETs of `size_bytes` from the server at `host`, `outstanding` of them under way.
/// Errors: kRefused when the program is not there or fails, in its words; kTimeout after two
/// minutes; kCorrupt when it prints something else.
Result<Perftest> run_perftest(const NetLane& lane, const std::string& host, std::uint16_t port,
                              std::uint64_t size_bytes, std::uint64_t count, unsigned outstanding);

/// The last line of its output with `-f -v`.
/// Errors: kCorrupt when it is no line of eight numbers.
Result<Perftest> parse_perftest(const std::string& output);

}  // namespace pegaflow::perf
