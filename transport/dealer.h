#pragma once
/// \file
/// Which bytes a fabric of several rails is to bring, and which of them a rail asks for next.

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
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
#include "transport/fabric.h"

namespace pegaflow::rails {

/// A run of bytes that one GET brings: a part of a chunk, or several that lie side by side at both
/// ends.
struct Operation {
  std::uint64_t batch = 0;  ///< The dealer's number for it.
  Fabric::PeerId peer{};
  std::uint32_t first_chunk = 0;   ///< Of the batch; it covers this one and those behind it ...
  std::uint64_t first_offset = 0;  ///< ... from here on ...
  std::uint64_t size_bytes = 0;    ///< ... as far as its size goes.
  RegionId remote_region{};
  std::uint64_t remote_offset = 0;
  RegionId local_region{};
  std::uint64_t local_offset = 0;
  bool background = false;
  unsigned tries = 0;
  std::size_t rail = 0;  ///< That it was dealt to.
};

/// What became of an operation: nobody writes to its place any more.
struct Outcome {
  enum class Kind : std::uint8_t {
    kDone,
    kFailed,  ///< For `error`.
    kRetry,   ///< The way broke: another rail may bring it.
  };
  Operation operation{};
  Kind kind = Kind::kDone;
  Errc error = Errc::kInternal;
  std::string detail;
};

/// Takes batches apart into operations, hands them to the rails that have room, and says what
/// became of each batch.
///
/// Rails pull: a slow one just takes less, and never what the others would have brought before it
/// has: it works further ahead, on batches that are asked for later, or rests. How fast a rail is
/// with a peer shows in what it has brought of late; until something is known it gets one
/// operation. What a broken way leaves undone goes to the others. A peer is lost when no rail has
/// a way to it any more.
///
/// A batch that is cancelled or late is answered at once. Operations of it that a rail has still
/// come back here, and only with the last of them is the batch settled.
///
/// Thread-safe, by one mutex that is held for moments: callers add, rails take up to a window at
/// a time. Completions are kept until take_completions(), and their order is that of what they say.
class Dealer {
 public:
  struct Options {
    std::size_t rails = 1;
    std::uint64_t piece_bytes = std::uint64_t{1} << 20;  ///< Of an operation at most.
    /// A small batch is cut so that every rail gets two operations, but not below this.
    std::uint64_t least_piece_bytes = std::uint64_t{64} << 10;
  };
  /// What a rail can take for one peer now.
  struct Room {
    std::size_t operations = 0;
    std::uint64_t bytes = 0;
    std::size_t background_operations = 0;  ///< Of these, for the background.
    std::uint64_t background_bytes = 0;
  };

  Dealer(const Options& options, const Clock& clock) : options_(options), clock_(clock) {}

  // ---- callers

  void add_region(RegionId region, std::uint64_t size_bytes);
  /// Cancels the batches that have a place there, and returns when none of their operations is
  /// under way. Rails are `wake`d meanwhile.
  void close_region(RegionId region, const std::function<void()>& wake);
  void add_peer(Fabric::PeerId id, std::vector<RegionDescriptor> regions);
  /// Answers its batches with kCancelled. False when there is no such peer.
  bool remove_peer(Fabric::PeerId id);
  void add(Fabric::Batch batch);
  void cancel(std::uint64_t ticket);
  /// Answers all batches with kCancelled.
  void finish();

  // ---- rails

  /// What this rail is to ask for now, in order; `room` says how much a peer may have and is called
  /// for peers with something to do.
  std::vector<Operation> deal(std::size_t rail, const std::function<Room(Fabric::PeerId)>& room);
  void ended(std::span<const Outcome> outcomes);
  /// The rail can reach the peer: it counts until path_down().
  void path_up(Fabric::PeerId peer, std::size_t rail);
  /// The rail cannot reach the peer now. With `for_good` (another incarnation) nobody can.
  /// Returns whether the peer is lost.
  bool path_down(Fabric::PeerId peer, std::size_t rail, const Error& error, bool for_good);

  /// Ends the batches whose deadline has passed.
  void on_time(TimePoint now);
  /// Of the next deadline; TimePoint::max(): there is none.
  [[nodiscard]] TimePoint next_time() const;

  [[nodiscard]] bool has_work() const noexcept { return work_.load(std::memory_order_acquire); }
  [[nodiscard]] bool has_completions() const noexcept {
    return completed_.load(std::memory_order_acquire);
  }
  std::vector<Fabric::Completion> take_completions();

