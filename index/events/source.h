#pragma once
/// \file
/// One event stream: its sequence, its gaps and replays, restarts of its engine, and how far it is
/// trusted.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "index/events/answer_check.h"
#include "index/events/event_filter.h"
#include "index/events/kv_event.h"

namespace pegaflow::index {

/// How far a router may rely on what the stream said. Only kExact and kPartial give credit.
enum class Trust : std::uint8_t {
  kUnknown,    ///< No connection yet.
  kSyncing,    ///< The engine's history is being replayed; nothing is known for sure.
  kExact,      ///< Every event since the cache was empty has been applied.
  kPartial,    ///< All known blocks are cached, and more may be.
  kUntrusted,  ///< Answers contradict the events, or the events have stopped.
  kGone,       ///< Removed; further inputs are ignored.
};
inline constexpr std::size_t kTrusts = static_cast<std::size_t>(Trust::kGone) + 1;
/// "exact", as /health and metrics spell it.
std::string_view to_string(Trust trust) noexcept;

/// Next step of the owner, in order.
struct SourceAction {
  enum class Kind : std::uint8_t {
    kApply,   ///< Apply `batch` to the holder: stored, removed and cleared events in their order.
    kForget,  ///< Clear the holder: its blocks are no longer known. `reason` tells why.
    kReplay,  ///< Request the batches from sequence `from` on, under `ticket`; an open request of
              ///< this source ends.
    kTrust,   ///< state() or reason() changed, to `trust` and `reason`: for the log and metrics.
  };
  Kind kind = Kind::kTrust;
  KvBatch batch;
  std::uint64_t sequence = 0;  ///< Number of the batch of a kApply.
  std::uint64_t from = 0;
  std::uint64_t ticket = 0;
  Trust trust = Trust::kUnknown;
  std::string reason;
};

/// State machine of the stream of one (engine, rank). Pure: the caller gives time and inputs and
/// takes actions; there is no socket and no clock inside.
///
/// | input | reaction |
/// |---|---|
/// | first connection | replay from 0; without a replay endpoint kPartial, and exact from sequence
/// 0 | | the next sequence number | apply | | a number above the next | hold (at most 1,024 batches
/// and 64 MiB), replay the hole; where that brings nothing for 2 s, forget and go on as kPartial |
/// | a number that was seen, with the same time and size | duplicate: ignored |
/// | a number that was seen, with other contents | the engine restarted: forget, begin anew |
/// | another connection | replay from the last batch: the same contents, or else a restart |
/// | AllBlocksCleared | apply; the stream is exact from here |
/// | a chain whose parent is unknown | apply: the hash of a block stands for its whole prefix |
/// | a batch that cannot be decoded | forget, go on as kPartial |
/// | blocks of groups other than attention, or on other media than the GPU | left out, counted |
/// | no event while the engine computes prompts | full reports requested; without effect:
/// kUntrusted | | answers that differ from predictions by more than a quarter, over 32 | forget and
/// replay, once; again: kUntrusted |
///
/// A stream whose engine cannot replay after a lost batch forgets everything: a lost removal would
/// leave credit for blocks that are gone.
///
/// After each input the owner calls next() until it returns false. Thread-bound. Memory: held
/// batches, and 24 bytes for each of the last 1,024 sequence numbers.
class Source {
 public:
  struct Options {
    bool can_replay = false;  ///< The engine has a replay endpoint.
    std::optional<std::uint32_t> rank =
        std::nullopt;               ///< Batches of another rank make the source untrusted.
    std::uint32_t block_size = 16;  ///< Tokens; until an event names it.
    std::size_t held_batches = 1024;
    std::size_t held_bytes = std::size_t{64} << 20U;
    Duration replay_timeout = std::chrono::seconds(2);  ///< Without progress.
    std::uint32_t full_reports = 32;  ///< Requests with `kv_cache_report_mode: full` after a loss.
    std::uint32_t exact_answers = 8;  ///< As predicted in a row, which end the full reports early.
    std::uint32_t window = 32;        ///< Answers over which predictions are judged.
    double tolerated_error = 0.25;
    double stall_factor = 10;  ///< Times the usual interval between events.
    Duration least_stall = std::chrono::seconds(10);
    std::uint32_t stall_answers = 4;  ///< Prompts computed without an event, before it is a stall.
  };

