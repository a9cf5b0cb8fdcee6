#pragma once
/// \file
/// The source of random choices in tests.

#include <cstdint>

namespace pegaflow::testing {

/// PEGA_TEST_SEED, or a random number; the same for the whole process. Printed at its start.
std::uint64_t seed();

}  // namespace pegaflow::testing
