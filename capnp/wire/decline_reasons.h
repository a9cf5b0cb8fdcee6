#pragma once
/// \file
/// The names of wire::DeclineReason, for readers that do without Cap'n Proto.

#include <cstddef>
#include <iterator>
#include <string_view>

namespace pegaflow {

/// By the number of the reason, as metrics and /instances name them.
inline constexpr std::string_view kDeclineReasonNames[] = {
    "other", "configuration", "engine", "model", "weights", "device", "failure"};
inline constexpr std::size_t kDeclineReasons = std::size(kDeclineReasonNames);

}  // namespace pegaflow
