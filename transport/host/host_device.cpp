#include "transport/host/host_device.h"

#include <algorithm>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "base/os/thread.h"
#include "transport/device_checks.h"
#include "transport/host/page_copy.h"
#include "transport/host/peer_reader.h"

namespace pegaflow {
namespace {

/// The work that a thread takes at once. Less costs a visible share in locking for 4 KiB pages,
/// more makes a load wait longer for a save.
constexpr std::uint64_t kRunBytes = 256 * 1024;

}  // namespace

/// One mutex guards everything but the bytes. Each thread takes it once per run, about every 20 us,
/// so it is not contended. A Mailbox has one owner and could not feed several threads.
class HostDevice::Impl {
 public:
  explicit Impl(const Options& options) : options_(options) {}

  Result<void> start() {
    for (int i = 0; i < options_.threads; ++i) {
      PEGA_TRY_LET(std::thread thread, start_thread("pega-copy", [this] { run(); }));
      threads_.push_back(std::move(thread));
    }
    return {};
  }

  ~Impl() {
    detach();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) {
    const std::lock_guard lock(mutex_);
    if (attached_ || jobs_ != 0)
      return fail(Errc::kInvalidArgument, "the device is attached already");
    PEGA_TRY(device::check_attach(layouts, pool, sink));
    layouts_.assign(layouts.begin(), layouts.end());
    pool_ = pool;
    sink_ = std::move(sink);
    attached_ = true;
    return {};
  }

  void detach() {
    if (forked()) return;
    std::unique_lock lock(mutex_);
    attached_ = false;
    for (std::list<Job>& queue : queues_) {
      for (Job& job : queue) job.cancelled = true;
    }
    collect_idle_cancelled();
    work_.notify_all();
    idle_.wait(lock, [this] { return jobs_ == 0; });
    if (!attached_) peers_.clear();
  }

  /// Holds the mutex while it looks at the peer, which happens once for each engine of the host.
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) {
    if (forked()) return fail(Errc::kGone, "the copy threads belong to the parent process");
    PEGA_TRY(device::check_host(memory));
    std::unique_lock lock(mutex_);
    PEGA_TRY(check_new_peer(peer));
    const PageLayout layout = layouts_.front();
    // Its first read waits as long as the other process changes its mappings; copies go on.
    lock.unlock();
    PEGA_TRY_LET(PeerReader reader, PeerReader::open(memory, layout));
    lock.lock();
    PEGA_TRY(check_new_peer(peer));
    peers_.emplace(peer, std::move(reader));
    return {};
  }

