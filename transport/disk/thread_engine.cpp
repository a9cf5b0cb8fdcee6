// preadv2() and pwritev2() on a bounded number of threads, where io_uring is forbidden.
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include <poll.h>
#include <unistd.h>

#include "base/os/event_fd.h"
#include "base/os/thread.h"
#include "transport/disk/io_engine.h"

namespace pegaflow::disk {
namespace {

std::int64_t execute(int fd, const Piece& piece) {
  const auto count = static_cast<int>(piece.memory.size());
  const auto offset = static_cast<off_t>(piece.offset);
  ssize_t result = 0;
  do {
    switch (piece.operation) {
      case Disk::Operation::kRead:
        result = ::preadv2(fd, piece.memory.data(), count, offset, 0);
        break;
      case Disk::Operation::kWrite:
        result = ::pwritev2(fd, piece.memory.data(), count, offset, 0);
        break;
      case Disk::Operation::kDurableWrite:
        result = ::pwritev2(fd, piece.memory.data(), count, offset, RWF_DSYNC);
        break;
      case Disk::Operation::kFlush:
        result = ::fdatasync(fd);
        break;
    }
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -errno : result;
}

/// Workers take pieces from one queue behind a mutex, which is never held during a system call.
class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(const Options& options) : options_(options) {}
  ~ThreadEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    news_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  ThreadEngine(const ThreadEngine&) = delete;
  ThreadEngine& operator=(const ThreadEngine&) = delete;

  Result<void> start() {
    for (unsigned i = 0; i < options_.threads; ++i) {
      PEGA_TRY_LET(std::thread worker, start_thread("pega-disk-io", [this] { work(); }));
      workers_.push_back(std::move(worker));
    }
    return {};
  }

  void begin(const Piece& piece) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(piece);
    }
    news_.notify_one();
  }

  void submit() override {}  // begin() has passed them on.

  void wait(Duration timeout, std::vector<Outcome>& outcomes) override {
    pollfd events[] = {{.fd = ended_wake_.fd(), .events = POLLIN, .revents = 0},
                       {.fd = options_.wake_fd, .events = POLLIN, .revents = 0}};
    const timespec time{.tv_sec = timeout.count() / 1'000'000'000,
                        .tv_nsec = timeout.count() % 1'000'000'000};
    ::ppoll(events, std::size(events), timeout == Duration::max() ? nullptr : &time, nullptr);
    poll(outcomes);
  }

  void poll(std::vector<Outcome>& outcomes) override {
    ended_wake_.clear();
    const std::lock_guard lock(mutex_);
    outcomes.insert(outcomes.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      news_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Piece piece = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const std::int64_t result = execute(options_.fd, piece);
      lock.lock();
      ended_.push_back({.piece = piece.id, .result = result});
      if (ended_.size() == 1) ended_wake_.signal();  // Later ones are found by the same poll().
    }
  }

  const Options options_;
  EventFd ended_wake_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Piece> waiting_;
  std::vector<Outcome> ended_;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> make_thread_engine(const IoEngine::Options& options) {
  auto engine = std::make_unique<ThreadEngine>(options);
  PEGA_TRY(engine->start());
  return engine;
}

}  // namespace pegaflow::disk
