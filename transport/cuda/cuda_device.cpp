#include "transport/cuda/cuda_device.h"

#include <algorithm>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "base/assert.h"
#include "base/cpu_relax.h"
#include "base/log.h"
#include "base/os/pidfd.h"
#include "base/os/thread.h"
#include "transport/cuda/attach/layout_plans.h"
#include "transport/cuda/attach/pool_registration.h"
#include "transport/cuda/copy_stream.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/event_ring.h"
#include "transport/cuda/gpu.h"
#include "transport/cuda/kernel_image.h"
#include "transport/cuda/shared_memory.h"
#include "transport/device_checks.h"

namespace pegaflow {
namespace {

using cuda::CopyStream;
using cuda::CurrentContext;
using cuda::Driver;
using cuda::Path;
using cuda::PoolRegistration;
using cuda::Slice;

constexpr Log kLog{"cuda"};

/// The thread stops sleeping this long before the expected end of the last flight in a direction:
/// waking takes as long, and a load of one page lasts hardly longer.
constexpr Duration kSpin = std::chrono::microseconds(60);
/// A flight that is later than this waits for the engine, and is polled less often.
constexpr Duration kPatience = std::chrono::microseconds(200);
constexpr Duration kShortestSleep = std::chrono::microseconds(20);
constexpr Duration kLongestSleep = std::chrono::microseconds(500);
/// The pause between two looks at an event of the engine that a batch awaits: other engines wait
/// for it.
constexpr Duration kEventPoll = std::chrono::microseconds(50);

constexpr int kDirectionCount = 2;

/// Without copies, a batch only reports its event.
bool is_mark(const Device::Batch& batch) {
  return batch.copies.empty() && batch.after != Device::Event::kNow;
}

}  // namespace

/// One mutex guards what callers and the copy thread share; no CUDA call is made under it.
class CudaDevice::Impl {
 public:
  Impl(const Options& options, std::shared_ptr<Driver> driver)
      : options_(options), driver_(std::move(driver)) {}

  Result<void> start() {
    PEGA_TRY(open());
    PEGA_TRY_LET(thread_, start_thread("pega-cuda", [this] { run(); }));
    return {};
  }

  ~Impl() {
    detach();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    if (thread_.joinable()) thread_.join();
    if (context_ == nullptr) return;
    const CurrentContext current(*driver_, context_);
    for (std::unique_ptr<CopyStream>& copy_stream : copy_streams_) copy_stream.reset();
    events_.reset();
    if (module_ != nullptr) driver_->unload_module(module_);
  }

  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink&& sink) {
    const std::lock_guard attaching(attach_mutex_);
    {
      const std::lock_guard lock(mutex_);
      if (attached_ || jobs_ != 0) {
        return fail(Errc::kInvalidArgument, "the device is attached already");
      }
      if (broken_) return tl::unexpected<Error>(*broken_);
    }
    PEGA_TRY(device::check_attach(layouts, pool, sink));
    const CurrentContext current(*driver_, context_);
    PEGA_TRY(cuda::check(*driver_, current.status(), "use the engine's CUDA context"));
    const TimePoint begin = clock_.now();
    PEGA_TRY_LET(PoolRegistration registration,
                 PoolRegistration::create(driver_, context_, pool, options_.register_bytes,
                                          options_.register_threads));
    const Duration register_time = clock_.now() - begin;

    PEGA_TRY_LET(cuda::PlannedLayouts planned,
                 cuda::plan_layouts(*driver_,
                                    {.register_bytes = options_.register_bytes,
                                     .path = options_.path,
                                     .has_kernels = kernels_.gather != nullptr},
                                    layouts, pool, *copy_stream_of(Direction::kSave),
                                    *copy_stream_of(Direction::kLoad)));
    const std::lock_guard lock(mutex_);
    const bool any_staged = std::ranges::any_of(planned.plans, [](const cuda::Attached& attached) {
      return attached.path == Path::kStaged;
    });
    info_.path = any_staged ? Path::kStaged : Path::kDirect;
    info_.direct_share = planned.direct_share;
    info_.register_time = register_time;
    registration_ = std::move(registration);
    plans_ = std::move(planned.plans);
    layouts_.assign(layouts.begin(), layouts.end());
    pool_bytes_ = pool.size();
    sink_ = std::move(sink);
    attached_ = true;
    return {};
  }

