// The tests of CudaDevice over this machine's GPU; skipped, with a message, where there is none.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/unit/transport/cuda_fixture.h"

std::shared_ptr<pegaflow::cuda::Driver> pegaflow::testing::driver_under_test() {
  static const auto driver = cuda::Driver::load().value();
  return driver;
}

int main(int argc, char** argv) {
  const auto driver = pegaflow::cuda::Driver::load();
  int count = 0;
  if (driver) (*driver)->device_count(count);
  if (count == 0) {
    std::printf("%s\n", driver ? "no GPU" : driver.error().detail.c_str());
    return 77;
  }
  // Held throughout: creating a context takes longer than most tests.
  pegaflow::cuda::Context context_of_all = nullptr;
  if ((*driver)->retain_primary_context(0, context_of_all) != pegaflow::cuda::kSuccess) return 1;
  std::printf("seed: %llu (set PEGA_TEST_SEED to repeat)\n",
              static_cast<unsigned long long>(pegaflow::testing::seed()));
  std::fflush(stdout);
  doctest::Context context(argc, argv);
  return context.run();
}
