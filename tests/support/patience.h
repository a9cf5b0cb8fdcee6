#pragma once
/// \file
/// How long a test waits for what has to come.

#include <chrono>

namespace pegaflow::testing {

/// So long that only a hang ends the wait: a machine that is busy with other things may be ten
/// times slower than an idle one, and what comes late has come.
inline constexpr std::chrono::seconds kHang{60};

}  // namespace pegaflow::testing