  void detach() {
    if (forked()) return;
    const std::lock_guard attaching(attach_mutex_);
    {
      std::unique_lock lock(mutex_);
      attached_ = false;
      cancel_all_ = true;
      work_.notify_all();
      idle_.wait(lock, [this] { return jobs_ == 0; });
      cancel_all_ = false;
    }
    Peers ended;
    {
      const std::lock_guard lock(mutex_);
      ended.swap(peers_);
    }
    if (plans_.empty()) return;
    const CurrentContext current(*driver_, context_);
    registration_ = PoolRegistration();
    cuda::release_plans(*driver_, plans_);
    plans_.clear();
    sink_ = nullptr;
  }

  Result<PeerMemory> share(const PageLayout& layout) {
    if (forked()) return fail(Errc::kRefused, "CUDA belongs to the parent process");
    const CurrentContext current(*driver_, context_);
    return cuda::share_memory(*driver_, layout);
  }

  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) {
    if (forked()) return fail(Errc::kGone, "the copy thread belongs to the parent process");
    PEGA_TRY(device::check_host(memory));
    const std::lock_guard attaching(attach_mutex_);  // plans_ stays as it is.
    {
      const std::lock_guard lock(mutex_);
      if (broken_) return fail(Errc::kRefused, "{}", broken_->detail);
      if (!attached_) return fail(Errc::kGone, "the device is not attached to a pool");
      if (peer == 0 || peers_.contains(peer)) {
        return fail(Errc::kInvalidArgument, "add peer: the name {} is 0 or in use", peer);
      }
    }
    if (kernels_.pull == nullptr) {
      return fail(Errc::kRefused, "add peer: this program was built without CUDA kernels");
    }
    const CurrentContext current(*driver_, context_);
    PEGA_TRY_LET(std::unique_ptr<cuda::PeerMapping> mapping,
                 cuda::PeerMapping::open(driver_, context_, memory, layouts_.front(),
                                         plans_.front().plan.pieces()));
    const std::lock_guard lock(mutex_);
    peers_.emplace(peer, std::move(mapping));
    return {};
  }

  void remove_peer(std::uint64_t peer) {
    if (forked()) return;
    Peers::node_type ended;  // It unmaps without the mutex.
    const std::lock_guard lock(mutex_);
    ended = peers_.extract(peer);
  }

  Result<Event> record_event(Queue queue) {
    if (forked()) return fail(Errc::kGone, "the copy thread belongs to the parent process");
    {
      const std::lock_guard lock(mutex_);
      if (broken_) return tl::unexpected<Error>(*broken_);
    }
    const CurrentContext current(*driver_, context_);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the engine hands its stream over as a number.
    Result<Event> event = events_->record(reinterpret_cast<cuda::Stream>(queue));
    if (!event) return fail(Errc::kInternal, "{}", event.error().detail);
    return event;
  }

  Result<void> submit(Batch&& batch) {
    if (forked()) return fail(Errc::kGone, "the copy thread belongs to the parent process");
    {
      const std::lock_guard lock(mutex_);
      if (broken_) return tl::unexpected<Error>(*broken_);
      if (!attached_) return fail(Errc::kGone, "the device is not attached to a pool");
      const auto peer = peers_.find(batch.peer);
      std::optional<std::uint64_t> peer_blocks;
      if (peer != peers_.end()) peer_blocks = peer->second->block_count();
      PEGA_TRY(device::check_batch(batch, layouts_, pool_bytes_, peer_blocks));
      const bool counts = !is_mark(batch);
      std::size_t& count = counts_[static_cast<std::size_t>(batch.direction)];
      if (counts && count >= options_.max_batches) {
        return fail(Errc::kBusy, "{} batches are queued already", count);
      }
      if (counts) ++count;
      ++jobs_;
      Job& job = incoming_.emplace_back();
      job.awaits_event = !counts;
      if (peer != peers_.end()) job.peer = peer->second.get();
      job.batch = std::move(batch);
    }
    work_.notify_all();
    return {};
  }

  void cancel(std::uint64_t ticket) {
    if (forked()) return;
    {
      const std::lock_guard lock(mutex_);
      if (jobs_ == 0) return;
      cancelled_.push_back(ticket);
    }
    work_.notify_all();
  }

  Result<bool> complete_early(std::uint64_t ticket, Queue queue, Duration within) {
    if (forked()) return false;
    Event last = Event::kNow;
    {
      const std::lock_guard lock(mutex_);
      const auto queued =
          std::find_if(queued_.begin(), queued_.end(),
                       [ticket](const Queued& load) { return load.ticket == ticket; });
      if (queued == queued_.end() || queued->expected_end - clock_.now() > within) return false;
      last = queued->last;
    }
    const CurrentContext current(*driver_, context_);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): as in record_event().
    Result<void> waits = events_->wait(reinterpret_cast<cuda::Stream>(queue), last);
    if (waits) return true;
    if (waits.error().code == Errc::kGone) return false;
    return fail(Errc::kInternal, "{}", waits.error().detail);
  }

  [[nodiscard]] Info info() const {
    const std::lock_guard lock(mutex_);
    return info_;
  }

  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }
  [[nodiscard]] const std::shared_ptr<cuda::Gpu>& gpu() const noexcept { return gpu_; }

 private:
  /// A batch; bound to the copy thread once it has taken it out of incoming_.
  struct Job {
    Batch batch;
    std::size_t copy = 0;     ///< The first page that is not completely queued,
    std::uint32_t piece = 0;  ///< and its first piece that is not.
    std::size_t copied = 0;   ///< Complete pages, counted from the first.
    std::size_t flights = 0;
    bool awaits_event = false;                ///< It has no copies, and ends with its event.
    const cuda::PeerMapping* peer = nullptr;  ///< Where its pages are; null: in the pool.
    std::optional<Error> gave_up;
    std::vector<std::uint64_t> checksums;

    [[nodiscard]] bool has_work() const {
      return !gave_up && (awaits_event || copy < batch.copies.size());
    }
    [[nodiscard]] bool has_ended() const { return !has_work() && flights == 0; }
  };

  using Peers = std::map<std::uint64_t, std::unique_ptr<cuda::PeerMapping>>;

  /// A load whose copies are all queued on the device.
  struct Queued {
    std::uint64_t ticket = 0;
    Event last = Event::kNow;  ///< Recorded after its last copy.
    TimePoint expected_end{};
  };

  // ---- start

  Result<void> open() {
    Driver& driver = *driver_;
    PEGA_TRY_LET(gpu_, cuda::Gpu::open(driver_, options_.ordinal));
    context_ = gpu_->context();
    const CurrentContext current(driver, context_);
    PEGA_TRY(cuda::check(driver, current.status(), "use the engine's CUDA context"));
    PEGA_TRY_LET(const int multiprocessors, describe());
    PEGA_TRY(load_kernels());
    int least = 0;
    int greatest = 0;
    PEGA_TRY(
        cuda::check(driver, driver.priority_range(least, greatest), "get the range of priorities"));
    for (const Direction direction : {Direction::kSave, Direction::kLoad}) {
      const CopyStream::Options copy_stream{
          .direction = direction,
          .kernel_priority = options_.low_priority ? least : greatest,
          .kernel_blocks = options_.kernel_blocks != 0 ? options_.kernel_blocks
                                                       : static_cast<unsigned>(multiprocessors),
          .pull_blocks = options_.pull_blocks,
          .staging_bytes = options_.staging_bytes,
          .ahead_bytes = direction == Direction::kLoad
                             ? std::max(options_.ahead_bytes, options_.staging_bytes)
                             : options_.staging_bytes,
          .slice_bytes = options_.slice_bytes};
      PEGA_TRY_LET(copy_stream_of(direction), CopyStream::create(driver_, copy_stream, kernels_));
    }
    events_ = std::make_unique<cuda::EventRing>(driver_, options_.max_events);
    return {};
  }

  Result<int> describe() {
    int multiprocessors = 0;
    int major = 0;
    int minor = 0;
    Driver& driver = *driver_;
    const int ordinal = options_.ordinal;
    PEGA_TRY(cuda::check(driver, driver.device_name(ordinal, info_.name), "get the GPU's name"));
    using cuda::Attribute;
    for (const auto& [which, value] : {std::pair{Attribute::kMultiprocessors, &multiprocessors},
                                       {Attribute::kComputeMajor, &major},
                                       {Attribute::kComputeMinor, &minor}}) {
      PEGA_TRY(cuda::check(driver, driver.attribute(ordinal, which, *value),
                           "get the GPU's attributes"));
    }
    info_.name += fmt::format(", compute capability {}.{}", major, minor);
    return multiprocessors;
  }

  Result<void> load_kernels() {
    const std::span<const std::byte> image = cuda::kernel_image();
    if (image.empty()) {
      kLog.warn(
          "built without CUDA kernels: small segments are copied one by one, which is slow, and "
          "pages get no checksums");
      return {};
    }
    Driver& driver = *driver_;
    PEGA_TRY(cuda::check(driver, driver.load_module(image.data(), module_),
                         fmt::format("load our kernels on {}", info_.name)));
    PEGA_TRY_LET(kernels_, cuda::find_kernels(driver, module_));
    info_.kernels = true;
    return {};
  }

  // ---- the copy thread

  std::unique_ptr<CopyStream>& copy_stream_of(Direction direction) {
    return copy_streams_[static_cast<std::size_t>(direction)];
  }
  std::list<Job>& jobs_of(Direction direction) {
    return queues_[static_cast<std::size_t>(direction)];
  }

  void run() {
    const ThrowOnAssert throw_on_assert;
    const CurrentContext current(*driver_, context_);
    std::unique_lock lock(mutex_);
    for (;;) {
      take_mail();
      if (stopping_ && jobs_ == 0) return;
      lock.unlock();
      bool moved = false;
      try {
        if (Result<bool> step = take_step()) {
          moved = *step;
        } else {
          retire(step.error());
        }
      } catch (const BrokenInvariant& mistake) {
        retire({Errc::kInternal, mistake.what()});
      }
      moved = report_ended() || moved;
      lock.lock();
      if (!moved && !has_mail()) wait(lock);
    }
  }

  [[nodiscard]] bool has_mail() const {
    return !incoming_.empty() || !cancelled_.empty() || (stopping_ && jobs_ == 0) ||
           (cancel_all_ && !all_given_up_);
  }

  /// Under the mutex.
  void take_mail() {
    while (!incoming_.empty()) {
      Job& job = incoming_.front();
      const bool wants_checksums = std::any_of(job.batch.copies.begin(), job.batch.copies.end(),
                                               [](const Copy& copy) { return copy.checksum; });
      if (wants_checksums) job.checksums.resize(job.batch.copies.size(), kNoChecksum);
      std::list<Job>& queue = jobs_of(job.batch.direction);
      queue.splice(queue.end(), incoming_, incoming_.begin());
      all_given_up_ = false;
    }
    for (const Direction direction : {Direction::kLoad, Direction::kSave}) {
      for (Job& job : jobs_of(direction)) {
        const bool named =
            std::find(cancelled_.begin(), cancelled_.end(), job.batch.ticket) != cancelled_.end();
        if ((named || cancel_all_) && job.has_work()) {
          job.gave_up = Error{Errc::kCancelled, "cancelled"};
        }
      }
    }
    cancelled_.clear();
    all_given_up_ = cancel_all_;
  }

  /// Takes ended flights and queues more. Returns whether anything changed.
  Result<bool> take_step() {
    bool moved = false;
    if (broken_here_) return moved;
    for (const Direction direction : {Direction::kLoad, Direction::kSave}) {
      CopyStream& copy_stream = *copy_stream_of(direction);
      for (;;) {
        PEGA_TRY_LET(const std::optional<CopyStream::Flight> flight, copy_stream.take_ended());
        if (!flight) break;
        note_ended(direction, *flight);
        moved = true;
      }
      PEGA_TRY_LET(const bool queued, queue_more(direction, copy_stream));
      moved = moved || queued;
    }
    return moved;
  }

  void note_ended(Direction direction, const CopyStream::Flight& flight) {
    std::list<Job>& queue = jobs_of(direction);
    const auto job = std::find_if(queue.begin(), queue.end(), [&](const Job& candidate) {
      return candidate.flights != 0 && candidate.batch.ticket == flight.ticket;
    });
    PEGA_ASSERT(job != queue.end(), "completion for unknown batch {}", flight.ticket);
    --job->flights;
    const Slice& slice = flight.slice;
    if (slice.ends_pages) job->copied = slice.first_copy + slice.copies;
    for (std::size_t i = 0; i < flight.hashes.size(); ++i) {
      const std::size_t copy = slice.first_copy + i;
      if (!job->batch.copies[copy].checksum) continue;
      // As PageChecksum: the value that means "none" becomes 1.
      job->checksums[copy] = flight.hashes[i] == kNoChecksum ? 1 : flight.hashes[i];
    }
  }

  Result<bool> queue_more(Direction direction, CopyStream& copy_stream) {
    bool moved = false;
    // First of all: the copies end as soon as no more of them fit.
    for (Job& job : jobs_of(direction)) {
      if (!job.awaits_event) continue;
      PEGA_TRY_LET(const bool ended, look_at_event(job));
      moved = moved || ended;
    }
    for (Job& job : jobs_of(direction)) {
      while (!job.awaits_event && job.has_work()) {
        const bool first = job.copy == 0 && job.piece == 0;
        if (first && !events_->has(job.batch.after)) {
          job.gave_up = Error{Errc::kGone, "the event it waits for was reused"};
          break;
        }
        // Streams keep their order, so the whole batch waits for the events of its first slice.
        const auto wait = [&](cuda::Stream stream) -> Result<void> {
          return first ? events_->wait(stream, job.batch.after) : Result<void>();
        };
        PEGA_TRY_LET(const std::optional<Slice> slice,
                     copy_stream.queue(plans_[job.batch.layout], job.batch.ticket, job.batch.copies,
                                       job.copy, job.piece, wait, job.peer));
        if (!slice) return moved;
        moved = true;
        ++job.flights;
        job.copy = slice->ends_pages ? slice->first_copy + slice->copies : slice->first_copy;
        job.piece = slice->ends_pages ? 0 : slice->first_piece + slice->pieces;
        if (!job.has_work() && direction == Direction::kLoad && job.checksums.empty()) {
          PEGA_TRY_LET(const Event last, events_->record(copy_stream.last_stream()));
          const std::lock_guard lock(mutex_);
          queued_.push_back({job.batch.ticket, last, copy_stream.expected_last_end()});
        }
      }
    }
    return moved;
  }

  /// Whether the event that the batch awaits is over, or was reused.
  Result<bool> look_at_event(Job& job) {
    if (!job.has_work()) return false;
    Result<bool> over = events_->is_over(job.batch.after);
    if (!over && over.error().code == Errc::kGone) {
      job.gave_up = std::move(over.error());
      return true;
    }
    if (!over) return over;
    job.awaits_event = !*over;
    return over;
  }

  /// Reports the batches that have ended. Returns whether there were any.
  bool report_ended() {
    bool any = false;
    for (const Direction direction : {Direction::kLoad, Direction::kSave}) {
      std::list<Job>& queue = jobs_of(direction);
      for (auto job = queue.begin(); job != queue.end();) {
        const auto next = std::next(job);
        if (job->has_ended()) {
          report(*job);
          queue.erase(job);
          any = true;
        }
        job = next;
      }
    }
    return any;
  }

  void report(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(queued_, [&](const Queued& load) { return load.ticket == job.batch.ticket; });
      // Before the report, whose receiver may submit the next batch at once.
      if (!is_mark(job.batch)) --counts_[static_cast<std::size_t>(job.batch.direction)];
    }
    if (job.peer != nullptr && has_process_ended(job.peer->process())) {
      job.copied = 0;
      job.gave_up = Error{Errc::kGone, "the process whose memory was read has ended"};
    }
    Completion completion{job.batch.ticket, job.copied, std::move(job.gave_up),
                          std::move(job.checksums)};
    const std::size_t pages = job.batch.copies.size();
    if (completion.error && completion.error->code == Errc::kCancelled) {
      completion.error->detail = fmt::format("cancelled after {} of {} pages", job.copied, pages);
    }
    sink_(std::move(completion));  // Set while jobs_ is not 0.
    const std::lock_guard lock(mutex_);
    if (--jobs_ == 0) idle_.notify_all();
  }

  /// Stops all copying. The copies in flight have ended when it returns.
  void retire(const Error& error) {
    kLog.error("copies are disabled on this GPU gpu=\"{}\" error=\"{}\"", info_.name,
               to_string(error));
    for (const std::unique_ptr<CopyStream>& copy_stream : copy_streams_) copy_stream->drain();
    broken_here_ = true;
    Error reported{Errc::kInternal, "copies are disabled on this GPU: " + error.detail};
    const std::lock_guard lock(mutex_);
    queued_.clear();
    for (std::list<Job>& queue : queues_) {
      for (Job& job : queue) {
        job.flights = 0;
        job.gave_up = reported;
      }
    }
    for (Job& job : incoming_) job.gave_up = reported;
    broken_ = std::move(reported);
  }

  void wait(std::unique_lock<std::mutex>& lock) {
    const auto has_work = [this] { return has_mail(); };
    std::optional<TimePoint> expected;
    bool last = false;  // The engine may be waiting for this flight alone.
    for (const std::unique_ptr<CopyStream>& copy_stream : copy_streams_) {
      if (copy_stream->flights() == 0 || (expected && *expected <= copy_stream->expected_end()))
        continue;
      expected = copy_stream->expected_end();
      last = copy_stream->flights() == 1;
    }
    const bool looks_at_event = awaits_event();
    const Duration longest = looks_at_event ? kEventPoll : kLongestSleep;
    if (!expected) {
      looks_at_event ? void(work_.wait_for(lock, longest, has_work)) : work_.wait(lock, has_work);
      return;
    }
    const TimePoint now = clock_.now();
    const Duration late = now - *expected;
    if (late < -kSpin) {
      const Duration left = -late - kSpin;
      work_.wait_for(lock, looks_at_event ? std::min(left, longest) : left, has_work);
    } else if (last && late < kPatience) {
      lock.unlock();
      for (int i = 0; i < 64; ++i) cpu_relax();
      lock.lock();
    } else {
      work_.wait_for(lock, std::clamp<Duration>(late / 32, kShortestSleep, longest), has_work);
    }
  }

  [[nodiscard]] bool awaits_event() const {
    return std::ranges::any_of(queues_, [](const std::list<Job>& queue) {
      return std::ranges::any_of(queue,
                                 [](const Job& job) { return job.awaits_event && job.has_work(); });
    });
  }

  const Options options_;
  const std::shared_ptr<Driver> driver_;
  const pid_t pid_ = ::getpid();
  SteadyClock clock_;

  // Created before the thread starts.
  std::shared_ptr<cuda::Gpu> gpu_;
  cuda::Context context_ = nullptr;  ///< That of gpu_.
  cuda::Module module_ = nullptr;
  cuda::Kernels kernels_;
  std::unique_ptr<CopyStream> copy_streams_[kDirectionCount];  ///< By direction.
  std::unique_ptr<cuda::EventRing> events_;
  std::thread thread_;

  std::mutex attach_mutex_;  ///< Taken before mutex_.
  mutable std::mutex mutex_;
  std::condition_variable work_;  ///< has_mail() may be true now.
  std::condition_variable idle_;  ///< jobs_ became 0.
  // Changed only while jobs_ is 0, so the copy thread, which has a job, may read them.
  std::vector<cuda::Attached> plans_;  ///< By layout.
  PoolRegistration registration_;
  CompletionSink sink_;
  std::vector<PageLayout> layouts_;
  std::uint64_t pool_bytes_ = 0;

  // Under mutex_.
  Peers peers_;
  Info info_;
  bool attached_ = false;
  bool stopping_ = false;
  bool cancel_all_ = false;
  bool all_given_up_ = false;
  std::optional<Error> broken_;
  std::size_t jobs_ = 0;                      ///< Accepted, until the sink has returned.
  std::size_t counts_[kDirectionCount] = {};  ///< With copies, until the report, by direction.
  std::list<Job> incoming_;
  std::vector<std::uint64_t> cancelled_;
  std::vector<Queued> queued_;

  // The copy thread's.
  std::list<Job> queues_[kDirectionCount];  ///< By direction, oldest first.
  bool broken_here_ = false;
};

