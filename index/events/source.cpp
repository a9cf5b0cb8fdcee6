#include "index/events/source.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::index {
namespace {

constexpr std::size_t kStamps = 1024;

// "batch 7", "batches 7 to 9".
std::string batches(std::uint64_t first, std::uint64_t last) {
  return first == last ? fmt::format("batch {}", first)
                       : fmt::format("batches {} to {}", first, last);
}

}  // namespace

std::string_view to_string(Trust trust) noexcept {
  static constexpr std::array<std::string_view, kTrusts> kNames{"unknown", "syncing",   "exact",
                                                                "partial", "untrusted", "gone"};
  return kNames[static_cast<std::size_t>(trust)];
}

Source::Source(const Options& options)
    : options_(options),
      stamps_(kStamps),
      answers_(options.window, options.tolerated_error),
      silence_(options.stall_answers, options.stall_factor, options.least_stall) {}

// ---- connection

void Source::connected(TimePoint now) {
  if (trust_ == Trust::kGone) return;
  if (!std::exchange(was_connected_, true)) {
    silence_.reset(now);
    begin("first connection", now);
  } else if (!options_.can_replay) {
    restart("the connection was lost", now);
  } else if (last_ && trust_ != Trust::kSyncing) {
    // The connection may lead to another process, whose numbers can continue where these ended.
    begin_replay(Purpose::kIdentity, *last_, now);
  } else {
    resync("new connection", now);  // Batches that wait may be of another process, too.
  }
}

void Source::disconnected(TimePoint /*now*/) {
  if (trust_ == Trust::kGone) return;
  // Whether the same process comes back is decided in connected(). Until then what is known stays
  // valid: an engine that is gone gets no requests. Batches that wait are replayed after that
  // decision.
  replay_.reset();
  overflow_pending_ = false;
  drop_held();
}

// ---- batches

void Source::live(std::uint64_t sequence, KvBatch batch, TimePoint now) {
  if (trust_ == Trust::kGone || is_other_rank(batch)) return;
  if (distrust_ == Distrust::kSilence) resync("events arrive again", now);
  silence_.event(now);
  const Stamp stamp{sequence, batch.timestamp, batch.wire_bytes};
  const Stamp* known = last_ && sequence <= *last_ ? stamp_of(sequence) : nullptr;
  Stamp waiting;
  if (const auto held = held_.find(sequence); held != held_.end()) {
    waiting = {sequence, held->second.timestamp, held->second.wire_bytes};
    known = &waiting;
  }
  if (known != nullptr && *known == stamp) {
    ++stats_.duplicates;
    return;
  }
  if (const auto cause = contradiction(sequence, batch)) restart(*cause, now);
  accept(sequence, std::move(batch), now);
}

// Why the batch, which is no duplicate, cannot be of the same process as the known ones.
std::optional<std::string> Source::contradiction(std::uint64_t sequence, const KvBatch& batch) {
  if ((last_ && sequence <= *last_) || held_.contains(sequence)) {
    return fmt::format("batch {} came again with other contents, so the engine was restarted",
                       sequence);
  }
  const auto later = held_.lower_bound(sequence);
  if (later == held_.end() || later->second.undecodable || batch.undecodable) return std::nullopt;
  if (later->second.timestamp >= batch.timestamp) return std::nullopt;
  return fmt::format("batch {} is younger than batch {}, so the engine was restarted", sequence,
                     later->first);
}

std::optional<std::uint64_t> Source::expected() const {
  if (last_) return *last_ + 1;
  return from_start_ ? std::optional<std::uint64_t>(0) : std::nullopt;
}

// Live batches are held while a replay brings the ones before them.
bool Source::is_waiting() const { return replay_ && replay_->purpose != Purpose::kHole; }

