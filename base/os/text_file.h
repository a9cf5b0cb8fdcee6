#pragma once
/// \file
/// Small files that an option names: lists, keys, secrets.

#include <cstddef>
#include <string>

#include "base/error.h"

namespace pegaflow {

inline constexpr std::size_t kMaxTextFileBytes = std::size_t{16} << 20U;

/// Returns the content of a regular file. Never waits, as reading a pipe or a device would.
/// Errors: kInvalidArgument if the file cannot be opened or read, is not a regular file, or has
/// more than kMaxTextFileBytes. The detail omits the option and the path, which the caller knows.
Result<std::string> read_text_file(const std::string& path);

}  // namespace pegaflow
