#pragma once
/// \file
/// The longest time that a test waits for an event.

#include <chrono>

namespace pegaflow::testing {

/// Long enough that only a hang ends the wait: a busy machine may be ten times slower than an idle
/// one, and a late event still counts.
inline constexpr std::chrono::seconds kHang{60};

}  // namespace pegaflow::testing