void Source::accept(std::uint64_t sequence, KvBatch batch, TimePoint now) {
  if (is_waiting()) {
    hold(sequence, std::move(batch), now);
    return;
  }
  const std::optional<std::uint64_t> next = expected();
  if (next && sequence != *next) {
    hold(sequence, std::move(batch), now);
    return;
  }
  if (!next && sequence == 0) {
    set_trust(Trust::kExact, "every batch since the engine's start was received");
  }
  apply(sequence, std::move(batch));
  release_held(now);
}

void Source::hold(std::uint64_t sequence, KvBatch batch, TimePoint now) {
  const std::size_t bytes = batch.bytes();
  make_room(bytes, now);
  if (held_.empty() && !is_waiting() && expected().value_or(sequence) == sequence) {
    apply(sequence, std::move(batch));  // Making room gave up the hole before it.
    return;
  }
  held_bytes_ += bytes;
  held_.emplace(sequence, std::move(batch));
  release_held(now);  // Opens the replay of the hole, unless one is open.
}

// Each round gives up what the held batches wait for, and thereby releases at least one of them.
void Source::make_room(std::size_t bytes, TimePoint now) {
  while (!held_.empty() &&
         (held_.size() >= options_.held_batches || held_bytes_ + bytes > options_.held_bytes)) {
    const Purpose purpose = replay_ ? replay_->purpose : Purpose::kHole;
    if (purpose == Purpose::kIdentity && !replay_->confirmed) {
      restart("the connection was lost, and the engine did not replay in time", now);
      return;
    }
    replay_.reset();
    if (purpose == Purpose::kHistory) {
      truncated_ = "too many batches arrived during the replay of the history";
      finish_history(false, now);
    }
    if (held_.empty()) return;
    if (const auto next = expected(); next && held_.begin()->first > *next) {
      skip_to(held_.begin()->first, "too many batches arrived behind them");
    }
    replay_.reset();
    release_held(now);
  }
}

void Source::drop_held() {
  held_.clear();
  held_bytes_ = 0;
}

// Applies held batches as far as they continue the sequence; opens the replay of a hole.
void Source::release_held(TimePoint now) {
  if (is_waiting()) return;
  while (!held_.empty()) {
    const std::uint64_t sequence = held_.begin()->first;
    const std::optional<std::uint64_t> next = expected();
    if (next && sequence > *next) {
      if (replay_) return;
      ++stats_.gaps;
      if (options_.can_replay) {
        begin_replay(Purpose::kHole, *next, now);
        return;
      }
      skip_to(sequence, "the engine has no replay endpoint");
    }
    KvBatch batch = std::move(held_.begin()->second);
    held_.erase(held_.begin());
    held_bytes_ = held_.empty() ? 0 : held_bytes_ - batch.bytes();
    if (next && sequence < *next) continue;  // The replay brought it, too.
    apply(sequence, std::move(batch));
  }
  // A hole that is filled needs no more answers. One without an end, after an overflow, waits.
  if (replay_ && replay_->purpose == Purpose::kHole && !overflow_pending_) {
    ++stats_.filled;
    replay_.reset();
  }
}

// Gives up the batches before `sequence`, which is above the expected number.
void Source::skip_to(std::uint64_t sequence, std::string_view cause) {
  const std::uint64_t first = expected().value_or(0);
  stats_.lost += sequence - first;
  lose(fmt::format("{} {} lost: {}", batches(first, sequence - 1),
                   sequence - first == 1 ? "was" : "were", cause));
  last_ = sequence - 1;
}

