#pragma once
/// \file
/// Waits for the state of a server.

#include <chrono>
#include <string_view>
#include <thread>

#include "base/error.h"

namespace pegaflow::perf {

/// Evaluates a condition, a `Result<bool>`, until it holds. Errors: its own; kTimeout with `what`.
template <typename Condition>
Result<void> wait_until(std::string_view what, const Condition& condition,
                        std::chrono::seconds patience = std::chrono::seconds(60)) {
  const auto last = std::chrono::steady_clock::now() + patience;
  for (;;) {
    PEGA_TRY_LET(const bool holds, condition());
    if (holds) return {};
    if (std::chrono::steady_clock::now() > last) {
      return fail(Errc::kTimeout, "after {} s still not: {}", patience.count(), what);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace pegaflow::perf
