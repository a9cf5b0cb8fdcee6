#pragma once
/// \file
/// What engines asked for, request by request: read from a file, or made up (synthetic_trace.h).

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/error.h"

namespace pegaflow::perf {

/// The blocks of one prompt, in its order. Equal numbers are equal blocks with equal prefixes.
using Prompt = std::vector<std::uint64_t>;

struct RequestTrace {
  std::string name;  ///< For people: the file, or the workload and its seed.
  std::vector<Prompt> requests;
};

/// The most blocks of one request: what one call to the server may ask.
inline constexpr std::size_t kMaxPromptBlocks = 8192;

/// Reads a trace in the format of Mooncake: an object a line with `timestamp` (ms), `input_length`
/// and `output_length` (tokens) and `hash_ids` (the blocks of the input). Requests keep the order
/// of their lines. Empty lines, and requests without a block, are left out. Stops after `limit`
/// requests; 0: reads all.
/// Errors: kInvalidArgument that names `name`, the line and what was expected there, also when
/// there is no request at all; kIo when reading fails.
Result<RequestTrace> read_trace(std::istream& lines, const std::string& name, std::size_t limit);

/// The same of a file; "-" is the standard input.
/// Errors: kIo when it cannot be read; as read_trace().
Result<RequestTrace> read_trace_file(const std::string& path, std::size_t limit);

/// What there is to be found in a trace.
struct TraceSummary {
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;    ///< Asked for by all requests together.
  std::uint64_t distinct = 0;  ///< Different ones.
  /// Blocks that a cache that forgets nothing finds, as prefixes.
  std::uint64_t reusable = 0;
};
[[nodiscard]] TraceSummary summarize(const RequestTrace& trace);

}  // namespace pegaflow::perf
