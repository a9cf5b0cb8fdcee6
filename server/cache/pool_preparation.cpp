#include "server/cache/pool_preparation.h"

#include <system_error>
#include <utility>

#include "base/assert.h"
#include "base/log.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"pool"};

constexpr std::uint64_t kReports = 100;  ///< In one attempt.

}  // namespace

Result<std::unique_ptr<PoolPreparation>> PoolPreparation::start(const Options& options,
                                                                const Clock& clock) {
  std::unique_ptr<PoolPreparation> preparation(new PoolPreparation(options, clock));
  try {
    preparation->thread_ = std::thread([&self = *preparation]() { self.run(); });
  } catch (const std::system_error& problem) {
    return fail(Errc::kInternal, "start the thread that prepares the pool: {}", problem.what());
  }
  return preparation;
}

PoolPreparation::PoolPreparation(const Options& options, const Clock& clock)
    // Attempts may each report a little before they fail.
    : options_(options), clock_(clock), news_(4096) {}

PoolPreparation::~PoolPreparation() {
  stop_.store(true);
  stopped_.signal();
  if (thread_.joinable()) thread_.join();
}

void PoolPreparation::report(PoolNews news) {
  const bool sent = news_.try_send(std::move(news));
  PEGA_ASSERT(sent, "the owner does not read the progress of the pool");
}

void PoolPreparation::run() {
  const TimePoint deadline = clock_.now() + options_.patience;
  std::atomic<std::uint64_t> reported{0};
  const auto progress = [&](std::uint64_t done, std::uint64_t size) {
    const std::uint64_t step = size / kReports + 1;
    std::uint64_t last = reported.load();
    if (done >= last + step && reported.compare_exchange_strong(last, done)) {
      report({.status = "preparing the pool", .done_bytes = done, .pool = nullptr, .error = {}});
    }
  };
  bool is_waiting = false;
  for (;;) {
    if (!is_waiting) {
      report({.status = "preparing the pool", .done_bytes = 0, .pool = nullptr, .error = {}});
    }
    auto pool = engine::Pool::create(options_.pool, stop_, progress);
    if (pool) {
      report({.status = "ok",
              .done_bytes = pool->size_bytes(),
              .pool = std::make_unique<engine::Pool>(std::move(*pool)),
              .error = {}});
      return;
    }
    if (pool.error().code != Errc::kOutOfCapacity || clock_.now() >= deadline) {
      report({.status = "failed", .done_bytes = 0, .pool = nullptr, .error = pool.error()});
      return;
    }
    if (!std::exchange(is_waiting, true)) {
      kLog.warn("memory is short, waiting reason=\"{}\"", pool.error().detail);
      report({.status = "waiting for the memory of a previous server",
              .done_bytes = 0,
              .pool = nullptr,
              .error = {}});
    }
    const auto interval =
        std::chrono::duration_cast<std::chrono::milliseconds>(options_.retry_interval);
    if (stopped_.wait(static_cast<int>(interval.count()))) return;
  }
}

}  // namespace pegaflow::server
