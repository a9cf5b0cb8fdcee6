#pragma once
/// \file
/// The state of the SSD tier, for /health and metrics: plain values without KJ.

#include <cstdint>
#include <string>
#include <vector>

#include "server/fetches/fetch_stats.h"

namespace pegaflow::server {

struct SsdReport {
  struct OneDisk {
    std::string path;
    std::string state;
    std::string backend;
    std::string backend_reason;
    bool direct = true;
    bool is_breaker_open = false;
    bool is_slow = false;
    std::uint64_t index_limit_bytes = 0;  ///< 0: none.
    std::uint64_t capacity_bytes = 0;
    std::uint64_t segments = 0;
    std::uint64_t free_segments = 0;
    std::uint64_t scanned_segments = 0;
    std::uint64_t blocks = 0;
    std::uint64_t index_bytes = 0;
    std::uint64_t recovered_blocks = 0;
    double scan_seconds = 0;
    std::uint64_t read_bytes = 0;
    std::uint64_t read_blocks = 0;
    double read_seconds = 0;
    std::uint64_t written_bytes = 0;
    std::uint64_t written_blocks = 0;
    std::uint64_t table_bytes = 0;
    std::uint64_t reclaimed_blocks = 0;
    std::uint64_t proof_failures = 0;
    std::uint64_t read_errors = 0;
    std::uint64_t write_errors = 0;
    std::uint64_t damaged_blocks = 0;
    std::uint64_t bytes_in_flight = 0;
  };
  std::vector<OneDisk> disks;
  FetchStats fetches;  ///< Without other nodes; else theirs are of all sources.
  bool waits_for_nodes = false;
  std::uint64_t reads_in_flight = 0;
  std::uint64_t late_blocks = 0;
  std::uint64_t evicted_unwritten = 0;
  std::uint64_t rejected_budget = 0;
  std::uint64_t rejected_too_large = 0;
  std::uint64_t failed_writes = 0;
  std::uint64_t forgotten_writes = 0;
  std::uint64_t renewed_blocks = 0;
};

}  // namespace pegaflow::server
