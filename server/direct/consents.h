#pragma once
/// \file
/// Turns of workers at the memory of one whose process permits one other process at a time.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/clock.h"
#include "server/direct/source_id.h"

namespace pegaflow::server {

/// Which worker may read each source that needs consent.
///
/// Workers that ask get their turns in the order in which they asked. A turn passes on when its
/// worker reads no longer, and has begun a read or has had kTurn for it. Thread-bound: the RPC
/// thread.
class Consents {
 public:
  /// More than a worker needs to ask for its next blocks.
  static constexpr std::chrono::milliseconds kTurn{10};

  /// A registration, of a reader or of a source; `needs_consent`: it permits no process yet.
  void joined(SourceId name, bool needs_consent);
  void left(SourceId name);

  enum class Answer : std::uint8_t {
    kWait,     ///< It waits for its turn.
    kTurn,     ///< It reads until ended().
    kRefused,  ///< The source cannot permit it. It learns the reason when it tries.
  };
  /// A reader wants to begin a read of a source that needs consent.
  Answer begin(SourceId source, SourceId reader);
  /// A reader waits for no turn any longer.
  void gave_up(SourceId reader);
  /// A read has ended that was begun in a turn, or keeps others from theirs no longer.
  void ended(SourceId source);

  /// The source has permitted this reader, or none (0), in place of all others, and waits for the
  /// next one. `refused`: one that it cannot permit, or none. Returns the number of its wait.
  std::uint64_t permitted(SourceId source, SourceId reader, SourceId refused, TimePoint now);
  /// Whether the source still waits under this number: no later wait has begun.
  [[nodiscard]] bool is_waiting(SourceId source, std::uint64_t wait) const;
  /// The reader that the source shall permit now, or none (0); no value: no change.
  std::optional<SourceId> next(SourceId source, TimePoint now);
  /// When next() may change without another call.
  [[nodiscard]] TimePoint look_again(SourceId source) const;

  /// Whether next() of a source may have changed since the last call.
  bool take_news() { return std::exchange(has_news_, false); }

 private:
  static constexpr SourceId kNone{};
  struct Turns {
    SourceId holder{};  ///< The reader that the source permits.
    SourceId asked{};   ///< The one that it was asked to permit.
    std::deque<SourceId> waiting{};
    std::unordered_set<SourceId> refused{};
    std::size_t reads = 0;  ///< Those of the holder.
    bool is_fresh = false;  ///< The holder has begun no read in this turn.
    TimePoint since{};      ///< The begin of the turn.
    std::uint64_t wait = 0;
  };

  std::unordered_map<SourceId, Turns> turns_;  ///< By source.
  std::unordered_set<SourceId> there_;
  bool has_news_ = false;
};

}  // namespace pegaflow::server
