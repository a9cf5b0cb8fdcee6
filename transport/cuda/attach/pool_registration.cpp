#include "transport/cuda/attach/pool_registration.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/os/thread.h"
#include "transport/cuda/cuda_error.h"

namespace pegaflow::cuda {
namespace {

constexpr Log kLog{"cuda"};

/// Calls `one(i)` for each i below `count` on up to `threads` threads, each with the context, until
/// one fails. Returns the first status that is not success.
template <typename One>
Status for_each(Driver& driver, Context context, std::size_t count, unsigned threads, One&& one) {
  std::atomic<std::size_t> next{0};
  std::atomic<Status> failed{kSuccess};
  const auto work = [&] {
    const CurrentContext current(driver, context);
    Status status = current.status();
    while (status == kSuccess && failed.load() == kSuccess) {
      const std::size_t i = next.fetch_add(1);
      if (i >= count) return;
      status = one(i);
    }
    Status none = kSuccess;
    if (status != kSuccess) failed.compare_exchange_strong(none, status);
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < std::min<std::size_t>(threads, count); ++i) {
    Result<std::thread> other = start_thread("pega-register", work);
    if (!other) break;  // The threads that exist do the work.
    others.push_back(std::move(*other));
  }
  work();
  for (std::thread& other : others) other.join();
  return failed.load();
}

}  // namespace

Result<PoolRegistration> PoolRegistration::create(std::shared_ptr<Driver> driver, Context context,
                                                  std::span<std::byte> pool,
                                                  std::uint64_t range_bytes, unsigned threads) {
  PoolRegistration made;
  made.driver_ = std::move(driver);
  made.context_ = context;
  made.threads_ = threads;
  const std::size_t count = (pool.size() + range_bytes - 1) / range_bytes;
  std::vector<std::byte*> begun(count, nullptr);  // Each written by the thread that registers it.
  const Status status = for_each(*made.driver_, context, count, threads, [&](std::size_t i) {
    const std::span<std::byte> range =
        pool.subspan(i * range_bytes, std::min(range_bytes, pool.size() - i * range_bytes));
    const Status answer = made.driver_->register_host(range.data(), range.size());
    if (answer == kSuccess) begun[i] = range.data();
    return answer;
  });
  std::copy_if(begun.begin(), begun.end(), std::back_inserter(made.ranges_),
               [](const std::byte* range) { return range != nullptr; });
  PEGA_TRY(check(*made.driver_, status,
                 fmt::format("page-lock a pool of {} bytes for CUDA", pool.size())));
  return made;
}

PoolRegistration& PoolRegistration::operator=(PoolRegistration&& other) noexcept {
  if (this != &other) {
    release();
    driver_ = std::move(other.driver_);
    context_ = other.context_;
    ranges_ = std::exchange(other.ranges_, {});
    threads_ = other.threads_;
  }
  return *this;
}

PoolRegistration::~PoolRegistration() { release(); }

void PoolRegistration::release() {
  if (ranges_.empty()) return;
  const Status status = for_each(*driver_, context_, ranges_.size(), threads_, [&](std::size_t i) {
    return driver_->unregister_host(ranges_[i]);
  });
  // After an error on the device CUDA rejects this, too; the process's end releases the memory.
  if (status != kSuccess) {
    kLog.warn("cannot unregister the pool, it stays page-locked error=\"{}\"",
              driver_->describe(status));
  }
  ranges_.clear();
}

}  // namespace pegaflow::cuda
