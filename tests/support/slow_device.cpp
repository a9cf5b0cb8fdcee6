#include "tests/support/slow_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/device_checks.h"
#include "transport/host/page_copy.h"

namespace pegaflow::testing {

SlowDevice::SlowDevice() : thread_([this] { run(); }) {}

SlowDevice::~SlowDevice() {
  allow_all();
  detach();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SlowDevice::hold() {
  const std::lock_guard lock(mutex_);
  holding_ = true;
  allowed_ = 0;
}

void SlowDevice::allow_pages(std::size_t more) {
  const std::lock_guard lock(mutex_);
  allowed_ += more;
  changed_.notify_all();
}

void SlowDevice::allow_all() {
  const std::lock_guard lock(mutex_);
  holding_ = false;
  changed_.notify_all();
}

void SlowDevice::fail_page(std::size_t n) {
  const std::lock_guard lock(mutex_);
  fail_page_ = n;
}

void SlowDevice::fail_next_attach(Error error) {
  const std::lock_guard lock(mutex_);
  fail_attach_ = std::move(error);
}

void SlowDevice::fail_next_submit(Error error) {
  const std::lock_guard lock(mutex_);
  fail_submit_ = std::move(error);
}

void SlowDevice::fail_events(Error error) {
  const std::lock_guard lock(mutex_);
  fail_events_ = std::move(error);
}

void SlowDevice::allow_early_completion() {
  const std::lock_guard lock(mutex_);
  may_complete_early_ = true;
}
void SlowDevice::allow_early_completion_of_queued() {
  const std::lock_guard lock(mutex_);
  may_complete_queued_ = true;
}
Result<bool> SlowDevice::complete_early(std::uint64_t ticket, Queue /*queue*/,
                                        Duration /*within*/) {
  const std::lock_guard lock(mutex_);
  const bool queued = std::any_of(queue_.begin(), queue_.end(),
                                  [&](const Batch& batch) { return batch.ticket == ticket; });
  if (!(may_complete_early_ && load_ == ticket) && !(may_complete_queued_ && queued)) return false;
  promised_.insert(ticket);
  return true;
}
void SlowDevice::complete_next_twice() {
  const std::lock_guard lock(mutex_);
  complete_twice_ = true;
}

bool SlowDevice::wait_held(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [this] { return page_waits_; });
}

bool SlowDevice::wait_copied(std::size_t pages, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return copied_ >= pages; });
}

bool SlowDevice::wait_detaching(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [this] { return detaching_ || !attached_; });
}

bool SlowDevice::wait_cancels(std::size_t calls, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return cancels_ >= calls; });
}

std::size_t SlowDevice::batches() const {
  const std::lock_guard lock(mutex_);
  return batches_;
}

std::size_t SlowDevice::peers() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

std::size_t SlowDevice::attaches() const {
  const std::lock_guard lock(mutex_);
  return attaches_;
}

Result<void> SlowDevice::attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                CompletionSink sink) {
  const std::lock_guard lock(mutex_);
  if (fail_attach_) return tl::unexpected<Error>(*std::exchange(fail_attach_, std::nullopt));
  if (attached_) return fail(Errc::kInvalidArgument, "attached already");
  layouts_.assign(layouts.begin(), layouts.end());
  pool_ = pool;
  sink_ = std::move(sink);
  attached_ = true;
  ++attaches_;
  changed_.notify_all();
  return {};
}

void SlowDevice::detach() {
  std::unique_lock lock(mutex_);
  detaching_ = attached_;
  attached_ = false;
  for (const Batch& batch : queue_) cancelled_.insert(batch.ticket);
  changed_.notify_all();
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  detaching_ = false;
  if (!attached_) peers_.clear();
}

Result<void> SlowDevice::add_peer(std::uint64_t peer, const PeerMemory& memory) {
  const std::lock_guard lock(mutex_);
  if (!attached_) return fail(Errc::kGone, "not attached");
  if (peer == 0 || peers_.contains(peer)) return fail(Errc::kInvalidArgument, "peer {}", peer);
  PEGA_TRY_LET(PeerReader reader, PeerReader::open(memory, layouts_.front()));
  peers_.emplace(peer, std::move(reader));
  return {};
}

