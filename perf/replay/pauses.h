#pragma once
/// \file
/// Hints from a router to a pool about conversations that pause, and the pool's gain from them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// Ranks conversations that pause by how soon they are expected to return. It learns from pauses
/// that have ended, by their length, the length of the answer before them, and whether the last
/// pause was long. It knows only the events that were reported to it: times, in seconds, never
/// decrease. Thread-bound; grows with the number of conversations.
class PauseHints {
 public:
  /// A request of the conversation arrived.
  void resumed(std::uint64_t conversation, double now);
  /// Its answer was sent.
  void paused(std::uint64_t conversation, double now, std::uint32_t answer_tokens);
  /// Expected returns for each second for which the conversation's blocks are kept, with the best
  /// time to give them up; 0 for one that does not pause.
  [[nodiscard]] double worth(std::uint64_t conversation, double now) const;

 private:
  static constexpr std::size_t kSteps = 31;    // Of the length of a pause.
  static constexpr std::size_t kClasses = 15;  // Length of the answer x former pause.
  struct Seen {
    std::array<double, kSteps> returns{};
    std::array<double, kSteps> seconds{};  // That pauses have spent in the step.
  };
  struct Pause {
    double since = 0;
    std::size_t kind = 0;
    bool is_open = false;
    std::size_t former = 0;  // 0: short, 1: long, 2: none.
  };
  static void add(Seen& seen, double length);
  void check_order(double now) const;

  std::array<Seen, kClasses> by_kind_{};
  Seen all_{};
  std::unordered_map<std::uint64_t, Pause> pauses_;
  double last_ = 0;
};

/// Which blocks a full pool gives up first: those of the conversation that was used longest ago,
/// that is used again latest (unknown outside of a simulation), or that PauseHints ranks lowest.
enum class KeepOrder : std::uint8_t { kLru, kMin, kHints };

struct PausesResult {
  std::uint64_t asked = 0;  ///< Blocks.
  std::uint64_t found = 0;  ///< Blocks found, as prefixes.
  /// The conversations that lost blocks at each request, the first victim first.
  std::vector<std::vector<std::uint64_t>> victims{};

  [[nodiscard]] double hit_rate() const {
    return asked == 0 ? 0 : static_cast<double>(found) / static_cast<double>(asked);
  }
};

/// Simulates a pool of `blocks` blocks over a trace with arrivals. A conversation is one unit,
/// named by its first block, and loses blocks from its end; blocks of a new prompt may be given up
/// at once. An answer is taken to end when its request arrives: traces have no other time.
PausesResult replay_pauses(const RequestTrace& trace, std::uint64_t blocks, KeepOrder order);

}  // namespace pegaflow::perf
