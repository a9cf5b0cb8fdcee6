#pragma once
/// \file
/// Small files that an option names: lists, keys, secrets.

#include <cstddef>
#include <string>

#include "base/error.h"

namespace pegaflow {

inline constexpr std::size_t kMaxTextFileBytes = std::size_t{16} << 20U;

/// The content of a regular file. Never waits, as a pipe or a device would make it.
/// Errors: kInvalidArgument for what cannot be opened or read, is no regular file, or has more than
/// kMaxTextFileBytes. The detail says only what is wrong: the caller knows the option and the path.
Result<std::string> read_text_file(const std::string& path);

}  // namespace pegaflow