  void remove_peer(std::uint64_t peer) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    peers_.erase(peer);
  }

  Result<void> submit(Batch&& batch) {
    if (forked()) return fail(Errc::kGone, "the copy threads belong to the parent process");
    {
      const std::lock_guard lock(mutex_);
      if (!attached_) return fail(Errc::kGone, "the device is not attached to a pool");
      const auto peer = peers_.find(batch.peer);
      std::optional<std::uint64_t> peer_blocks;
      if (peer != peers_.end()) peer_blocks = peer->second.block_count();
      PEGA_TRY(device::check_batch(batch, layouts_, pool_.size(), peer_blocks));
      std::size_t& count = counts_[static_cast<std::size_t>(batch.direction)];
      if (count >= options_.max_batches) {
        return fail(Errc::kBusy, "{} batches are queued already", count);
      }
      ++count;
      ++jobs_;
      std::list<Job>& queue = batch.copies.empty() ? ended_ : queue_of(batch.direction);
      Job job;
      const bool wants_checksums = std::any_of(batch.copies.begin(), batch.copies.end(),
                                               [](const Copy& copy) { return copy.checksum; });
      if (wants_checksums) job.checksums.resize(batch.copies.size(), kNoChecksum);
      if (peer != peers_.end()) job.peer = &peer->second;
      job.batch = std::move(batch);
      queue.push_back(std::move(job));
    }
    // All threads: a batch has work for each.
    work_.notify_all();
    return {};
  }

  void cancel(std::uint64_t ticket) {
    if (forked()) return;
    {
      const std::lock_guard lock(mutex_);
      for (std::list<Job>& queue : queues_) {
        for (Job& job : queue) {
          if (job.batch.ticket == ticket) job.cancelled = true;
        }
      }
      collect_idle_cancelled();
    }
    work_.notify_one();
  }

  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }

 private:
  [[nodiscard]] Result<void> check_new_peer(std::uint64_t peer) const {
    if (!attached_) return fail(Errc::kGone, "add peer: the device is not attached to a pool");
    if (peer == 0 || peers_.contains(peer)) {
      return fail(Errc::kInvalidArgument, "add peer: {} is 0 or the name of another peer", peer);
    }
    return {};
  }

  struct Job {
    Batch batch;
    const PeerReader* peer = nullptr;  ///< The batch's, if it has one.
    std::size_t issued = 0;            ///< Pages handed to a thread so far.
    std::optional<Error> error;        ///< Why the first page that failed did,
    std::size_t failed = 0;            ///< and which it is.
    int threads_inside = 0;
    bool cancelled = false;
    std::vector<std::uint64_t> checksums;  ///< Each written by the thread that copies its page.

    [[nodiscard]] bool has_work() const {
      return !cancelled && !error && issued < batch.copies.size();
    }
    /// Threads fail in any order.
    void fail_at(std::size_t page, Error why) {
      if (error && failed <= page) return;
      failed = page;
      error = std::move(why);
    }
  };

  std::list<Job>& queue_of(Direction direction) {
    return queues_[static_cast<std::size_t>(direction)];
  }

  /// Moves cancelled jobs that no thread works on to ended_, where a thread reports them before it
  /// copies anything.
  void collect_idle_cancelled() {
    for (std::list<Job>& queue : queues_) {
      for (auto job = queue.begin(); job != queue.end();) {
        const auto next = std::next(job);
        if (job->cancelled && job->threads_inside == 0) ended_.splice(ended_.end(), queue, job);
        job = next;
      }
    }
  }

  void run() {
    PageChecksum checksum;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!ended_.empty()) {
        report(lock);
      } else if (std::list<Job>::iterator job; next_job(job)) {
        copy_run(lock, job, checksum);
      } else if (stopping_) {
        return;
      } else {
        work_.wait(lock);
      }
    }
  }

  /// Finds the first job with pages left, loads before saves. At most one job per thread precedes
  /// it with all its pages handed out.
  bool next_job(std::list<Job>::iterator& found) {
    for (const Direction direction : {Direction::kLoad, Direction::kSave}) {
      std::list<Job>& queue = queue_of(direction);
      found =
          std::find_if(queue.begin(), queue.end(), [](const Job& job) { return job.has_work(); });
      if (found != queue.end()) return true;
    }
    return false;
  }

  void copy_run(std::unique_lock<std::mutex>& lock, std::list<Job>::iterator job,
                PageChecksum& checksum) {
    const PageLayout& layout = layouts_[job->batch.layout];
    const std::size_t pages = std::clamp<std::size_t>(kRunBytes / layout.page_bytes(), 1,
                                                      job->batch.copies.size() - job->issued);
    const std::size_t first = std::exchange(job->issued, job->issued + pages);
    ++job->threads_inside;

    lock.unlock();
    PeerReader::Outcome outcome;
    if (job->peer != nullptr) {
      outcome = read_peer(*job, first, pages, checksum);
    } else {
      copy_pages(*job, first, pages, checksum);
    }
    lock.lock();

    if (outcome.error) job->fail_at(first + outcome.copied, std::move(*outcome.error));
    if (--job->threads_inside == 0 && !job->has_work()) {
      ended_.splice(ended_.end(), queue_of(job->batch.direction), job);
    }
  }

  void copy_pages(Job& job, std::size_t first, std::size_t pages, PageChecksum& checksum) {
    const PageLayout& layout = layouts_[job.batch.layout];
    for (std::size_t i = first; i < first + pages; ++i) {
      const Copy& copy = job.batch.copies[i];
      std::byte* const page = pool_.data() + copy.pool_offset;
      if (copy.checksum) {
        job.checksums[i] = copy_page(layout, job.batch.direction, copy.block, page, checksum);
      } else {
        copy_page(layout, job.batch.direction, copy.block, page);
      }
    }
  }

  PeerReader::Outcome read_peer(Job& job, std::size_t first, std::size_t pages,
                                PageChecksum& checksum) {
    const PageLayout& layout = layouts_[job.batch.layout];
    PeerReader::Outcome outcome =
        job.peer->read(layout, std::span(job.batch.copies).subspan(first, pages));
    for (std::size_t i = first; i < first + outcome.copied; ++i) {
      const Copy& copy = job.batch.copies[i];
      if (copy.checksum) job.checksums[i] = checksum_of(layout, copy.block, checksum);
    }
    return outcome;
  }

  void report(std::unique_lock<std::mutex>& lock) {
    Job job = std::move(ended_.front());
    ended_.pop_front();
    Completion completion{job.batch.ticket, job.issued, std::nullopt, std::move(job.checksums)};
    if (job.error) {
      completion.copied = job.failed;
      // Later pages that were copied count no more than those that were not.
      for (std::size_t i = job.failed; i < completion.checksums.size(); ++i) {
        completion.checksums[i] = kNoChecksum;
      }
      completion.error = std::move(job.error);
    } else if (job.issued < job.batch.copies.size()) {
      completion.error = Error{Errc::kCancelled, fmt::format("cancelled after {} of {} pages",
                                                             job.issued, job.batch.copies.size())};
    }
    // Before the report, whose receiver may submit the next batch at once.
    --counts_[static_cast<std::size_t>(job.batch.direction)];

    lock.unlock();
    sink_(std::move(completion));  // Set while jobs_ is not 0.
    lock.lock();

    if (--jobs_ == 0) idle_.notify_all();
  }

  const Options options_;
  const pid_t pid_ = ::getpid();
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable work_;  ///< A run to copy, a completion to report, or the end.
  std::condition_variable idle_;  ///< jobs_ became 0.
  // Changed only while jobs_ is 0, so a thread with a job may read them without the mutex.
  std::vector<PageLayout> layouts_;
  std::span<std::byte> pool_;
  CompletionSink sink_;

  bool attached_ = false;
  bool stopping_ = false;
  std::size_t jobs_ = 0;        ///< Accepted, until the sink has returned.
  std::size_t counts_[2] = {};  ///< Accepted, until they are reported, by direction.
  std::list<Job> queues_[2];    ///< By direction.
  std::list<Job> ended_;        ///< No longer copied, not yet reported.
  std::map<std::uint64_t, PeerReader> peers_;
};

