#include "transport/disk/io_queue.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "transport/disk/checks.h"

namespace pegaflow::disk {
namespace {

/// Beside foreground reads, a write may begin one byte for this many bytes that were read: a tenth
/// of all bytes.
constexpr std::uint64_t kReadsPerWrite = 9;

void add(std::atomic<std::uint64_t>& counter, std::uint64_t by) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

void subtract(std::atomic<std::uint64_t>& counter, std::uint64_t by) {
  counter.store(counter.load(std::memory_order_relaxed) - by, std::memory_order_relaxed);
}

Disk::Stats::Kind snapshot(const IoQueue::Counters::Kind& kind) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  return {.requests = kind.requests.load(kRelaxed),
          .errors = kind.errors.load(kRelaxed),
          .bytes = kind.bytes.load(kRelaxed),
          .bytes_in_flight = kind.bytes_in_flight.load(kRelaxed),
          .bytes_queued = kind.bytes_queued.load(kRelaxed)};
}

}  // namespace

IoQueue::IoQueue(Options options) : options_(std::move(options)), pieces_(options_.pieces) {
  free_pieces_.reserve(pieces_.size());
  for (std::size_t i = pieces_.size(); i > 0; --i) {
    free_pieces_.push_back(static_cast<std::uint32_t>(i - 1));
  }
}

IoQueue::Queue& IoQueue::queue_of(const Disk::Request& request) {
  switch (request.operation) {
    case Disk::Operation::kRead:
      return request.priority == Disk::Priority::kForeground ? foreground_ : background_;
    case Disk::Operation::kWrite:
      return writes_;
    case Disk::Operation::kDurableWrite:
    case Disk::Operation::kFlush:
      break;
  }
  return urgent_;
}

IoQueue::Counters::Kind& IoQueue::counters_of(Disk::Operation operation) {
  return operation == Disk::Operation::kRead ? counters_.reads : counters_.writes;
}

// ---- commands

void IoQueue::accept(Disk::Request request, TimePoint now) {
  std::uint32_t index = 0;
  if (free_entries_.empty()) {
    index = static_cast<std::uint32_t>(entries_.size());
    entries_.emplace_back();
  } else {
    index = free_entries_.back();
    free_entries_.pop_back();
  }
  Entry& entry = entries_[index];
  entry = Entry();
  entry.completion.ticket = request.ticket;
  entry.completion.operation = request.operation;
  entry.size_bytes = bytes_of(request);
  entry.is_prepared = request.hook == nullptr || !is_write(request.operation);
  entry.accepted = now;
  entry.request = std::move(request);
  const bool is_new = by_ticket_.emplace(entry.request.ticket, index).second;
  PEGA_ASSERT(is_new, "disk: ticket {} is in use", entry.request.ticket);
  Queue& queue = queue_of(entry.request);
  if (&queue == &writes_ && queue.empty()) last_write_ = now;
  queue.push_back(index);
  add(counters_of(entry.request.operation).bytes_queued, entry.size_bytes);
}

void IoQueue::cancel(std::uint64_t ticket, TimePoint now) {
  const auto found = by_ticket_.find(ticket);
  if (found != by_ticket_.end()) withdraw_as_cancelled(found->second, now);
}

void IoQueue::cancel_all(TimePoint now) {
  for (const Queue* const queue : {&urgent_, &foreground_, &background_, &writes_}) {
    const Queue waiting = *queue;
    for (const std::uint32_t index : waiting) withdraw_as_cancelled(index, now);
  }
}

void IoQueue::withdraw_as_cancelled(std::uint32_t index, TimePoint now) {
  Entry& entry = entries_[index];
  if (!entry.is_queued) return;
  withdraw(index);
  entry.completion.error =
      Error{Errc::kCancelled, fmt::format("{} {} of {}: cancelled after {} of {} bytes",
                                          to_string(entry.request.operation), entry.request.ticket,
                                          options_.path, entry.begun_bytes, entry.size_bytes)};
  if (!entry.has_begun) entry.begun = entry.last_end = now;
  finish_if_done(index);
}

void IoQueue::withdraw(std::uint32_t index) {
  Entry& entry = entries_[index];
  Queue& queue = queue_of(entry.request);
  // The head, unless it is cancelled.
  queue.erase(std::find(queue.begin(), queue.end(), index));
  entry.is_queued = false;
  subtract(counters_of(entry.request.operation).bytes_queued, entry.size_bytes - entry.begun_bytes);
}

void IoQueue::finish_if_done(std::uint32_t index) {
  const Entry& entry = entries_[index];
  if (!entry.is_queued && entry.in_flight == 0) finished_.push_back(index);
}

// ---- the choice

