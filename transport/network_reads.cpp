#include "transport/network_reads.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include <poll.h>

#include "base/assert.h"
#include "base/os/thread.h"
#include "transport/fabric_checks.h"

namespace pegaflow::network {

/// A read in flight. One step of it is posted at a time.
struct Reads::Job {
  Read read;
  std::size_t page_chunks = 0;
  std::vector<std::uint32_t> words;   ///< The distinct guards, in ascending order,
  std::vector<std::uint64_t> values;  ///< and the values of the first of them.
  std::size_t place = 0;              ///< Its number in words_.
  std::set<std::uint64_t> posted;     ///< Tickets at the fabric that are not quiesced.
  std::optional<Error> error;         ///< Why the first chunk of the pages that failed did,
  std::size_t failed = 0;             ///< and which it is.
  bool reads_guards = false;          ///< The step that is posted.
  bool pages_ended = false;
  bool gives_up_guards = false;

  void fail_at(std::size_t chunk, Error why) {
    if (error && failed <= chunk) return;
    failed = chunk;
    error = std::move(why);
  }
  [[nodiscard]] bool wants_guards() const {
    return !error && !gives_up_guards && values.size() < words.size();
  }
};

Result<std::unique_ptr<Reads>> Reads::create(const Options& options, const MakeFabric& make,
                                             const Clock& clock) {
  PEGA_TRY(within<std::size_t>("the number of reads in flight", options.max_reads, 1, kMostPosted));
  if (options.patience <= Duration::zero()) {
    return fail(Errc::kInvalidArgument, "a patience of {} ns", options.patience.count());
  }
  std::unique_ptr<Reads> reads(new Reads(options, clock));
  PEGA_TRY_LET(reads->fabric_, make([&reads = *reads](Fabric::Completion&& completion) {
                 // A batch has two completions at most, and the mailbox has room for those of all.
                 const bool sent = reads.mailbox_.try_send(std::move(completion));
                 PEGA_ASSERT(sent, "more completions than those of {} batches", kMostPosted);
               }));
  PEGA_TRY_LET(reads->words_region_,
               reads->fabric_->register_region(std::as_writable_bytes(std::span(reads->words_))));
  PEGA_TRY_LET(reads->thread_, start_thread("pega-network", [&reads = *reads] { reads.run(); }));
  return reads;
}

Reads::Reads(const Options& options, const Clock& clock)
    : options_(options),
      clock_(clock),
      mailbox_(2 * kMostPosted),
      words_(options.max_reads * kRoundWords) {
  for (std::size_t place = options.max_reads; place > 0; --place) free_places_.push_back(place - 1);
}

Reads::~Reads() {
  cancel_all();
  wait_until_idle();
  fabric_.reset();
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);  // Pairs with the load in run().
  wake_.signal();
  thread_.join();
}

// ---- callers

Result<void> Reads::start(Read read) {
  const std::lock_guard lock(mutex_);
  if (free_places_.empty()) {
    return fail(Errc::kBusy, "{} reads from other hosts are in flight", options_.max_reads);
  }
  Job& job = jobs_.emplace_back();
  job.page_chunks = read.pages.chunks.size();
  job.pages_ended = job.page_chunks == 0;
  job.words = read.guards;
  std::ranges::sort(job.words);
  job.words.erase(std::unique(job.words.begin(), job.words.end()), job.words.end());
  job.read = std::move(read);
  job.place = free_places_.back();

  const bool begins_with_guards = job.wants_guards() && (job.pages_ended || options_.guards_first);
  Result<void> posted = begins_with_guards ? post_guards(job) : post_pages(job);
  if (!posted) {
    jobs_.pop_back();
    return posted;
  }
  free_places_.pop_back();
  ++active_;
  if (job.posted.empty()) {
    end(job);
    wake_.signal();
  }
  return {};
}

bool Reads::cancel(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find(jobs_, ticket, [](const Job& job) { return job.read.ticket; });
  if (found == jobs_.end()) return false;
  cancel(*found);
  return true;
}

void Reads::cancel_all() {
  const std::lock_guard lock(mutex_);
  for (Job& job : jobs_) cancel(job);
}

void Reads::cancel(Job& job) {
  // Its pages may have arrived already: then only the guards are missing.
  job.gives_up_guards = true;
  // A fabric that is too busy for it ends the step at its deadline.
  for (const std::uint64_t ticket : job.posted) static_cast<void>(fabric_->cancel(ticket));
}

void Reads::wait_until_idle() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return active_ == 0; });
}

// ---- steps, under the mutex

Result<void> Reads::post(Job& job, std::vector<Fabric::Chunk> chunks, std::size_t first_chunk) {
  if (posted_.size() >= kMostPosted) {
    return fail(Errc::kBusy, "{} reads are posted at the network", posted_.size());
  }
  const std::uint64_t ticket = ++last_ticket_;
  PEGA_TRY(fabric_->read({.ticket = ticket,
                          .peer = job.read.peer,
                          .priority = Fabric::Priority::kForeground,
                          .deadline = clock_.now() + options_.patience,
                          .chunks = std::move(chunks)}));
  // Its completion is in the mailbox, whose owner waits for the mutex.
  posted_.emplace(ticket, Posted{&job, first_chunk});
  job.posted.insert(ticket);
  return {};
}

