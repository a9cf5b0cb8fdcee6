#pragma once
/// \file
/// Several engines that save and load concurrently, beside memcpy by as many threads.

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "perf/lib/figures.h"

namespace pegaflow::perf {

/// Bytes of a round, for each engine and direction: far more than any cache, so that both sides
/// read and write memory.
inline constexpr std::uint64_t kCopyRoundBytes = std::uint64_t{128} << 20;
inline constexpr std::uint64_t kCopySegmentBytes = std::uint64_t{32} << 10;

struct EnginesRun {
  std::string server;  ///< As CommonOptions::server.
  std::uint64_t seed = 1;
  std::uint32_t engines = 2;
  std::uint32_t threads = 1;  ///< Copy threads of each engine.
  std::uint32_t rounds = 10;
  bool check = false;  ///< Compare all bytes after every round, not only the first.
};

/// Measures one page size on a server of its own. Each engine saves 128 MiB and loads the blocks of
/// the round before through the client library (reserve, copy, publish; claim, open, copy,
/// release). A round lasts from the common start until the last engine ends. Errors: those of the
/// server and its clients; kCorrupt when a loaded block is not the saved one.
Result<Figure> measure_engines(const EnginesRun& run, std::uint64_t page_bytes);

}  // namespace pegaflow::perf
