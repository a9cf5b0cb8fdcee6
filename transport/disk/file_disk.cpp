#include "transport/disk/file_disk.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/assert.h"
#include "base/os/thread.h"
#include "transport/disk/checks.h"

namespace pegaflow::disk {
namespace {

/// In addition to requests: cancels and the end.
constexpr std::size_t kOtherCommands = 1024;

/// After hooks have read this much, the thread looks for pieces that have ended: a device is not to
/// be idle because of a hash.
constexpr std::uint64_t kHookedBytes = std::uint64_t{1} << 20;

/// A quarter of the bytes in flight: large reads then cost few wake-ups and system calls, and the
/// device always has a piece to work on. Writes have smaller ones, because reads wait for them.
std::uint64_t read_piece_bytes(const Disk::Limits& limits) {
  return std::max(std::uint64_t{1} << 20,
                  limits.read_bytes / 4 / Disk::kAlignment * Disk::kAlignment);
}

Result<std::unique_ptr<IoEngine>> make_engine(DiskBackend backend,
                                              const IoEngine::Options& options) {
  return backend == DiskBackend::kUring ? make_uring_engine(options) : make_thread_engine(options);
}

}  // namespace

FileDisk::FileDisk(DiskFile file, const DiskOptions& options, CompletionSink sink)
    : limits_(options.limits),
      report_interval_(options.report_interval),
      sink_(std::move(sink)),
      file_(std::move(file)),
      size_bytes_(file_.size_bytes()),
      mailbox_(options.limits.requests + kOtherCommands),
      queue_({.limits = options.limits,
              .read_piece_bytes = read_piece_bytes(options.limits),
              .path = file_.path()}) {}

Result<std::unique_ptr<FileDisk>> FileDisk::start(DiskFile file, const DiskOptions& options,
                                                  DiskBackend backend, std::string reason,
                                                  CompletionSink sink) {
  std::unique_ptr<FileDisk> made(new FileDisk(std::move(file), options, std::move(sink)));
  FileDisk& disk = *made;
  disk.attributes_ = {.path = disk.file_.path(),
                      .backend = backend == DiskBackend::kUring ? "io_uring" : "threads",
                      .reason = std::move(reason),
                      .direct = disk.file_.direct(),
                      .is_new = disk.file_.is_new()};
  const IoEngine::Options engine_options{.fd = disk.file_.fd(),
                                         .wake_fd = disk.mailbox_.fd(),
                                         .threads = options.threads,
                                         .huge_memory = options.huge_memory};
  // A ring belongs to the thread that made it.
  const auto opened = std::make_shared<std::promise<Result<std::uint64_t>>>();
  PEGA_TRY_LET(disk.thread_, start_thread("pega-disk", [&disk, backend, engine_options, opened] {
                 Result<std::unique_ptr<IoEngine>> engine = make_engine(backend, engine_options);
                 if (!engine) {
                   opened->set_value(tl::unexpected<Error>(engine.error()));
                   return;
                 }
                 opened->set_value((*engine)->registered_bytes());
                 disk.run(**engine);
               }));
  Result<std::uint64_t> registered = opened->get_future().get();
  if (!registered) {
    disk.thread_.join();
    return tl::unexpected<Error>(std::move(registered.error()));
  }
  disk.attributes_.registered_bytes = *registered;
  return made;
}

FileDisk::~FileDisk() {
  if (thread_.joinable()) {
    // It may not fail. The thread empties the mailbox in every case, so sending is retried.
    while (!mailbox_.try_send(Command(Stop()))) std::this_thread::yield();
    thread_.join();
  }
  file_.unlock();
}

// ---- callers

Result<void> FileDisk::resize(std::uint64_t size_bytes) {
  if (const std::size_t open = open_requests_.load(std::memory_order_acquire); open != 0) {
    return fail(Errc::kBusy, "resize {}: {} requests are in flight", attributes_.path, open);
  }
  PEGA_TRY(file_.resize(size_bytes));
  size_bytes_.store(file_.size_bytes(), std::memory_order_relaxed);
  return {};
}

Result<void> FileDisk::submit(std::vector<Request> requests) {
  if (requests.empty()) return {};
  const std::uint64_t size = size_bytes();
  for (const Request& request : requests) PEGA_TRY(check(request, size));
  const std::size_t count = requests.size();
  if (open_requests_.fetch_add(count, std::memory_order_relaxed) + count <= limits_.requests &&
      mailbox_.try_send(Command(std::move(requests)))) {
    return {};
  }
  open_requests_.fetch_sub(count, std::memory_order_relaxed);
  return fail(Errc::kBusy, "{}: {} requests more than the limit of {}", attributes_.path, count,
              limits_.requests);
}

Result<void> FileDisk::cancel(std::uint64_t ticket) {
  if (mailbox_.try_send(Command(Cancel{ticket}))) return {};
  return fail(Errc::kBusy, "{}: {} commands are queued", attributes_.path, mailbox_.capacity());
}

Disk::Stats FileDisk::stats() const {
  Stats stats = queue_.stats();
  stats.open_requests = open_requests_.load(std::memory_order_relaxed);
  return stats;
}

// ---- the thread

void FileDisk::run(IoEngine& engine) {
  for (;;) {
    mailbox_.drain([this](Command&& command) { carry_out(std::move(command)); });
    begin_pieces(engine);
    deliver(engine);
    if (stop_ && queue_.is_empty()) return;
    reap(engine, !queue_.has_finished());
  }
}

void FileDisk::carry_out(Command command) {
  const TimePoint now = clock_.now();
  if (auto* const requests = std::get_if<std::vector<Request>>(&command)) {
    for (Request& request : *requests) queue_.accept(std::move(request), now);
  } else if (const auto* const cancel = std::get_if<Cancel>(&command)) {
    queue_.cancel(cancel->ticket, now);
  } else if (std::holds_alternative<Stop>(command)) {
    stop_ = true;
    queue_.cancel_all(now);
  }
}

/// Reads first: the hook of a write runs while the device works on them.
void FileDisk::begin_pieces(IoEngine& engine) {
  for (;;) {
    const TimePoint now = clock_.now();
    while (const std::optional<Piece> piece = queue_.next(now)) engine.begin(*piece);
    if (!queue_.must_prepare(now)) return;
    engine.submit();
    queue_.prepare(now);
  }
}

void FileDisk::reap(IoEngine& engine, bool may_wait) {
  outcomes_.clear();
  if (may_wait) {
    TimePoint next = queue_.next_time();
    if (!held_back_.empty()) next = std::min(next, next_report_);
    engine.wait(next == TimePoint::max() ? Duration::max()
                                         : std::max(next - clock_.now(), Duration::zero()),
                outcomes_);
  } else {
    engine.poll(outcomes_);
  }
  const TimePoint now = clock_.now();
  for (const IoEngine::Outcome& outcome : outcomes_) {
    const Piece& piece = queue_.piece(outcome.piece);
    if (outcome.result >= 0) file_.drop_cache(piece.operation, piece.offset, piece.size_bytes);
    queue_.ended(outcome.piece, outcome.result, now);
  }
}

void FileDisk::deliver(IoEngine& engine) {
  if (queue_.has_finished()) {
    engine.submit();  // The device works while the hooks run; otherwise reap() submits.
    std::uint64_t hooked = 0;
    while (hooked < kHookedBytes) {
      std::optional<IoQueue::Finished> finished = queue_.take_finished();
      if (!finished) break;
      hooked += finished->hooked_bytes;
      report(std::move(*finished));
    }
  }
  if (!held_back_.empty() && !may_hold_back()) pass_on();
}

void FileDisk::report(IoQueue::Finished finished) {
  const bool is_good_read = finished.hooked_bytes != 0 && !finished.completion.error;
  held_back_bytes_ += finished.hooked_bytes;
  held_back_.push_back(std::move(finished.completion));
  if (!is_good_read || !may_hold_back()) pass_on();
}

/// Whether the owner loses nothing if it is informed of these reads together with the next one.
bool FileDisk::may_hold_back() const {
  return held_back_bytes_ < limits_.read_bytes / 4 &&
         (queue_.is_reading() || queue_.has_finished()) && clock_.now() < next_report_;
}

void FileDisk::pass_on() {
  next_report_ = clock_.now() + report_interval_;
  held_back_bytes_ = 0;
  for (Completion& completion : held_back_) {
    // Before the sink: the informed owner may submit the next request. Pairs with resize().
    open_requests_.fetch_sub(1, std::memory_order_release);
    sink_(std::move(completion));
  }
  held_back_.clear();
}

}  // namespace pegaflow::disk
