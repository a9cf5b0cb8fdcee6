#pragma once
/// \file
/// Latency of one page: by the device alone, and with the calls to a server.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "perf/lib/command.h"
#include "transport/cuda/driver.h"

namespace pegaflow::perf {

struct SinglePages {
  CommonOptions common;
  int device = 0;
  std::uint64_t page_bytes = 0;
  std::size_t count = 0;
};

/// Adds a figure for a load and a save of one page by the device, and for a load through the client
/// library. Errors: those of the device or the server.
Result<void> measure_single_pages(const SinglePages& options,
                                  const std::shared_ptr<cuda::Driver>& driver,
                                  std::vector<Figure>& figures);

}  // namespace pegaflow::perf