void Source::apply(std::uint64_t sequence, KvBatch batch) {
  last_ = sequence;
  stamps_[sequence % kStamps] = {sequence, batch.timestamp, batch.wire_bytes};
  if (batch.undecodable) {
    ++stats_.undecodable;
    lose(fmt::format("batch {} could not be decoded", sequence));
    return;
  }
  ++stats_.applied;
  stats_.skipped_events += batch.skipped_events();
  filter_.apply(batch);
  stats_.other_groups = filter_.counts().other_groups;
  stats_.other_media = filter_.counts().other_media;
  bool cleared = false;
  for (const KvEvent& event : batch.events) {
    if (event.kind == EventKind::kStored) options_.block_size = event.block_size;
    cleared |= event.kind == EventKind::kCleared;
  }
  if (!batch.events.empty()) {
    SourceAction action;
    action.kind = SourceAction::Kind::kApply;
    action.batch = std::move(batch);
    action.sequence = sequence;
    actions_.push_back(std::move(action));
  }
  if (cleared) {
    truncated_.clear();
    if (trust_ == Trust::kPartial) {
      set_trust(Trust::kExact,
                "the engine's cache was emptied, and every batch since was received");
    }
  }
}

const Source::Stamp* Source::stamp_of(std::uint64_t sequence) const {
  const Stamp& stamp = stamps_[sequence % kStamps];
  return stamp.sequence == sequence ? &stamp : nullptr;
}

bool Source::is_other_rank(const KvBatch& batch) {
  if (!options_.rank || !batch.rank || *batch.rank == *options_.rank) return false;
  if (distrust_ != Distrust::kRank) {
    const std::string reason = fmt::format("events of rank {} arrive on the stream of rank {}",
                                           *batch.rank, *options_.rank);
    forget(reason);
    distrust(Distrust::kRank, reason);
  }
  return true;
}

// ---- replays

void Source::begin(const std::string& cause, TimePoint now) {
  truncated_.clear();
  from_start_ = false;
  if (options_.can_replay) {
    set_trust(Trust::kSyncing, cause + ": the engine's history is being replayed");
    begin_replay(Purpose::kHistory, 0, now);
    return;
  }
  set_trust(Trust::kPartial, cause +
                                 ": what the engine cached before is unknown, because it has no "
                                 "replay endpoint");
  ask_full_reports();
}

void Source::begin_replay(Purpose purpose, std::uint64_t from, TimePoint now) {
  ++stats_.replays;
  replay_ = Replay{.purpose = purpose, .ticket = ++tickets_, .progress = now};
  SourceAction action;
  action.kind = SourceAction::Kind::kReplay;
  action.from = from;
  action.ticket = replay_->ticket;
  actions_.push_back(std::move(action));
}

void Source::replayed(std::uint64_t ticket, std::uint64_t sequence, KvBatch batch, TimePoint now) {
  if (!replay_ || replay_->ticket != ticket || is_other_rank(batch)) return;
  replay_->progress = now;
  if (replay_->purpose == Purpose::kIdentity && !std::exchange(replay_->confirmed, true)) {
    const Stamp* const known = stamp_of(sequence);
    if (known == nullptr || *known != Stamp{sequence, batch.timestamp, batch.wire_bytes}) {
      restart("another process answers at the engine's address", now);
    }
    return;
  }
  const std::optional<std::uint64_t> next = expected();
  if (next && sequence < *next) return;  // Received meanwhile.
  if (next && sequence > *next) {
    skip_to(sequence, "the engine no longer has them");
  } else if (!next && sequence > 0) {
    stats_.lost += sequence;
    truncated_ = fmt::format("the engine no longer has {}", batches(0, sequence - 1));
  }
  apply(sequence, std::move(batch));
  release_held(now);
}

void Source::replay_ended(std::uint64_t ticket, bool complete, TimePoint now) {
  if (!replay_ || replay_->ticket != ticket) return;
  const Replay ended = *replay_;
  replay_.reset();
  const bool overflow = std::exchange(overflow_pending_, false);
  if (ended.purpose == Purpose::kHistory) {
    finish_history(complete, now);
  } else if (ended.purpose == Purpose::kIdentity && !ended.confirmed) {
    restart(complete ? "the engine no longer has the last known batch"
                     : "the connection was lost, and the engine did not replay",
            now);
    return;
  } else if (ended.purpose == Purpose::kHole) {
    const std::string_view cause =
        complete ? "the engine no longer has them" : "the engine did not replay them";
    if (!held_.empty() && held_.begin()->first > *expected()) {
      skip_to(held_.begin()->first, cause);
    } else if (!complete) {
      lose("batches were dropped here, and the engine did not replay them");
    }
  }
  release_held(now);
  if (overflow && ended.purpose != Purpose::kHole) overflowed(now);
}