  struct Stats {
    std::uint64_t applied = 0;  ///< Batches.
    std::uint64_t duplicates = 0;
    std::uint64_t gaps = 0;
    std::uint64_t filled = 0;       ///< Gaps that a replay or a late batch filled.
    std::uint64_t lost = 0;         ///< Batches never received, where their number is known.
    std::uint64_t undecodable = 0;  ///< Batches.
    std::uint64_t replays = 0;      ///< Requested.
    std::uint64_t restarts = 0;
    std::uint64_t forgotten = 0;       ///< Times that the holder was cleared.
    std::uint64_t skipped_events = 0;  ///< Unknown, malformed or beyond a limit.
    std::uint64_t other_groups = 0;    ///< Events of groups that are not indexed.
    std::uint64_t other_media = 0;     ///< Events of host memory and storage.
    std::uint64_t orphans = 0;       ///< Chains whose parent no event named; applied all the same.
    std::uint64_t full_reports = 0;  ///< Requests that carried the report mode.
    std::uint64_t resyncs = 0;       ///< After wrong predictions.
  };

  /// A place in the stream, from which another process can continue.
  struct Position {
    std::uint64_t sequence = 0;  ///< Number of the last applied batch.
    double timestamp = 0;        ///< Time in that batch.
    std::uint64_t bytes = 0;     ///< Size of its payload.
    bool is_exact = false;       ///< The state there was kExact, not kPartial.
  };

  Source() : Source(Options{}) {}
  explicit Source(const Options& options);

  // ---- inputs of the socket

  /// The subscription has a connection: the first, or another one after a loss.
  void connected(TimePoint now);
  void disconnected(TimePoint now);
  /// A batch of the subscription. One that could not be decoded counts as lost when its turn comes.
  void live(std::uint64_t sequence, KvBatch batch, TimePoint now);
  /// A batch of the replay `ticket`; those of other tickets are late and ignored.
  void replayed(std::uint64_t ticket, std::uint64_t sequence, KvBatch batch, TimePoint now);
  /// The end marker of a replay, or its failure: `complete` is false when the engine refused it or
  /// the connection failed.
  void replay_ended(std::uint64_t ticket, bool complete, TimePoint now);
  /// Batches were dropped here, because the owner was slow: a gap behind the last one.
  void overflowed(TimePoint now);

  // ---- inputs of the owner

  /// The engine is another process: its start time, its addresses or its id changed. `evidence` is
  /// a noun phrase for the reason, such as "a new start time".
  void restarted(std::string_view evidence, TimePoint now);
  /// An answer of the engine: its prompt and the cached part that was predicted and reported, all
  /// in tokens.
  void answered(std::uint64_t prompt, std::uint64_t predicted, std::uint64_t reported,
                TimePoint now);
  /// Continues from the place of another process that knows more. What is known here is forgotten,
  /// and the owner then stores the blocks that were known there. The batches behind the place are
  /// replayed; if the engine no longer has them, everything begins anew.
  /// False, without effect, unless the history here is incomplete, all that came is applied, the
  /// engine can replay, and nothing shows that the place is of another process.
  bool resume(const Position& place, TimePoint now);
  /// Timeouts. Call it each second, and at next_deadline().
  void tick(TimePoint now);
  /// The engine left the fleet: forget, and ignore everything that follows.
  void remove(TimePoint now);

  // ---- outputs

  /// Moves the next action to `action`; false when there is none.
  bool next(SourceAction& action);
  /// Whether the next request to this engine shall ask for a full report; counts it as used.
  bool take_full_report();
  [[nodiscard]] bool wants_full_report() const noexcept { return full_reports_left_ > 0; }
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;

