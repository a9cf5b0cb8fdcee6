#include "engine/store/check.h"

#include <unordered_map>
#include <vector>

namespace pegaflow::engine {

Result<void> StoreCheck::run() const {
  PEGA_TRY(check_holds());
  PEGA_TRY(check_jobs());
  PEGA_TRY(check_leases());
  return check_shares();
}

Result<void> StoreCheck::check_holds() const {
  std::unordered_map<FrameIndex, std::uint32_t> holds;
  std::uint64_t listed = 0;
  const auto count = [&](const FrameList& list) {
    listed += list.size();
    for (const FrameIndex frame : list) ++holds[frame];
  };
  for (std::uint32_t row = store_.claims.oldest(); row != ClaimTable::kNone;
       row = store_.claims.newer(row)) {
    count(store_.claims[row].blocks);
  }
  for (std::uint32_t row = store_.pins.oldest(); row != PinTable::kNone;
       row = store_.pins.newer(row)) {
    count(store_.pins[row].blocks);
  }
  for (std::uint32_t row = store_.leases.oldest(); row != LeaseTable::kNone;
       row = store_.leases.newer(row)) {
    count(store_.leases[row].blocks);
  }
  for (const Work& work : store_.queue) {
    if (const auto* const back = std::get_if<GiveBackWork>(&work)) count(back->blocks);
  }
  for (FrameIndex frame = store_.blocks.table().next_touched(0); frame != kNoFrame;
       frame = store_.blocks.table().next_touched(frame + 1)) {
    const auto held = holds.find(frame);
    const std::uint32_t wanted = held == holds.end() ? 0 : held->second;
    if (store_.blocks[frame].holds != wanted) {
      return fail(Errc::kInternal, "row {} has {} holds and counts {}", frame, wanted,
                  store_.blocks[frame].holds);
    }
    if (held != holds.end()) holds.erase(held);
  }
  if (!holds.empty()) return fail(Errc::kInternal, "a row is held that no extent has");
  if (listed != store_.blocks.holds()) {
    return fail(Errc::kInternal, "{} blocks are listed, {} are counted", listed,
                store_.blocks.holds());
  }
  return {};
}

Result<void> StoreCheck::check_jobs() const {
  std::unordered_map<FrameIndex, std::uint32_t> owner;
  std::uint32_t rows = 0;
  std::uint64_t frames = 0;
  std::unordered_map<HolderId, std::uint32_t> writing_of;
  for (std::uint32_t row = 0; store_.jobs.knows(row); ++row) {
    const Job& job = store_.jobs[row];
    if (job.writers.empty()) continue;
    ++rows;
    frames += job.frames.size();
    std::uint32_t writing = 0;
    std::uint32_t published = 0;
    for (const std::uint32_t number : job.writers) {
      if (number == Job::kNoPage && job.fate == Job::Fate::kLive) ++published;
      if (!Job::is_row(number)) continue;
      const ShardWriter& writer = store_.jobs.writer_row(number);
      ++(writer.has_published ? published : writing);
      if (!writer.has_published) ++writing_of[writer.holder->id];
      if (writer.job != row) return fail(Errc::kInternal, "a writer has lost its job");
    }
    if (writing != job.writing || published != job.published) {
      return fail(Errc::kInternal, "job {} counts {} writing and {} published shards, not {}, {}",
                  job.id.number, job.writing, job.published, writing, published);
    }
    for (const FrameIndex frame : job.frames) {
      const Block& block = store_.blocks[frame];
      if (block.state != FrameState::kWritten || block.owner != row ||
          !owner.emplace(frame, row).second) {
        return fail(Errc::kInternal, "row {} is not written by job {} alone", frame, job.id.number);
      }
      if (job.fate == Job::Fate::kLive && !block.indexed && store_.jobs.may_publish(row)) {
        return fail(Errc::kInternal, "row {} of job {} has lost its key", frame, job.id.number);
      }
    }
  }
  for (const auto& [id, holder] : store_.holders.all()) {
    if (holder.writing != writing_of[id]) {
      return fail(Errc::kInternal, "a holder counts {} jobs that it writes, not {}", holder.writing,
                  writing_of[id]);
    }
  }
  std::uint64_t by_fate = 0;
  for (const Job::Fate fate :
       {Job::Fate::kLive, Job::Fate::kForgotten, Job::Fate::kWriterLost, Job::Fate::kEnded}) {
    by_fate += store_.jobs.frames(fate);
  }
  std::uint32_t written = store_.blocks.table().written_count();
  for (const FetchState state :
       {FetchState::kInFlight, FetchState::kGivenUp, FetchState::kQuiesced}) {
    written -= store_.blocks.table().fetched(state).frames;
  }
  if (frames != written || frames != by_fate || rows != store_.jobs.size()) {
    return fail(Errc::kInternal, "{} jobs have {} frames, {} are written, {} counted by fate", rows,
                frames, written, by_fate);
  }
  return {};
}

Result<void> StoreCheck::check_shares() const {
  std::unordered_map<std::uint32_t, std::uint64_t> held;
  std::unordered_map<std::uint32_t, std::uint64_t> pinned_of_claim;
  std::uint64_t lost = 0;
  for (std::uint32_t row = store_.pins.oldest(); row != PinTable::kNone;
       row = store_.pins.newer(row)) {
    const Pin& pin = store_.pins[row];
    const std::uint32_t claim = store_.claims.find(pin.claim, pin.claim_serial);
    if (claim != ClaimTable::kNone) {
      pinned_of_claim[claim] += pin.blocks.size() * pin.frame_bytes;
    } else {
      held[pin.instance] += pin.blocks.size() * pin.frame_bytes;
    }
    if (pin.holder->is_lost) lost += pin.blocks.size();
  }
  for (std::uint32_t row = store_.claims.oldest(); row != ClaimTable::kNone;
       row = store_.claims.newer(row)) {
    held[store_.claims[row].holder->instance] +=
        store_.claims[row].blocks.size() * store_.claims[row].frame_bytes;
    if (pinned_of_claim[row] != store_.claims[row].pinned_bytes) {
      return fail(Errc::kInternal, "a claim counts {} pinned bytes and has {}",
                  store_.claims[row].pinned_bytes, pinned_of_claim[row]);
    }
  }
  std::unordered_map<std::uint32_t, std::uint32_t> holders_of;
  for (const auto& [id, holder] : store_.holders.all()) ++holders_of[holder.instance];
  for (const auto& [number, instance] : store_.holders.instances()) {
    if (instance.held_bytes != held[number] || instance.holders != holders_of[number] ||
        (instance.held_bytes == 0 && instance.holders == 0)) {
      return fail(Errc::kInternal, "instance {} counts {} held bytes and has {}", number,
                  instance.held_bytes, held[number]);
    }
    held.erase(number);
  }
  for (const auto& [number, bytes_held] : held) {
    if (bytes_held != 0) return fail(Errc::kInternal, "instance {} is not known", number);
  }
  if (lost != store_.pins.blocks_of_lost()) {
    return fail(Errc::kInternal, "{} blocks are pinned by lost readers, {} counted", lost,
                store_.pins.blocks_of_lost());
  }
  return {};
}

Result<void> StoreCheck::check_leases() const {
  std::uint32_t rows = 0;
  std::uint64_t listed = 0;
  std::uint64_t bytes = 0;
  for (std::uint32_t row = store_.leases.oldest(); row != LeaseTable::kNone;
       row = store_.leases.newer(row)) {
    ++rows;
    listed += store_.leases[row].blocks.size();
    bytes += store_.leases[row].blocks.size() * store_.leases[row].frame_bytes;
    if (store_.leases.find(store_.leases[row].id) != row) {
      return fail(Errc::kInternal, "the name of a lease does not lead to it");
    }
  }
  if (rows != store_.leases.size() || rows != store_.leases.due_count() ||
      listed != store_.leases.blocks() || bytes != store_.leases.bytes()) {
    return fail(Errc::kInternal, "{} leases lend {} blocks of {} bytes, {}, {} and {} are counted",
                rows, listed, bytes, store_.leases.size(), store_.leases.blocks(),
                store_.leases.bytes());
  }
  return {};
}

}  // namespace pegaflow::engine
