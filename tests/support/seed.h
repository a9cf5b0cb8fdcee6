#pragma once
/// \file
/// Where tests get their chance from.

#include <cstdint>

namespace pegaflow::testing {

/// PEGA_TEST_SEED, or a random number; the same for the whole process. Printed at its start.
std::uint64_t seed();

}  // namespace pegaflow::testing
