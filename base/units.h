#pragma once
/// \file
/// Sizes and times in the notation of users.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow {

/// Parses a size such as "30gb", "64 MiB", "4k", "1.5gb" or "4096". Every unit is 1024-based, as
/// users of `--pool-size` expect; letters may be upper or lower case.
/// Errors: kInvalidArgument that names the text and the units that exist.
Result<std::uint64_t> parse_bytes(std::string_view text);

/// "30 GiB", "1.5 MiB", "512 B": at most three digits, for log lines.
std::string format_bytes(std::uint64_t bytes);

/// Parses a time such as "250ms", "2s", "100us", "1m" or "1h".
/// Errors: kInvalidArgument that names the text and the units that exist.
Result<std::chrono::nanoseconds> parse_duration(std::string_view text);

/// "250 ms", "2 s", "37 us", "10 min", "1 h": at most three digits, for log lines.
std::string format_duration(std::chrono::nanoseconds duration);

}  // namespace pegaflow
