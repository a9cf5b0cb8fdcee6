#pragma once
/// \file
/// The size of a page in the tests of this folder.

#include <cstdint>

namespace pegaflow::testing {

inline constexpr std::uint64_t kPage = 4096;

}  // namespace pegaflow::testing
