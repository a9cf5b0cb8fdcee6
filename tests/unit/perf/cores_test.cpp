#include "perf/lib/cores.h"

#include <latch>
#include <thread>

#include <sched.h>

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

/// The cores that the calling thread may use.
std::vector<std::size_t> own_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  REQUIRE(::sched_getaffinity(0, sizeof set, &set) == 0);
  std::vector<std::size_t> cores;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

TEST_SUITE("cores") {
  TEST_CASE("all threads move to the cores of the round, and back at the end") {
    const std::vector<std::size_t> before = own_cores();
    std::vector<std::size_t> of_thread;
    std::vector<std::size_t> of_thread_later;
    std::latch started(1);
    std::latch moved(1);
    std::latch looked(1);
    std::latch restored(1);
    std::thread other([&] {
      started.count_down();
      moved.wait();
      of_thread = own_cores();
      looked.count_down();
      restored.wait();
      of_thread_later = own_cores();
    });
    started.wait();
    {
      const SameCores cores = SameCores::create().value();
      REQUIRE(cores.use(0, 1));
      moved.count_down();
      looked.wait();
      CHECK(own_cores() == cores.chosen(0, 1));
      CHECK(of_thread == cores.chosen(0, 1));
    }
    restored.count_down();
    other.join();
    CHECK(own_cores() == before);
    CHECK(of_thread_later == before);
  }

  TEST_CASE("each round has other cores, and all get a turn") {
    const SameCores cores = SameCores::create().value();
    const std::size_t all = own_cores().size();
    std::vector<std::size_t> seen;
    for (std::size_t round = 0; round < all; ++round) {
      REQUIRE(cores.chosen(round, 1).size() == 1);
      seen.push_back(cores.chosen(round, 1).front());
    }
    CHECK(seen == own_cores());
    CHECK(cores.chosen(all, 1) == cores.chosen(0, 1));
  }

  TEST_CASE("more threads than cores may use all of them") {
    const SameCores cores = SameCores::create().value();
    CHECK(cores.chosen(3, 1000).size() == own_cores().size());
  }
}

}  // namespace
}  // namespace pegaflow::perf