void Source::finish_history(bool complete, TimePoint now) {
  if (!last_ && !complete) {
    set_trust(Trust::kPartial,
              "what the engine cached before is unknown: it did not replay its history");
    ask_full_reports();
  } else if (!truncated_.empty() || !complete) {
    set_trust(Trust::kPartial,
              truncated_.empty() ? "the replay of the history ended early" : truncated_);
    ask_full_reports();
  } else {
    from_start_ = !last_;
    set_trust(Trust::kExact, last_ ? "the engine's whole history was replayed"
                                   : "the engine has published nothing yet");
  }
  release_held(now);
}

void Source::overflowed(TimePoint now) {
  if (trust_ == Trust::kGone || !expected()) return;
  if (replay_) {
    overflow_pending_ = true;
    return;
  }
  ++stats_.gaps;
  if (!options_.can_replay) {
    lose("batches were dropped here, and the engine has no replay endpoint");
    return;
  }
  overflow_pending_ = true;  // Until the end marker: the end of the hole is not known.
  begin_replay(Purpose::kHole, *expected(), now);
}

void Source::restarted(std::string_view evidence, TimePoint now) {
  if (trust_ == Trust::kGone || !was_connected_) return;
  restart(fmt::format("{}, so the engine was restarted", evidence), now);
}

void Source::restart(const std::string& cause, TimePoint now) {
  ++stats_.restarts;
  filter_.reset();
  resynced_ = false;
  resync(cause, now);
}

std::optional<Source::Position> Source::position() const {
  const Stamp* const stamp = last_ ? stamp_of(*last_) : nullptr;
  if (!gives_credit() || stamp == nullptr) return std::nullopt;
  return Position{.sequence = stamp->sequence,
                  .timestamp = stamp->timestamp,
                  .bytes = stamp->bytes,
                  .is_exact = trust_ == Trust::kExact};
}

bool Source::resume(const Position& place, TimePoint now) {
  if (trust_ != Trust::kPartial || !options_.can_replay || !last_ || replay_) return false;
  const Stamp stamp{place.sequence, place.timestamp, static_cast<std::size_t>(place.bytes)};
  if (const Stamp* const own = stamp_of(place.sequence); own != nullptr && *own != stamp) {
    return false;
  }
  const std::string reason =
      fmt::format("continued from another router's snapshot at batch {}", place.sequence);
  forget(reason);
  last_ = place.sequence;
  stamps_.assign(kStamps, Stamp{});
  stamps_[place.sequence % kStamps] = stamp;
  truncated_.clear();
  answers_.reset();
  set_trust(place.is_exact ? Trust::kExact : Trust::kPartial, reason);
  begin_replay(Purpose::kIdentity, place.sequence, now);
  return true;
}

// Forgets everything and begins anew.
void Source::resync(const std::string& cause, TimePoint now) {
  distrust_ = Distrust::kNone;
  forget(cause);
  last_.reset();
  stamps_.assign(kStamps, Stamp{});
  drop_held();
  replay_.reset();
  overflow_pending_ = false;
  answers_.reset();
  silence_.reset(now);
  begin(cause, now);
}

void Source::tick(TimePoint now) {
  if (trust_ == Trust::kGone) return;
  if (replay_ && now - replay_->progress >= options_.replay_timeout) {
    replay_ended(replay_->ticket, false, now);
  }
  if (!gives_credit()) return;
  switch (silence_.judge(now)) {
    case SilenceCheck::Verdict::kFine:
      break;
    case SilenceCheck::Verdict::kProbe:
      ask_full_reports();
      break;
    case SilenceCheck::Verdict::kSilent:
      distrust(Distrust::kSilence,
               fmt::format("no event for {:.0f} s while the engine computed {} prompts",
                           silence_.silent_seconds(now), silence_.computed_prompts()));
      break;
  }
}

