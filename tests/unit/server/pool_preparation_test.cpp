#include "server/pool/pool_preparation.h"

#include <string>
#include <vector>

#include <poll.h>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// Everything that it tells until the last.
std::vector<PoolNews> listen(PoolPreparation& preparation) {
  std::vector<PoolNews> all;
  while (all.empty() || !(all.back().prepared || all.back().error)) {
    pollfd wanted{preparation.news().fd(), POLLIN, 0};
    REQUIRE(::poll(&wanted, 1, 20'000) == 1);
    preparation.news().drain([&](PoolNews&& news) { all.push_back(std::move(news)); });
  }
  return all;
}

TEST_SUITE("PoolPreparation") {
  TEST_CASE("it reports its progress, and then the pool") {
    const SteadyClock clock;
    auto preparation = PoolPreparation::start({.pool = {.size_bytes = 200 * kMiB}}, clock);
    REQUIRE(preparation);

    const auto news = listen(**preparation);

    REQUIRE(news.back().prepared);
    CHECK(news.back().prepared->pool->size_bytes() == 200 * kMiB);
    CHECK(news.front().status == "preparing the pool");
    CHECK(news.size() >= 3);  // The beginning, chunks of 32 MiB, the end.
  }

  TEST_CASE("an impossible size is reported at once") {
    const SteadyClock clock;
    auto preparation =
        PoolPreparation::start({.pool = {.size_bytes = std::uint64_t{1} << 46}}, clock);
    REQUIRE(preparation);

    const auto news = listen(**preparation);

    REQUIRE(news.back().error);
    CHECK(news.back().error->code == Errc::kRefused);
  }

  TEST_CASE("it ends early when its owner is destroyed") {
    const SteadyClock clock;
    const auto preparation = PoolPreparation::start({.pool = {.size_bytes = 500 * kMiB}}, clock);
    REQUIRE(preparation);
    // The destructor joins the thread; a test that hangs here has found that it does not stop.
  }
}

}  // namespace
}  // namespace pegaflow::server