 private:
  static constexpr std::size_t kPriorities = 2;
  static constexpr unsigned kMostTries = 3;

  /// How far behind the first batch that a slow rail leaves alone it looks for another.
  static constexpr std::size_t kMostLooks = 64;
  /// Of a rail's pace: what lies back further than this counts half.
  static constexpr Duration kPaceMemory = std::chrono::milliseconds(4);
  /// After so long without work nothing is known any more: the rail may have become faster.
  static constexpr Duration kPaceLife = std::chrono::seconds(1);
  /// What a rail may have of which nothing is known: a slow one would keep the first batch waiting.
  static constexpr std::size_t kFirstOperations = 1;

  /// What one rail does for one peer.
  struct Pace {
    std::size_t open = 0;  ///< Operations it has, and their bytes.
    std::uint64_t open_bytes = 0;
    double bytes = 0;           ///< It has brought ...
    Duration busy{};            ///< ... in so long with something to do.
    TimePoint counted_until{};  ///< Up to when `busy` is counted.

    [[nodiscard]] bool is_known(TimePoint now) const {
      return busy > Duration::zero() && (open > 0 || now - counted_until < kPaceLife);
    }
    [[nodiscard]] double seconds_for(double more_bytes) const {
      return std::chrono::duration<double>(busy).count() / std::max(bytes, 1.0) * more_bytes;
    }
    void begin(std::uint64_t size_bytes, TimePoint now);
    void ended(std::uint64_t size_bytes, bool done, TimePoint now);
  };
  struct Peer {
    std::vector<RegionDescriptor> regions;
    std::vector<Pace> paces;  ///< By rail.
    /// Numbers of batches with something that nobody has asked for, by priority.
    std::array<std::deque<std::uint64_t>, kPriorities> waiting;
    std::set<std::size_t> down;  ///< Rails without a way to it.
    std::optional<Error> lost;
  };
  struct Work {
    std::uint64_t number = 0;
    Fabric::Batch batch;
    Fabric::Completion completion;
    std::vector<std::uint64_t> bytes_left;  ///< By chunk.
    std::uint64_t piece_bytes = 0;
    std::size_t next_chunk = 0;  ///< What to ask for next ...
    std::uint64_t next_offset = 0;
    std::uint64_t waiting_bytes = 0;  ///< That no rail has; those of failed chunks included.
    std::deque<Operation> retries;    ///< ... but first of all these, whose way broke.
    std::size_t open = 0;             ///< Operations that rails have.
    bool is_waiting = false;          ///< Its number is in Peer::waiting.
    bool completed = false;
  };
  using Works = std::unordered_map<std::uint64_t, Work>;

  void validate(Work& work, const Peer* peer) const;
  bool next_operation(Work& work, Operation& operation);
  void take(Peer& peer, std::size_t rail, std::size_t priority, Room& room,
            std::vector<Operation>& dealt);
  [[nodiscard]] bool is_worthwhile(const Peer& peer, std::size_t rail, std::uint64_t size_bytes,
                                   std::uint64_t waiting_bytes) const;
  void enqueue(Peer& peer, Work& work, bool first);
  void fail_chunks(Work& work, const Operation& operation, Errc error, const std::string& detail);
  void fail_rest(Work& work, Errc reason, const std::string& detail);
  void withdraw(Works::iterator found, Errc reason, const std::string& detail);
  void withdraw_all(const std::function<bool(const Work&)>& which, Errc reason,
                    const std::string& detail);
  void lose(Fabric::PeerId id, Peer& peer, const Error& error);
  void complete_if_done(Works::iterator found);
  [[nodiscard]] bool touches(RegionId region) const;
  void update_has_work();

  const Options options_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::condition_variable quiesced_;
  std::unordered_map<std::uint32_t, std::uint64_t> regions_;  // Sizes of ours.
  std::unordered_map<std::uint32_t, Peer> peers_;
  Works works_;
  std::uint64_t last_number_ = 0;
  std::set<std::pair<TimePoint, std::uint64_t>> deadlines_;  // Of those not answered.
  std::vector<Fabric::Completion> completions_;
  std::atomic<bool> work_{false};
  std::atomic<bool> completed_{false};
};

}  // namespace pegaflow::rails
