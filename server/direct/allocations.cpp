#include "server/direct/allocations.h"

#include <utility>

#include "base/os/descriptor_box.h"
#include "base/os/thread.h"

namespace pegaflow::server {

AllocationCloser::~AllocationCloser() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<void> AllocationCloser::reserve(std::size_t count) {
  {
    // Its descriptors can then be closed in any case.
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      PEGA_TRY_LET(thread_, start_thread("pega-close", [this] { run(); }));
    }
  }
  const std::size_t before = reserved_.fetch_add(count);
  if (before + count <= most_) return {};
  reserved_.fetch_sub(count);
  return fail(Errc::kRefused,
              "{} allocations of GPU memory, each with a descriptor, beside {} of other workers: "
              "this server keeps {} at most, a quarter of its limit of open files (ulimit -n)",
              count, before, most_);
}

void AllocationCloser::close(std::vector<UniqueFd> descriptors, std::size_t reserved) {
  {
    const std::lock_guard lock(mutex_);
    ended_.push_back({std::move(descriptors), reserved});
  }
  changed_.notify_all();
}

void AllocationCloser::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !ended_.empty(); });
    if (ended_.empty()) return;
    std::vector<Ended> ended = std::exchange(ended_, {});
    lock.unlock();
    for (Ended& one : ended) {
      one.descriptors.clear();
      reserved_.fetch_sub(one.reserved);
    }
    lock.lock();
  }
}

Result<std::shared_ptr<const Allocations>> Allocations::take(
    std::shared_ptr<AllocationCloser> closer, int box, std::size_t count) {
  PEGA_TRY(closer->reserve(count));
  std::shared_ptr<Allocations> made(new Allocations(std::move(closer), count));
  made->descriptors_.reserve(count);
  PEGA_TRY(DescriptorBox::look(box, count, [&](UniqueFd descriptor) -> Result<void> {
    made->descriptors_.push_back(std::move(descriptor));
    return {};
  }));
  return made;
}

Result<UniqueFd> Allocations::pack() const { return DescriptorBox::pack(descriptors_); }

}  // namespace pegaflow::server
