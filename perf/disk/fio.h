#pragma once
/// \file
/// fio, the reference for a disk's bandwidth.

#include <cstdint>
#include <string>

#include "base/error.h"

namespace pegaflow::perf {

/// A rate, and what it cost.
struct DiskRate {
  double gigabytes_per_second = 0;
  double cpu_ms_per_gib = 0;  ///< User and system time of the process, in ms for each GiB.
};

struct FioLoad {
  std::string path;  ///< A file that exists; it is neither created nor cut.
  std::string rw;    ///< "randread", "write" or "randwrite".
  std::uint64_t file_bytes = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t bytes_in_flight = 0;
  std::uint64_t total_bytes = 0;
  std::int64_t seed = 1;
  std::uint64_t begin = 0;         ///< The offset of the first byte.
  std::uint64_t stride_bytes = 0;  ///< With "read": one block at the begin of each stride.
};

/// Runs fio with io_uring and O_DIRECT, its memory on huge pages as a pool is: a disk is slower
/// with scattered small ones. Blocks until it has ended. Errors: kRefused when fio is missing or
/// failed, with its words; kTimeout; kCorrupt when its output cannot be read.
Result<DiskRate> run_fio(const FioLoad& load);

/// The rate in fio's JSON. Errors: kCorrupt.
Result<DiskRate> parse_fio(const std::string& output);

}  // namespace pegaflow::perf
