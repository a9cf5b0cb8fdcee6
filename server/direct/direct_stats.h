#pragma once
/// \file
/// The counters of direct reads.

#include <cstddef>
#include <cstdint>

namespace pegaflow::server {

/// A plain value.
struct DirectStats {
  std::size_t sources = 0;        ///< Workers that have registered their memory,
  std::size_t gpu_sources = 0;    ///< those of them whose memory is on a GPU,
  std::size_t far_sources = 0;    ///< and those whose memory other nodes may read.
  std::size_t blocks = 0;         ///< Offered now.
  std::size_t reads = 0;          ///< In flight.
  std::uint64_t begun = 0;        ///< Reads since the start,
  std::uint64_t read_blocks = 0;  ///< and their blocks.
  std::size_t waits = 0;          ///< Calls that wait for blocks, of workers here or elsewhere.
  std::uint64_t far_begun = 0;    ///< Reads of workers here from workers of other nodes,
  std::uint64_t far_blocks = 0;   ///< and their blocks.
};

}  // namespace pegaflow::server
