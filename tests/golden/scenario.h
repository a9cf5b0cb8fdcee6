#pragma once
/// \file
/// The conversation of the transcripts: each call of a scheduler and of a worker, in sequence.

#include <string>

namespace pegaflow::testing {

/// The page that the scenario saves and loads.
inline constexpr std::size_t kGoldenPageBytes = 4096;

/// Runs both sides of an engine against the server at `socket`. Throws std::runtime_error that
/// names the first unexpected result.
void run_golden_scenario(const std::string& socket);

}  // namespace pegaflow::testing