std::optional<TimePoint> Source::next_deadline() const {
  if (!replay_) return std::nullopt;
  return replay_->progress + options_.replay_timeout;
}

// ---- trust

void Source::answered(std::uint64_t prompt, std::uint64_t predicted, std::uint64_t reported,
                      TimePoint now) {
  if (!gives_credit()) return;
  // With less than two blocks computed, none of them need be new: the last one is computed again.
  if (prompt >= reported + 2 * std::uint64_t{options_.block_size}) silence_.computed();
  const std::uint64_t difference = std::max(predicted, reported) - std::min(predicted, reported);
  exact_in_row_ = difference <= options_.block_size ? exact_in_row_ + 1 : 0;
  if (exact_in_row_ >= options_.exact_answers) full_reports_left_ = 0;
  judge_answers(predicted, reported, now);
}

void Source::judge_answers(std::uint64_t predicted, std::uint64_t reported, TimePoint now) {
  const bool knows_all = trust_ == Trust::kExact;
  switch (answers_.add(predicted, reported, knows_all)) {
    case AnswerCheck::Verdict::kOpen:
      return;
    case AnswerCheck::Verdict::kGood:
      resynced_ = false;
      return;
    case AnswerCheck::Verdict::kBad:
      break;
  }
  const AnswerSums& sums = answers_.bad();
  std::string reason =
      fmt::format("over {} requests {} cached tokens were predicted, and the engine reported {}",
                  sums.answers, sums.predicted, sums.reported);
  if (std::exchange(resynced_, true)) {
    distrust(Distrust::kAnswers, std::move(reason));
    return;
  }
  ++stats_.resyncs;
  resync(reason, now);
}

void Source::set_trust(Trust trust, std::string reason) {
  if (distrust_ != Distrust::kNone && trust != Trust::kUntrusted && trust != Trust::kGone) return;
  if (trust_ == trust && reason_ == reason) return;
  trust_ = trust;
  reason_ = std::move(reason);
  SourceAction action;
  action.kind = SourceAction::Kind::kTrust;
  action.trust = trust_;
  action.reason = reason_;
  actions_.push_back(std::move(action));
}

void Source::distrust(Distrust kind, std::string reason) {
  distrust_ = kind;
  full_reports_left_ = 0;
  set_trust(Trust::kUntrusted, std::move(reason));
}

// Batches were lost: a removal among them would leave credit for blocks that are gone.
void Source::lose(std::string reason) {
  forget(reason);
  if (replay_ && replay_->purpose == Purpose::kHistory) {
    truncated_ = std::move(reason);
    return;
  }
  set_trust(Trust::kPartial, std::move(reason));
  ask_full_reports();
}

void Source::forget(const std::string& reason) {
  ++stats_.forgotten;
  SourceAction action;
  action.kind = SourceAction::Kind::kForget;
  action.reason = reason;
  actions_.push_back(std::move(action));
}

void Source::ask_full_reports() {
  full_reports_left_ = options_.full_reports;
  exact_in_row_ = 0;
}

bool Source::take_full_report() {
  if (full_reports_left_ == 0) return false;
  --full_reports_left_;
  ++stats_.full_reports;
  return true;
}

void Source::remove(TimePoint /*now*/) {
  if (trust_ == Trust::kGone) return;
  forget("the engine was removed");
  drop_held();
  replay_.reset();
  full_reports_left_ = 0;
  set_trust(Trust::kGone, "the engine was removed");
}

bool Source::next(SourceAction& action) {
  if (actions_.empty()) return false;
  action = std::move(actions_.front());
  actions_.pop_front();
  return true;
}

}  // namespace pegaflow::index