std::uint64_t IoQueue::piece_bytes(const Entry& entry) const {
  const std::uint64_t most = entry.request.operation == Disk::Operation::kRead
                                 ? options_.read_piece_bytes
                                 : options_.write_piece_bytes;
  return std::min(most, entry.size_bytes - entry.begun_bytes);
}

bool IoQueue::reads_go_first() const { return !foreground_.empty() || foreground_bytes_ > 0; }

bool IoQueue::has_room_for_write(const Entry& entry) const {
  return write_bytes_ == 0 || write_bytes_ + piece_bytes(entry) <= options_.limits.write_bytes;
}

bool IoQueue::may_write(const Entry& entry, TimePoint now) const {
  if (!has_room_for_write(entry)) return false;
  return !reads_go_first() || write_credit_ >= piece_bytes(entry) ||
         now - last_write_ >= options_.write_stall;
}

std::optional<std::uint32_t> IoQueue::choose_read() const {
  const std::uint64_t bytes = foreground_bytes_ + background_bytes_;
  const auto fits = [&](const Entry& entry) {
    return bytes == 0 || bytes + piece_bytes(entry) <= options_.limits.read_bytes;
  };
  if (!foreground_.empty()) {
    // A piece of the background must not take the room that this one waits for.
    if (!fits(entries_[foreground_.front()])) return std::nullopt;
    return foreground_.front();
  }
  if (background_.empty()) return std::nullopt;
  const Entry& entry = entries_[background_.front()];
  const bool has_room = background_bytes_ == 0 ||
                        background_bytes_ + piece_bytes(entry) <= options_.limits.read_bytes / 2;
  if (!has_room || !fits(entry)) return std::nullopt;
  return background_.front();
}

std::optional<std::uint32_t> IoQueue::choose(TimePoint now) const {
  if (free_pieces_.empty()) return std::nullopt;
  if (!urgent_.empty()) {
    const Entry& entry = entries_[urgent_.front()];
    if (entry.size_bytes == 0 || has_room_for_write(entry)) return urgent_.front();
  }
  if (const auto read = choose_read()) return read;
  if (urgent_.empty() && !writes_.empty() && may_write(entries_[writes_.front()], now)) {
    return writes_.front();
  }
  return std::nullopt;
}

std::optional<Piece> IoQueue::next(TimePoint now) {
  const std::optional<std::uint32_t> index = choose(now);
  if (!index || !entries_[*index].is_prepared) return std::nullopt;
  return begin(*index, now);
}

bool IoQueue::must_prepare(TimePoint now) const {
  const std::optional<std::uint32_t> index = choose(now);
  return index && !entries_[*index].is_prepared;
}

void IoQueue::prepare(TimePoint now) {
  const std::optional<std::uint32_t> index = choose(now);
  if (!index || entries_[*index].is_prepared) return;
  Entry& entry = entries_[*index];
  entry.is_prepared = true;
  if (Result<void> ready = entry.request.hook(entry.completion); !ready) {
    withdraw(*index);
    entry.completion.error = std::move(ready.error());
    entry.begun = entry.last_end = now;
    finish_if_done(*index);
  }
}

TimePoint IoQueue::next_time() const {
  if (writes_.empty() || !reads_go_first() || free_pieces_.empty()) return TimePoint::max();
  if (!urgent_.empty() || !has_room_for_write(entries_[writes_.front()])) return TimePoint::max();
  return last_write_ + options_.write_stall;
}

// ---- pieces

Piece IoQueue::begin(std::uint32_t index, TimePoint now) {
  Entry& entry = entries_[index];
  const std::uint32_t id = free_pieces_.back();
  free_pieces_.pop_back();
  Slot& slot = pieces_[id];
  slot.entry = index;
  slot.piece = {.id = id,
                .operation = entry.request.operation,
                .offset = entry.request.offset + entry.begun_bytes,
                .size_bytes = piece_bytes(entry),
                .memory = {}};
  take_memory(entry, slot);
  slot.piece.memory = slot.memory;
  const std::uint64_t bytes = slot.piece.size_bytes;
  if (!entry.has_begun) entry.begun = now;
  entry.has_begun = true;
  entry.begun_bytes += bytes;
  ++entry.in_flight;
  ++in_flight_;
  if (entry.request.operation == Disk::Operation::kRead) {
    (entry.request.priority == Disk::Priority::kForeground ? foreground_bytes_
                                                           : background_bytes_) += bytes;
  } else {
    write_bytes_ += bytes;
  }
  if (entry.request.operation == Disk::Operation::kWrite) {
    last_write_ = now;
    if (reads_go_first()) write_credit_ -= std::min(write_credit_, bytes);
  }
  Counters::Kind& kind = counters_of(entry.request.operation);
  add(kind.bytes_in_flight, bytes);
  subtract(kind.bytes_queued, bytes);
  if (entry.begun_bytes == entry.size_bytes) withdraw(index);
  return slot.piece;
}

