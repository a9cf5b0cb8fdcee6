#pragma once
/// \file
/// A file of the SSD tier whose tables name blocks that have no bytes.

#include <cstdint>
#include <string>

#include "base/error.h"

namespace pegaflow::perf {

struct SsdTables {
  std::uint64_t file_bytes = 0;
  std::uint64_t log_offset = 0;     ///< The first segment.
  std::uint64_t segment_bytes = 0;  ///< From the begin of one segment to that of the next.
  std::uint64_t segments = 0;
  std::uint64_t table_bytes = 0;  ///< The header of a full segment and its pages with entries.
};

/// Creates a sparse file with the superblock, the names, and the tables of `blocks` blocks of
/// `block_bytes` each, a multiple of 4 KiB, which the tier's own log places and names.
/// Errors: the kernel's; kInternal when the log takes no more blocks.
Result<SsdTables> write_ssd_tables(const std::string& path, std::uint64_t blocks,
                                   std::uint64_t block_bytes, std::uint64_t seed);

}  // namespace pegaflow::perf
