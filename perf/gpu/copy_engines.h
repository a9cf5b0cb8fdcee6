#pragma once
/// \file
/// Several engines that save and load at once, beside memcpy of the same bytes by the same threads.

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "perf/lib/figures.h"

namespace pegaflow::perf {

/// Bytes of a round, for each engine and direction: far above any cache, so that both sides read
/// and write memory.
inline constexpr std::uint64_t kCopyRoundBytes = std::uint64_t{128} << 20;
inline constexpr std::uint64_t kCopySegmentBytes = std::uint64_t{32} << 10;

struct EnginesRun {
  std::string server;  ///< As CommonOptions::server.
  std::uint64_t seed = 1;
  std::uint32_t engines = 2;
  std::uint32_t threads = 1;  ///< Copy threads of each engine.
  std::uint32_t rounds = 10;
  bool check = false;  ///< All bytes after every round, not only after the first.
};

/// One page size, on a server of its own: each engine saves 128 MiB and loads what it saved in the
/// round before, all of them from the same moment on until the last has ended. Through the client
/// library: reserve, copy, publish; claim, open, copy, release.
/// Errors: those of the server and its clients; kCorrupt when a loaded block is not what was saved.
Result<Figure> measure_engines(const EnginesRun& run, std::uint64_t page_bytes);

}  // namespace pegaflow::perf
