#pragma once
/// \file
/// The batches of a fabric in flight: what is left to read of each, its deadline and its result.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/fabric.h"

namespace pegaflow::rails {

/// A run of bytes that one read brings: a part of a chunk, or several chunks that are contiguous at
/// both ends.
struct Operation {
  std::uint64_t batch = 0;  ///< The book's number of the batch.
  Fabric::PeerId peer{};
  std::uint32_t first_chunk = 0;   ///< The first chunk that the operation covers,
  std::uint64_t first_offset = 0;  ///< the offset in that chunk,
  std::uint64_t size_bytes = 0;    ///< and the length, which may extend into the chunks behind it.
  RegionId remote_region{};
  std::uint64_t remote_offset = 0;
  RegionId local_region{};
  std::uint64_t local_offset = 0;
  bool background = false;
  unsigned tries = 0;    ///< How often a path broke under it; counted by the Dealer.
  std::size_t rail = 0;  ///< The rail that it was dealt to.
};

/// Validates batches, cuts them into operations, and reports the result of each batch.
///
/// A batch is *waiting* while it is in its peer's queue, which it leaves when next() finds nothing
/// more to request. An operation is *open* from begin() until done(), failed() or give_back(), each
/// of which states that nothing writes to its place any longer. A batch that is not waiting and has
/// no open operation is quiesced: its entry ends.
///
/// withdraw() completes a batch at once. Without open operations it is quiesced as well. Otherwise
/// its last operation ends the entry, with the second Completion that Fabric describes. So a lane
/// that can stop its operations (sockets: it closes them) gives them back first, and a lane that
/// cannot (network cards) withdraws first.
///
/// Each batch is reported to `sink` once as completed and once as quiesced, in one Completion where
/// both coincide.
///
/// Not thread-safe: protected by the thread or the mutex of its lane. Unbounded: the lane limits
/// the batches that it accepts.
class BatchBook {
 public:
  static constexpr std::size_t kPriorities = 2;

  struct Entry;
  /// The book's part of a peer. It belongs to the lane, which derives its own type from it, and is
  /// destroyed only after lose().
  struct Peer {
    std::vector<RegionDescriptor> regions;
    /// Batches with bytes that are not requested, by priority.
    std::array<std::deque<Entry*>, kPriorities> waiting;
    std::optional<Error> lost;  ///< The reason; later batches fail with it.

    [[nodiscard]] bool has_waiting() const noexcept {
      return !waiting[0].empty() || !waiting[1].empty();
    }
  };
  /// A batch. Written by the book, except for `piece_bytes`.
  struct Entry {
    std::uint64_t number = 0;
    Fabric::Batch batch;
    Peer* peer = nullptr;           ///< Null once the batch has completed.
    std::uint64_t piece_bytes = 0;  ///< The largest operation; the lane sets it after add().
    Fabric::Completion completion;  ///< Moved from once the batch has completed.
    std::vector<std::uint64_t> bytes_left;  ///< By chunk. 0: it arrived, or is out of range.
    std::uint64_t waiting_bytes = 0;        ///< Not requested, including those of failed chunks.
    std::deque<Operation> retries;          ///< Requested next, and then:
    std::size_t next_chunk = 0;             ///< the bytes from this chunk on,
    std::uint64_t next_offset = 0;          ///< and this offset in it.
    std::size_t open = 0;                   ///< Operations in flight.
    bool is_waiting = false;                ///< It is in `peer->waiting`.
    bool completed = false;                 ///< Its result is reported; operations are still open.

    [[nodiscard]] bool has_failed(std::size_t chunk) const {
      return completion.chunks[chunk].has_value();
    }
  };

  /// Returns the size of a local region, or 0 when there is none of that number.
  using RegionBytes = std::function<std::uint64_t(RegionId)>;

  /// `clock` outlives the book. Neither function may call the book.
  BatchBook(const Clock& clock, RegionBytes region_bytes, Fabric::CompletionSink sink)
      : clock_(clock), region_bytes_(std::move(region_bytes)), sink_(std::move(sink)) {}
  BatchBook(const BatchBook&) = delete;
  BatchBook& operator=(const BatchBook&) = delete;

  // ---- batches

  /// Adds a batch and puts it at the end of its peer's queue. Returns null when it has completed
  /// already: `peer` is null (kInvalidArgument) or lost, or the deadline has passed. Chunks out of
  /// range are kInvalidArgument and never requested.
  Entry* add(Fabric::Batch batch, Peer* peer);
  /// Completes the batch now: chunks that have not arrived and have no result get `reason`. The
  /// entry is gone when no operation is open. Expects a batch that has not completed.
  void withdraw(Entry& entry, Errc reason, const std::string& detail);
  /// Marks the peer as lost and withdraws its batches, in the order in which they were added.
  void lose(Peer& peer, const Error& error);

  /// Batches that have not completed. Null when there is none.
  [[nodiscard]] Entry* find(std::uint64_t number);
  [[nodiscard]] Entry* find_ticket(std::uint64_t ticket);
  /// The one with the earliest deadline, when that has passed.
  [[nodiscard]] Entry* find_late(TimePoint now);
  /// The numbers of those with a place in the region, in the order in which they were added.
  [[nodiscard]] std::vector<std::uint64_t> find_into(RegionId region) const;
  /// The earliest deadline; TimePoint::max() when there is none.
  [[nodiscard]] TimePoint next_deadline() const noexcept {
    return deadlines_.empty() ? TimePoint::max() : deadlines_.begin()->first;
  }
  /// Whether an operation, open or still to be requested, may write to the region.
  [[nodiscard]] bool touches(RegionId region) const;

  // ---- operations

  /// Returns the next bytes of a waiting batch to request, at most `piece_bytes` of one chunk, or
  /// an operation that was given back. When there are none, the batch leaves its queue, and its
  /// entry may be gone.
  std::optional<Operation> next(Entry& entry);
  /// Records that what next() returned is requested. The lane may have extended it into the chunks
  /// behind it, unless it was given back before (`retries` is not empty).
  void begin(Entry& entry, const Operation& operation);

  /// The operation's bytes arrived.
  void done(const Operation& operation);
  /// It failed: its chunks get `error`, unless they have an error already. `detail` is called for
  /// the first error of a batch only, since a text for each of its chunks would cost more than the
  /// rest of this.
  void failed(const Operation& operation, Errc error, const std::function<std::string()>& detail);
  enum class Turn : std::uint8_t {
    kFirst,  ///< Before the batch's other retries.
    kLast,   ///< Behind them.
  };
  /// It is to be requested again, and its batch goes to the head of its queue.
  void give_back(const Operation& operation, Turn turn);

 private:
  void validate(Entry& entry) const;
  static void enqueue(Entry& entry, bool first);
  static void dequeue(Entry& entry);
  Entry& end(const Operation& operation);
  void complete_if_done(Entry& entry);
  template <typename Which>
  [[nodiscard]] std::vector<std::uint64_t> find_all(Which which) const;

  const Clock& clock_;
  const RegionBytes region_bytes_;
  const Fabric::CompletionSink sink_;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::uint64_t last_number_ = 0;
  // Of batches that have not completed, with their numbers.
  std::set<std::pair<TimePoint, std::uint64_t>> deadlines_;
};

}  // namespace pegaflow::rails