void SlowDevice::remove_peer(std::uint64_t peer) {
  const std::lock_guard lock(mutex_);
  peers_.erase(peer);
}

Result<Device::Event> SlowDevice::record_event(Queue /*queue*/) {
  const std::lock_guard lock(mutex_);
  if (fail_events_) return tl::unexpected<Error>(*fail_events_);
  return Event::kNow;
}

Result<void> SlowDevice::submit(Batch batch) {
  const std::lock_guard lock(mutex_);
  if (fail_submit_) return tl::unexpected<Error>(*std::exchange(fail_submit_, std::nullopt));
  if (!attached_) return fail(Errc::kGone, "not attached");
  const auto peer = peers_.find(batch.peer);
  const auto peer_blocks = peer == peers_.end() ? std::optional<std::uint64_t>()
                                                : std::optional(peer->second.block_count());
  PEGA_TRY(device::check_batch(batch, layouts_, pool_.size(), peer_blocks));
  ++batches_;
  const auto place = batch.direction == Direction::kSave
                         ? queue_.end()
                         : std::find_if(queue_.begin(), queue_.end(), [](const Batch& queued) {
                             return queued.direction == Direction::kSave;
                           });
  queue_.insert(place, std::move(batch));
  changed_.notify_all();
  return {};
}

void SlowDevice::cancel(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  cancelled_.insert(ticket);
  ++cancels_;
  changed_.notify_all();
}

void SlowDevice::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Batch batch = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    if (batch.direction == Direction::kLoad) load_ = batch.ticket;
    Completion completion = copy(lock, batch);
    load_.reset();
    cancelled_.erase(batch.ticket);
    const bool twice = std::exchange(complete_twice_, false);
    const CompletionSink sink = sink_;
    lock.unlock();
    if (twice) sink(Completion(completion));
    sink(std::move(completion));
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

Result<std::uint64_t> SlowDevice::copy_page(const Batch& batch, const Copy& copy) {
  const PageLayout& layout = layouts_.at(batch.layout);
  PageChecksum checksum;
  if (batch.peer != 0) {
    PeerReader::Outcome outcome = peers_.at(batch.peer).read(layout, std::span(&copy, 1));
    if (outcome.error) return tl::unexpected<Error>(std::move(*outcome.error));
    return checksum_of(layout, copy.block, checksum);
  }
  std::byte* page = pool_.data() + copy.pool_offset;
  for (const Segment& segment : layout.segments()) {
    std::byte* const piece = segment.base + copy.block * segment.block_stride_bytes;
    const bool save = batch.direction == Direction::kSave;
    std::memcpy(save ? page : piece, save ? piece : page, segment.size_bytes);
    checksum.add({piece, segment.size_bytes});
    page += segment.size_bytes;
  }
  return checksum.value();
}

Device::Completion SlowDevice::copy(std::unique_lock<std::mutex>& lock, const Batch& batch) {
  std::vector<std::uint64_t> checksums(batch.copies.size(), kNoChecksum);
  for (std::size_t i = 0; i < batch.copies.size(); ++i) {
    const auto done = [&](Errc code, const char* why) {
      return Completion{batch.ticket, i, Error{code, why}, std::move(checksums)};
    };
    const bool cancelled = !attached_ || cancelled_.contains(batch.ticket);
    if (cancelled && !promised_.contains(batch.ticket)) {
      return done(Errc::kCancelled, "cancelled");
    }
    if (fail_page_ && (*fail_page_)-- == 0) {
      fail_page_.reset();
      return done(Errc::kIo, "this page fails, as injected");
    }
    if (holding_ && allowed_ == 0) {
      page_waits_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !holding_ || allowed_ > 0; });
      page_waits_ = false;
    }
    if (holding_) --allowed_;
    Result<std::uint64_t> checksum = copy_page(batch, batch.copies[i]);
    if (!checksum) return {batch.ticket, i, std::move(checksum.error()), std::move(checksums)};
    if (batch.copies[i].checksum) checksums[i] = *checksum;
    ++copied_;
    changed_.notify_all();
  }
  return {batch.ticket, batch.copies.size(), std::nullopt, std::move(checksums)};
}

}  // namespace pegaflow::testing
