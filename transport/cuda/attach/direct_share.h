#pragma once
/// \file
/// Measures this machine's copy engine with segments of some size.

#include <cstdint>
#include <optional>
#include <span>

#include "base/error.h"
#include "transport/cuda/driver.h"

namespace pegaflow::cuda {

/// Returns the speed of a batch of copies of `segment_bytes` from places all over the pool, as a
/// share of that of one contiguous copy; best of a few rounds of some milliseconds. Only reads the
/// pool, and writes to `staging`. No value: the pool or the staging is too small to measure.
///
/// With the context current, and nothing else on `stream`. Errors: CUDA's.
Result<std::optional<double>> measure_direct_share(
    Driver& driver, Stream stream, std::span<std::byte> pool, std::uint64_t register_bytes,
    DeviceAddress staging, std::uint64_t staging_bytes, std::uint64_t segment_bytes);

}  // namespace pegaflow::cuda
