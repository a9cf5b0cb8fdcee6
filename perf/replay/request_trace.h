#pragma once
/// \file
/// The requests of engines: read from a file, or generated (synthetic_trace.h).

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/error.h"

namespace pegaflow::perf {

/// The blocks of one prompt in order. Equal numbers are equal blocks with equal prefixes.
using Prompt = std::vector<std::uint64_t>;

/// When a request arrived, and its lengths.
struct Arrival {
  double milliseconds = 0;  ///< From the start of the trace.
  std::uint32_t input_tokens = 0;
  std::uint32_t output_tokens = 0;
};

struct RequestTrace {
  std::string name;  ///< For reports: the file, or the workload and its seed.
  std::vector<Prompt> requests;
  /// One for each request; empty for generated requests, which have an order only.
  std::vector<Arrival> arrivals{};
};

/// The limit of blocks in one request: that of one call to the server.
inline constexpr std::size_t kMaxPromptBlocks = 8192;

/// Reads a trace in Mooncake's format: one object per line with `timestamp` (ms), `input_length`
/// and `output_length` (tokens) and `hash_ids` (the blocks of the input). Requests keep the order
/// of their lines. Empty lines, and requests without a block, are left out. Stops after `limit`
/// requests; 0: reads all.
/// Errors: kInvalidArgument with `name`, the line and what was expected there, or when there is no
/// request at all; kIo when reading fails.
Result<RequestTrace> read_trace(std::istream& lines, const std::string& name, std::size_t limit);

/// Reads a trace from a file; "-" is standard input.
/// Errors: kIo when it cannot be read; as read_trace().
Result<RequestTrace> read_trace_file(const std::string& path, std::size_t limit);

/// The counts of a trace.
struct TraceSummary {
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;    ///< Total of all requests.
  std::uint64_t distinct = 0;  ///< Distinct blocks.
  /// Blocks that an unlimited cache finds, as prefixes.
  std::uint64_t reusable = 0;
};
[[nodiscard]] TraceSummary summarize(const RequestTrace& trace);

}  // namespace pegaflow::perf