Result<std::unique_ptr<CudaDevice>> CudaDevice::create(const Options& options,
                                                       std::shared_ptr<cuda::Driver> driver) {
  const bool power_of_two =
      options.register_bytes != 0 && (options.register_bytes & (options.register_bytes - 1)) == 0;
  if (driver == nullptr || options.slice_bytes < (64 << 10) ||
      options.staging_bytes < options.slice_bytes || options.max_batches == 0 ||
      options.max_events == 0 || !power_of_two || options.register_bytes < kSlotAlignment ||
      options.register_threads == 0) {
    return fail(Errc::kInvalidArgument,
                "a GPU device with a driver {}, slices of {} bytes (64 KiB or more), staging of {} "
                "(a slice or more), {} batches and {} events (1 or more), and ranges of {} bytes "
                "(a power of two) registered by {} threads",
                driver != nullptr, options.slice_bytes, options.staging_bytes, options.max_batches,
                options.max_events, options.register_bytes, options.register_threads);
  }
  auto impl = std::make_unique<Impl>(options, std::move(driver));
  PEGA_TRY(impl->start());
  return std::unique_ptr<CudaDevice>(new CudaDevice(std::move(impl)));
}

CudaDevice::CudaDevice(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaDevice::~CudaDevice() {
  // In a child the thread is missing, and CUDA does not work: the process's end releases
  // everything.
  if (impl_->forked()) static_cast<void>(impl_.release());
}

Result<void> CudaDevice::attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                CompletionSink sink) {
  return impl_->attach(layouts, pool, std::move(sink));
}
void CudaDevice::detach() { impl_->detach(); }
Result<PeerMemory> CudaDevice::share(const PageLayout& layout, std::span<std::byte> /*guards*/) {
  return impl_->share(layout);
}
Result<void> CudaDevice::add_peer(std::uint64_t peer, const PeerMemory& memory) {
  return impl_->add_peer(peer, memory);
}
void CudaDevice::remove_peer(std::uint64_t peer) { impl_->remove_peer(peer); }
Result<Device::Event> CudaDevice::record_event(Queue queue) { return impl_->record_event(queue); }
Result<void> CudaDevice::submit(Batch batch) { return impl_->submit(std::move(batch)); }
void CudaDevice::cancel(std::uint64_t ticket) { impl_->cancel(ticket); }
Result<bool> CudaDevice::complete_early(std::uint64_t ticket, Queue queue, Duration within) {
  return impl_->complete_early(ticket, queue, within);
}
bool CudaDevice::has_kernels() noexcept { return !cuda::kernel_image().empty(); }

CudaDevice::Info CudaDevice::info() const { return impl_->info(); }
const std::shared_ptr<cuda::Gpu>& CudaDevice::gpu() const noexcept { return impl_->gpu(); }

}  // namespace pegaflow