Result<void> Reads::post_pages(Job& job) {
  job.reads_guards = false;
  std::vector<Fabric::Chunk> chunks = std::exchange(job.read.pages.chunks, {});
  if (chunks.empty()) return {};
  if (chunks.size() <= kPartChunks) return post(job, std::move(chunks), 0);
  for (std::size_t first = 0; first < chunks.size(); first += kPartChunks) {
    const std::span part =
        std::span(chunks).subspan(first, std::min(kPartChunks, chunks.size() - first));
    Result<void> posted = post(job, {part.begin(), part.end()}, first);
    if (posted) continue;
    if (first == 0) return posted;
    // The earlier parts continue, and their pages count.
    job.fail_at(first, std::move(posted.error()));
    break;
  }
  return {};
}

Result<void> Reads::post_guards(Job& job) {
  job.reads_guards = true;
  const std::span left = std::span(job.words).subspan(job.values.size());
  std::vector<Fabric::Chunk> chunks;
  std::uint64_t offset = job.place * kRoundWords * kGuardBytes;
  for (const std::uint32_t word : left.first(std::min(left.size(), kRoundWords))) {
    append(chunks, {.remote_region = job.read.guard_region,
                    .remote_offset = word * kGuardBytes,
                    .local_region = words_region_,
                    .local_offset = offset,
                    .size_bytes = kGuardBytes});
    offset += kGuardBytes;
  }
  return post(job, std::move(chunks), 0);
}

void Reads::on_completion(Fabric::Completion&& completion) {
  const std::lock_guard lock(mutex_);
  const auto found = posted_.find(completion.ticket);
  PEGA_ASSERT(found != posted_.end(), "a completion of unknown batch {}", completion.ticket);
  Job& job = *found->second.job;
  const auto bad =
      std::ranges::find_if(completion.chunks, [](const auto& chunk) { return chunk.has_value(); });
  if (bad != completion.chunks.end()) {
    if (job.reads_guards) {
      job.gives_up_guards = true;
    } else {
      const auto chunk = static_cast<std::size_t>(bad - completion.chunks.begin());
      job.fail_at(found->second.first_chunk + chunk, {**bad, std::move(completion.detail)});
    }
  }
  if (!completion.quiesced) return;
  posted_.erase(found);
  job.posted.erase(completion.ticket);
  if (job.posted.empty()) begin_next_step(job);
}

/// Called when all that was posted for the job is quiesced. So no byte of the pages arrives after
/// the guards are posted.
void Reads::begin_next_step(Job& job) {
  if (job.reads_guards) {
    take_guards(job);
  } else {
    job.pages_ended = true;
  }
  if (!job.pages_ended && !(options_.guards_first && job.wants_guards())) {
    Result<void> posted = post_pages(job);
    if (!posted) job.fail_at(0, std::move(posted.error()));
  } else if (job.wants_guards() && !post_guards(job)) {
    job.gives_up_guards = true;
  }
  if (job.posted.empty()) end(job);
}

void Reads::take_guards(Job& job) {
  if (job.gives_up_guards) return;
  const std::size_t count = std::min(job.words.size() - job.values.size(), kRoundWords);
  const auto first = words_.begin() + static_cast<std::ptrdiff_t>(job.place * kRoundWords);
  job.values.insert(job.values.end(), first, first + static_cast<std::ptrdiff_t>(count));
}

void Reads::end(Job& job) {
  const std::vector<std::size_t>& last_chunks = job.read.pages.last_chunks;
  Ended ended{.completion = {.ticket = job.read.ticket,
                             .copied = last_chunks.size(),
                             .error = {},
                             .checksums = {},
                             .guards = {}},
              .sink = std::move(job.read.sink)};
  Device::Completion& completion = ended.completion;
  if (job.error) {
    completion.copied = static_cast<std::size_t>(std::ranges::lower_bound(last_chunks, job.failed) -
                                                 last_chunks.begin());
    completion.error = Error{job.error->code,
                             fmt::format("{} of {} pages were read from another host: {}",
                                         completion.copied, last_chunks.size(), job.error->detail)};
  } else if (job.values.size() == job.words.size()) {
    completion.guards.reserve(job.read.guards.size());
    for (const std::uint32_t guard : job.read.guards) {
      const auto word = std::ranges::lower_bound(job.words, guard) - job.words.begin();
      completion.guards.push_back(job.values[static_cast<std::size_t>(word)]);
    }
  }
  // Before the report, whose receiver may submit the next batch at once.
  free_places_.push_back(job.place);
  jobs_.remove_if([&job](const Job& other) { return &other == &job; });
  ended_.push_back(std::move(ended));
}

// ---- the thread

void Reads::run() {
  pollfd watched[] = {{mailbox_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
  // Pairs with the store in the destructor.
  while (!stop_.load(std::memory_order_acquire)) {
    ::poll(watched, std::size(watched), -1);
    wake_.clear();
    mailbox_.drain(
        [this](Fabric::Completion&& completion) { on_completion(std::move(completion)); });
    report();
  }
}

void Reads::show(Device::Completion& completion) const {
  Result<void> shown = options_.show_bytes();
  if (shown) return;
  completion.copied = 0;
  completion.guards.clear();
  completion.error = std::move(shown.error());
}

/// Reports the reads that have ended by now. The completions of the fabric were taken before.
void Reads::report() {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(ended_);
  }
  for (Ended& one : ended) {
    if (options_.show_bytes && one.completion.copied > 0) show(one.completion);
    (*one.sink)(std::move(one.completion));
    const std::lock_guard lock(mutex_);
    if (--active_ == 0) idle_.notify_all();
  }
}

}  // namespace pegaflow::network
