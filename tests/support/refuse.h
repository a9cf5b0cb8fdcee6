#pragma once
/// \file
/// System calls that are refused, as a container's filter does.

#include <optional>

namespace pegaflow::testing {

/// What mbind() says from now on to this thread and what it starts, until it ends: this errno, or
/// success without effect for 0. No value when the kernel has no such filters.
std::optional<int> answer_mbind_with(int error);

}  // namespace pegaflow::testing
