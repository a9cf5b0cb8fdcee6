#include "tests/support/seed.h"

#include <cstdlib>
#include <random>
#include <string>

namespace pegaflow::testing {

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* const given = std::getenv("PEGA_TEST_SEED");
    return given != nullptr ? std::stoull(given) : std::uint64_t{std::random_device{}()};
  }();
  return value;
}

}  // namespace pegaflow::testing
