#pragma once
/// \file
/// The name of a worker's registration.

#include <cstdint>

namespace pegaflow::server {

/// The name of a worker's registration; never 0, and never used twice.
enum class SourceId : std::uint64_t {};

}  // namespace pegaflow::server