  [[nodiscard]] Trust trust() const noexcept { return trust_; }
  /// Whether placement may count the stream's blocks.
  [[nodiscard]] bool gives_credit() const noexcept {
    return trust_ == Trust::kExact || trust_ == Trust::kPartial;
  }
  /// A clause that explains trust(), for /health: "batches 7 to 9 were lost, and the engine did not
  /// replay them".
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] std::size_t held_batches() const noexcept { return held_.size(); }
  [[nodiscard]] std::size_t held_bytes() const noexcept { return held_bytes_; }
  [[nodiscard]] std::uint32_t block_size() const noexcept { return options_.block_size; }
  /// The place of the last applied batch; nullopt without one, or without credit.
  [[nodiscard]] std::optional<Position> position() const;
  /// Sequence number of the last applied batch.
  [[nodiscard]] std::optional<std::uint64_t> last() const noexcept { return last_; }

 private:
  // What tells a batch from another with the same number.
  struct Stamp {
    std::uint64_t sequence = UINT64_MAX;
    double timestamp = 0;
    std::size_t bytes = 0;
    bool operator==(const Stamp&) const = default;
  };
  enum class Purpose : std::uint8_t {
    kHistory,  // Everything the engine still has. A snapshot, once engines offer one, belongs here.
    kHole,     // The batches between last_ and the held ones.
    kIdentity,  // From last_ on: is it the same process?
  };
  struct Replay {
    Purpose purpose = Purpose::kHistory;
    std::uint64_t ticket = 0;
    TimePoint progress;
    bool confirmed = false;  // Of a kIdentity: the first batch was the known one.
  };
  enum class Distrust : std::uint8_t { kNone, kRank, kSilence, kAnswers };

  // Sequence.
  void accept(std::uint64_t sequence, KvBatch batch, TimePoint now);
  [[nodiscard]] std::optional<std::string> contradiction(std::uint64_t sequence,
                                                         const KvBatch& batch);
  [[nodiscard]] std::optional<std::uint64_t> expected() const;
  [[nodiscard]] bool is_waiting() const;
  void hold(std::uint64_t sequence, KvBatch batch, TimePoint now);
  void make_room(std::size_t bytes, TimePoint now);
  void release_held(TimePoint now);
  void skip_to(std::uint64_t sequence, std::string_view cause);
  void apply(std::uint64_t sequence, KvBatch batch);
  void drop_held();
  // Replays.
  void begin(const std::string& cause, TimePoint now);
  void begin_replay(Purpose purpose, std::uint64_t from, TimePoint now);
  void finish_history(bool complete, TimePoint now);
  void resync(const std::string& cause, TimePoint now);
  void restart(const std::string& cause, TimePoint now);
  // Trust.
  void set_trust(Trust trust, std::string reason);
  void distrust(Distrust kind, std::string reason);
  void lose(std::string reason);
  void forget(const std::string& reason);
  void ask_full_reports();
  void judge_answers(std::uint64_t predicted, std::uint64_t reported, TimePoint now);
  bool is_other_rank(const KvBatch& batch);
  // Stamps.
  [[nodiscard]] const Stamp* stamp_of(std::uint64_t sequence) const;

  Options options_;
  Stats stats_;
  Trust trust_ = Trust::kUnknown;
  Distrust distrust_ = Distrust::kNone;
  std::string reason_ = "not connected yet";
  std::deque<SourceAction> actions_;
  bool was_connected_ = false;

  std::optional<std::uint64_t> last_;  // Applied.
  bool from_start_ = false;            // Without last_: the next batch is number 0.
  std::vector<Stamp> stamps_;          // Of applied numbers, by number modulo.
  std::map<std::uint64_t, KvBatch> held_;
  std::size_t held_bytes_ = 0;
  std::optional<Replay> replay_;
  std::uint64_t tickets_ = 0;
  bool overflow_pending_ = false;
  std::string truncated_;  // Why the history is incomplete; empty if it is not.

  EventFilter filter_;
  AnswerCheck answers_;
  SilenceCheck silence_;
  std::uint32_t full_reports_left_ = 0;
  std::uint32_t exact_in_row_ = 0;
  bool resynced_ = false;
};

}  // namespace pegaflow::index
