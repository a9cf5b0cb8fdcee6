#pragma once
/// \file
/// Turns of workers at the memory of one whose process permits one other process at a time.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/clock.h"
#include "server/direct/source_id.h"

namespace pegaflow::server {

/// Which worker may read each source that needs consent.
///
/// A worker that asks gets the next turn unless another one waits for it. A turn passes on when its
/// worker reads no longer and has begun a read or has had kTurn for it. Thread-bound: the RPC
/// thread.
class Consents {
 public:
  static constexpr std::chrono::milliseconds kTurn{50};

  /// A registration, of a reader or of a source; `needs_consent`: it permits no process yet.
  void joined(SourceId name, bool needs_consent);
  void left(SourceId name);

  /// Whether the reader may begin a read of a source that needs consent. Otherwise it waits for a
  /// turn, if none waits yet.
  bool begin(SourceId source, SourceId reader);
  /// A read has ended that begin() permitted.
  void ended(SourceId source);

  /// The source has permitted this reader, or none (0), in place of all others, and waits for the
  /// next one. Returns the number of its wait.
  std::uint64_t permitted(SourceId source, SourceId reader, TimePoint now);
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
    SourceId holder{};      ///< The reader that the source permits.
    SourceId asked{};       ///< The one that it was asked to permit.
    SourceId waits{};       ///< The reader that waits for a turn.
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
