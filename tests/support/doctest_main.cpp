// The main() of the C++ tests that need no GPU: doctest with a printed seed.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

int main(int argc, char** argv) {
  std::printf("seed: %llu (set PEGA_TEST_SEED to repeat)\n",
              static_cast<unsigned long long>(pegaflow::testing::seed()));
  std::fflush(stdout);
  doctest::Context context(argc, argv);
  return context.run();
}