Result<std::unique_ptr<HostDevice>> HostDevice::create(const Options& options) {
  if (options.threads < 1 || options.threads > 64 || options.max_batches == 0) {
    return fail(Errc::kInvalidArgument, "{} copy threads (1 to 64) with {} batches (1 or more)",
                options.threads, options.max_batches);
  }
  auto impl = std::make_unique<Impl>(options);
  PEGA_TRY(impl->start());
  return std::unique_ptr<HostDevice>(new HostDevice(std::move(impl)));
}

HostDevice::HostDevice(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HostDevice::~HostDevice() {
  // In a child the threads are missing, and joining them or destroying their condition variables
  // would never return: the process's end releases the memory.
  if (impl_->forked()) static_cast<void>(impl_.release());
}

Result<void> HostDevice::attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                CompletionSink sink) {
  return impl_->attach(layouts, pool, std::move(sink));
}
void HostDevice::detach() { impl_->detach(); }
Result<void> HostDevice::add_peer(std::uint64_t peer, const PeerMemory& memory) {
  return impl_->add_peer(peer, memory);
}
void HostDevice::remove_peer(std::uint64_t peer) { impl_->remove_peer(peer); }
Result<Device::Event> HostDevice::record_event(Queue /*queue*/) { return Event::kNow; }
Result<void> HostDevice::submit(Batch batch) { return impl_->submit(std::move(batch)); }
void HostDevice::cancel(std::uint64_t ticket) { impl_->cancel(ticket); }

}  // namespace pegaflow
