#pragma once
/// \file
/// The work of a fabric with several rails: which bytes a rail requests next.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/batch_book.h"
#include "transport/fabric.h"

namespace pegaflow::rails {

/// The end of an operation: no rail writes to its place any longer.
struct Outcome {
  enum class Kind : std::uint8_t {
    kDone,
    kFailed,  ///< With `error`.
    kRetry,   ///< The path broke: another rail may retry.
  };
  Operation operation{};
  Kind kind = Kind::kDone;
  Errc error = Errc::kInternal;
  std::string detail;
};

/// Hands the operations of a BatchBook to the rails that have room, and keeps the results of the
/// batches for them.
///
/// Rails pull work. A slow rail skips any operation that the others would finish sooner: it takes
/// operations further back in the queue, or none. The speed of a rail to a peer is measured over
/// its latest operations; until there is a measurement, a rail gets one operation at a time.
/// Operations of a broken path go to the other rails. A peer is lost when no rail has a path to it.
///
/// A batch that is cancelled or late completes at once. Its operations that are still in flight end
/// here as well, and the batch is quiesced with the last of them.
///
/// Thread-safe, by one mutex that is held briefly: callers add batches, rails take up to one window
/// at a time. Completions are kept until take_completions(), in the order in which the batches
/// ended.
class Dealer {
 public:
  struct Options {
    std::size_t rails = 1;
    std::uint64_t piece_bytes = std::uint64_t{1} << 20;  ///< The largest operation.
    /// A small batch is cut so that every rail gets two operations, but no operation is smaller.
    std::uint64_t least_piece_bytes = std::uint64_t{64} << 10;
  };
  /// The capacity of a rail for one peer now.
  struct Room {
    std::size_t operations = 0;
    std::uint64_t bytes = 0;
    std::size_t background_operations = 0;  ///< The part of them that background work may take.
    std::uint64_t background_bytes = 0;
  };

  Dealer(const Options& options, const Clock& clock);

  // ---- callers

  void add_region(RegionId region, std::uint64_t size_bytes);
  /// Cancels the batches with a place in the region, and returns when none of their operations is
  /// in flight. Calls `wake` once, for the rails to deliver the completions.
  void close_region(RegionId region, const std::function<void()>& wake);
  void add_peer(Fabric::PeerId id, std::vector<RegionDescriptor> regions);
  /// Completes the peer's batches with kCancelled. False when there is no such peer.
  bool remove_peer(Fabric::PeerId id);
  void add(Fabric::Batch batch);
  void cancel(std::uint64_t ticket);
  /// Completes all batches with kCancelled.
  void finish();

  // ---- rails

  /// Returns the operations that this rail is to post now, in order. `room` returns what the rail
  /// can accept for a peer and is called only for peers with waiting work.
  std::vector<Operation> deal(std::size_t rail, const std::function<Room(Fabric::PeerId)>& room);
  void ended(std::span<const Outcome> outcomes);
  /// The rail can reach the peer, until path_down().
  void path_up(Fabric::PeerId peer, std::size_t rail);
  /// The rail cannot reach the peer now. With `for_good` (another incarnation) no rail can. Returns
  /// whether the peer is lost.
  bool path_down(Fabric::PeerId peer, std::size_t rail, const Error& error, bool for_good);

  /// Ends the batches whose deadline has passed.
  void on_time(TimePoint now);
  /// The earliest deadline; TimePoint::max() when there is none.
  [[nodiscard]] TimePoint next_time() const;

  [[nodiscard]] bool has_work() const noexcept { return work_.load(std::memory_order_acquire); }
  [[nodiscard]] bool has_completions() const noexcept {
    return completed_.load(std::memory_order_acquire);
  }
  std::vector<Fabric::Completion> take_completions();

 private:
  static constexpr unsigned kMostTries = 3;

  /// How many batches a slow rail examines for one that is worth starting.
  static constexpr std::size_t kMostLooks = 64;
  /// The span over which a rail's pace is measured; older bytes count half.
  static constexpr Duration kPaceMemory = std::chrono::milliseconds(4);
  /// Without work for this long, the measured pace expires: the rail may have become faster.
  static constexpr Duration kPaceLife = std::chrono::seconds(1);
  /// In flight on a rail without a measured pace. A slow rail would delay the first batch.
  static constexpr std::size_t kFirstOperations = 1;

  /// The work of one rail for one peer, and its measured speed.
  struct Pace {
    std::size_t open = 0;  ///< Operations in flight, and their bytes.
    std::uint64_t open_bytes = 0;
    double bytes = 0;           ///< Bytes read recently ...
    Duration busy{};            ///< ... and the time with work that they took.
    TimePoint counted_until{};  ///< The end of the time counted in `busy`.

    [[nodiscard]] bool is_known(TimePoint now) const {
      return busy > Duration::zero() && (open > 0 || now - counted_until < kPaceLife);
    }
    [[nodiscard]] double seconds_for(double more_bytes) const {
      return std::chrono::duration<double>(busy).count() / std::max(bytes, 1.0) * more_bytes;
    }
    void begin(std::uint64_t size_bytes, TimePoint now);
    void ended(std::uint64_t size_bytes, bool done, TimePoint now);
  };
  struct Peer : BatchBook::Peer {
    std::vector<Pace> paces;     ///< By rail.
    std::set<std::size_t> down;  ///< Rails without a path to the peer.
  };

  [[nodiscard]] std::uint64_t piece_bytes_for(std::uint64_t batch_bytes) const;
  /// Includes the whole chunks that follow it contiguously at both ends.
  static void extend(Operation& operation, const BatchBook::Entry& entry);
  void take(Peer& peer, std::size_t rail, std::size_t priority, Room& room,
            std::vector<Operation>& dealt);
  [[nodiscard]] bool is_worthwhile(const Peer& peer, std::size_t rail, std::uint64_t size_bytes,
                                   std::uint64_t waiting_bytes) const;
  void update_has_work();

  const Options options_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::condition_variable quiesced_;
  std::unordered_map<std::uint32_t, std::uint64_t> regions_;  // Sizes of the local regions.
  std::unordered_map<std::uint32_t, Peer> peers_;
  BatchBook book_;
  std::vector<Fabric::Completion> completions_;
  std::atomic<bool> work_{false};
  std::atomic<bool> completed_{false};
};

}  // namespace pegaflow::rails
