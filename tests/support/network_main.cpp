// The main() of the C++ tests of links: doctest with a printed seed; skips with the reason if
// network namespaces are unavailable.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/support/test_network.h"

int main(int argc, char** argv) {
  if (const auto why_not = pegaflow::testing::TestNetwork::why_not()) {
    std::printf("%s\n", why_not->c_str());
    return 77;
  }
  std::printf("seed: %llu (set PEGA_TEST_SEED to repeat)\n",
              static_cast<unsigned long long>(pegaflow::testing::seed()));
  std::fflush(stdout);
  doctest::Context context(argc, argv);
  return context.run();
}