void IoQueue::take_memory(Entry& entry, Slot& slot) {
  slot.memory.clear();
  std::uint64_t left = slot.piece.size_bytes;
  while (left > 0) {
    const std::span<std::byte> span = entry.request.memory[entry.span];
    const std::uint64_t size = std::min<std::uint64_t>(left, span.size() - entry.span_byte);
    std::byte* const begin = span.data() + entry.span_byte;
    if (!slot.memory.empty() &&
        static_cast<std::byte*>(slot.memory.back().iov_base) + slot.memory.back().iov_len ==
            begin) {
      slot.memory.back().iov_len += size;  // Contiguous spans are one.
    } else {
      slot.memory.push_back({.iov_base = begin, .iov_len = size});
    }
    left -= size;
    entry.span_byte += size;
    if (entry.span_byte == span.size()) {
      ++entry.span;
      entry.span_byte = 0;
    }
  }
}

void IoQueue::ended(std::uint32_t id, std::int64_t result, TimePoint now) {
  const Slot& slot = pieces_[id];
  const std::uint32_t index = slot.entry;
  Entry& entry = entries_[index];
  const std::uint64_t bytes = slot.piece.size_bytes;
  PEGA_ASSERT(entry.in_flight > 0, "disk: piece {} is not in flight", id);
  --entry.in_flight;
  --in_flight_;
  entry.last_end = now;
  if (entry.request.operation == Disk::Operation::kRead) {
    (entry.request.priority == Disk::Priority::kForeground ? foreground_bytes_
                                                           : background_bytes_) -= bytes;
    // At most one piece, so that writes do not save up for a burst.
    write_credit_ = writes_.empty() ? 0
                                    : std::min(write_credit_ + bytes / kReadsPerWrite,
                                               options_.write_piece_bytes);
  } else {
    write_bytes_ -= bytes;
  }
  subtract(counters_of(entry.request.operation).bytes_in_flight, bytes);
  if (result != static_cast<std::int64_t>(bytes)) record_error(entry, slot.piece, result);
  free_pieces_.push_back(id);
  if (entry.completion.error && entry.is_queued) withdraw(index);
  finish_if_done(index);
}

void IoQueue::record_error(Entry& entry, const Piece& piece, std::int64_t result) const {
  if (entry.completion.error && entry.completion.error->code != Errc::kCancelled) return;
  const int error_number = result < 0 ? static_cast<int>(-result) : 0;
  entry.completion.error_number = error_number;
  entry.completion.error =
      Error{error_number == ENOSPC ? Errc::kOutOfCapacity : Errc::kIo,
            fmt::format("{} of {} bytes at {} in {}: {}", to_string(piece.operation),
                        piece.size_bytes, piece.offset, options_.path,
                        error_number != 0 ? std::generic_category().message(error_number)
                                          : fmt::format("only {} bytes", result))};
}

// ---- completions

std::optional<IoQueue::Finished> IoQueue::take_finished() {
  if (finished_.empty()) return std::nullopt;
  const std::uint32_t index = finished_.front();
  finished_.pop_front();
  Entry& entry = entries_[index];
  Finished finished;
  entry.completion.waited = entry.begun - entry.accepted;
  entry.completion.service = entry.last_end - entry.begun;
  if (entry.request.operation == Disk::Operation::kRead && entry.request.hook != nullptr &&
      !entry.completion.error) {
    finished.hooked_bytes = entry.size_bytes;
    if (Result<void> good = entry.request.hook(entry.completion); !good) {
      entry.completion.error = std::move(good.error());
    }
  }
  count(entry);
  finished.completion = std::move(entry.completion);
  by_ticket_.erase(entry.request.ticket);
  entry.request = Disk::Request();
  free_entries_.push_back(index);
  return finished;
}

void IoQueue::count(const Entry& entry) {
  const bool failed = entry.completion.error && entry.completion.error->code != Errc::kCancelled;
  if (entry.request.operation == Disk::Operation::kFlush) {
    add(counters_.flushes, 1);
    if (failed) add(counters_.flush_errors, 1);
    return;
  }
  Counters::Kind& kind = counters_of(entry.request.operation);
  add(kind.requests, 1);
  if (failed) add(kind.errors, 1);
  if (!entry.completion.error) add(kind.bytes, entry.size_bytes);
}

Disk::Stats IoQueue::stats() const {
  return {.reads = snapshot(counters_.reads),
          .writes = snapshot(counters_.writes),
          .flushes = counters_.flushes.load(std::memory_order_relaxed),
          .flush_errors = counters_.flush_errors.load(std::memory_order_relaxed),
          .open_requests = 0};
}

}  // namespace pegaflow::disk
