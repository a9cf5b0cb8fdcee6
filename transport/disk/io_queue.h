#pragma once
/// \file
/// The order in which a disk's requests are executed, and the bytes of them in flight.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <sys/uio.h>

#include "base/clock.h"
#include "transport/disk/disk.h"

namespace pegaflow::disk {

/// One system call of a request: a part of its range.
struct Piece {
  std::uint32_t id = 0;  ///< Below IoQueue::Options::pieces; reused after ended().
  Disk::Operation operation = Disk::Operation::kRead;
  std::uint64_t offset = 0;
  std::uint64_t size_bytes = 0;
  std::span<const iovec> memory;  ///< Valid until ended().
};

/// The part of every backend that has no system call: accepts requests, cuts them into pieces,
/// decides which piece starts next, runs hooks and puts completions together.
///
/// The owner calls in a loop: accept() and cancel() for new commands, ended() for pieces that the
/// kernel has executed, next() until it has none, prepare(), take_finished().
///
/// Thread-bound, except for counters().
class IoQueue {
 public:
  struct Options {
    Disk::Limits limits;
    std::size_t pieces = 512;  ///< In flight.
    std::uint64_t read_piece_bytes = std::uint64_t{1} << 20;
    std::uint64_t write_piece_bytes = std::uint64_t{1} << 20;
    /// Writes get one piece in this time even if no read ends, because the reads may hang.
    Duration write_stall = std::chrono::milliseconds(100);
    std::string path;  ///< For errors.
  };

  /// Atomic copies of Disk::Stats. Written by the owner; readable from any thread.
  struct Counters {
    struct Kind {
      std::atomic<std::uint64_t> requests{0};
      std::atomic<std::uint64_t> errors{0};
      std::atomic<std::uint64_t> bytes{0};
      std::atomic<std::uint64_t> bytes_in_flight{0};
      std::atomic<std::uint64_t> bytes_queued{0};
    };
    Kind reads;
    Kind writes;
    std::atomic<std::uint64_t> flushes{0};
    std::atomic<std::uint64_t> flush_errors{0};
  };

  explicit IoQueue(Options options);
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  /// Takes a request that check() accepted. A ticket in use is a bug of the caller.
  void accept(Disk::Request request, TimePoint now);
  /// As Disk::cancel().
  void cancel(std::uint64_t ticket, TimePoint now);
  void cancel_all(TimePoint now);

  /// The piece that starts now; it counts as in flight until ended(). No value: the limits are
  /// reached, or nothing waits that may start.
  std::optional<Piece> next(TimePoint now);
  /// Whether next() has no value only because the hook of a write has to run first.
  [[nodiscard]] bool must_prepare(TimePoint now) const;
  /// Runs that hook, if there is one.
  void prepare(TimePoint now);

  [[nodiscard]] const Piece& piece(std::uint32_t id) const { return pieces_[id].piece; }
  /// Ends a piece: `result` is a number of bytes, or -errno.
  void ended(std::uint32_t id, std::int64_t result, TimePoint now);

  struct Finished {
    Disk::Completion completion;
    std::uint64_t hooked_bytes = 0;  ///< Bytes that a hook has just read.
  };
  /// The next completion, after the hook of a read has run.
  std::optional<Finished> take_finished();
  [[nodiscard]] bool has_finished() const { return !finished_.empty(); }
  /// Whether a read is in flight or about to begin.
  [[nodiscard]] bool is_reading() const {
    return foreground_bytes_ + background_bytes_ != 0 || !foreground_.empty();
  }

  /// The time at which next() may have a value although no piece has ended; TimePoint::max() if
  /// there is none.
  [[nodiscard]] TimePoint next_time() const;
  [[nodiscard]] std::size_t in_flight() const { return in_flight_; }
  [[nodiscard]] bool is_empty() const { return by_ticket_.empty(); }
  [[nodiscard]] const Counters& counters() const { return counters_; }
  /// The gauges and counts, without Disk::Stats::open_requests.
  [[nodiscard]] Disk::Stats stats() const;

 private:
  struct Entry {
    Disk::Request request;
    Disk::Completion completion;
    std::uint64_t size_bytes = 0;
    std::uint64_t begun_bytes = 0;
    std::size_t span = 0;         // The cursor in request.memory.
    std::uint64_t span_byte = 0;  // Below the size of that span.
    unsigned in_flight = 0;
    bool has_begun = false;
    bool is_prepared = false;  // A write's hook has run, or it has none.
    bool is_queued = true;     // Pieces of it may still begin.
    TimePoint accepted;
    TimePoint begun;
    TimePoint last_end;
  };
  struct Slot {
    Piece piece;
    std::uint32_t entry = 0;
    std::vector<iovec> memory;
  };
  using Queue = std::deque<std::uint32_t>;

  [[nodiscard]] Queue& queue_of(const Disk::Request& request);
  [[nodiscard]] Counters::Kind& counters_of(Disk::Operation operation);
  [[nodiscard]] std::uint64_t piece_bytes(const Entry& entry) const;
  [[nodiscard]] std::optional<std::uint32_t> choose(TimePoint now) const;
  [[nodiscard]] std::optional<std::uint32_t> choose_read() const;
  [[nodiscard]] bool reads_go_first() const;
  [[nodiscard]] bool has_room_for_write(const Entry& entry) const;
  [[nodiscard]] bool may_write(const Entry& entry, TimePoint now) const;
  Piece begin(std::uint32_t index, TimePoint now);
  void take_memory(Entry& entry, Slot& slot);
  /// Takes the entry out of its queue: no further piece of it begins.
  void withdraw(std::uint32_t index);
  void finish_if_done(std::uint32_t index);
  void record_error(Entry& entry, const Piece& piece, std::int64_t result) const;
  void withdraw_as_cancelled(std::uint32_t index, TimePoint now);
  void count(const Entry& entry);

  const Options options_;
  std::deque<Entry> entries_;  // At most Limits::requests; those in free_entries_ are unused.
  std::vector<std::uint32_t> free_entries_;
  std::vector<Slot> pieces_;
  std::vector<std::uint32_t> free_pieces_;
  std::unordered_map<std::uint64_t, std::uint32_t> by_ticket_;
  Queue urgent_;  // Durable writes and flushes.
  Queue foreground_;
  Queue background_;
  Queue writes_;
  Queue finished_;
  std::size_t in_flight_ = 0;
  std::uint64_t foreground_bytes_ = 0;  // In flight.
  std::uint64_t background_bytes_ = 0;
  std::uint64_t write_bytes_ = 0;
  std::uint64_t write_credit_ = 0;  // Bytes that writes may begin beside foreground reads.
  TimePoint last_write_{};          // The begin of a write, or of its wait for reads.
  Counters counters_;
};

}  // namespace pegaflow::disk
