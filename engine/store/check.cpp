#include <numeric>
#include <unordered_map>
#include <vector>

#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

Result<void> BlockStore::check() const {
  PEGA_TRY(impl_->blocks.check());
  PEGA_TRY(impl_->check_holds());
  PEGA_TRY(impl_->check_jobs());
  PEGA_TRY(impl_->check_leases());
  const MissCounts& misses = impl_->counted.misses;
  const std::uint64_t told = std::accumulate(misses.begin(), misses.end(), std::uint64_t{0});
  if (told != impl_->counted.lookup_misses) {
    return fail(Errc::kInternal, "{} misses have a reason, {} are counted", told,
                impl_->counted.lookup_misses);
  }
  return impl_->check_shares();
}

Result<void> BlockStore::Impl::check_holds() const {
  std::unordered_map<FrameIndex, std::uint32_t> holds;
  std::uint64_t listed = 0;
  const auto count = [&](const FrameList& list) {
    listed += list.size();
    for (const FrameIndex frame : list) ++holds[frame];
  };
  for (std::uint32_t row = claims.oldest(); row != ClaimTable::kNone; row = claims.newer(row)) {
    count(claims[row].blocks);
  }
  for (std::uint32_t row = pins.oldest(); row != PinTable::kNone; row = pins.newer(row)) {
    count(pins[row].blocks);
  }
  for (std::uint32_t row = leases.oldest(); row != LeaseTable::kNone; row = leases.newer(row)) {
    count(leases[row].blocks);
  }
  for (const Work& work : queue) {
    if (const auto* const back = std::get_if<GiveBackWork>(&work)) count(back->blocks);
  }
  for (FrameIndex frame = blocks.next_touched(0); frame != kNoFrame;
       frame = blocks.next_touched(frame + 1)) {
    const auto held = holds.find(frame);
    const std::uint32_t wanted = held == holds.end() ? 0 : held->second;
    if (blocks[frame].holds != wanted) {
      return fail(Errc::kInternal, "row {} has {} holds and counts {}", frame, wanted,
                  blocks[frame].holds);
    }
    if (held != holds.end()) holds.erase(held);
  }
  if (!holds.empty()) return fail(Errc::kInternal, "a row is held that no extent has");
  if (listed != listed_blocks) {
    return fail(Errc::kInternal, "{} blocks are listed, {} are counted", listed, listed_blocks);
  }
  return {};
}

Result<void> BlockStore::Impl::check_jobs() const {
  std::unordered_map<FrameIndex, std::uint32_t> owner;
  std::uint32_t rows = 0;
  std::uint64_t frames = 0;
  std::unordered_map<HolderId, std::uint32_t> writing_of;
  for (std::uint32_t row = 0; jobs.knows(row); ++row) {
    const Job& job = jobs[row];
    if (job.writers.empty()) continue;
    ++rows;
    frames += job.frames.size();
    std::uint32_t writing = 0;
    std::uint32_t published = 0;
    for (const std::uint32_t number : job.writers) {
      if (number == Job::kNotRequested || number == Job::kDone) continue;
      const Writer& writer = jobs.writer_row(number);
      ++(writer.has_published ? published : writing);
      if (!writer.has_published) ++writing_of[writer.holder->id];
      if (writer.job != row) return fail(Errc::kInternal, "a writer has lost its job");
    }
    if (writing != job.writing || published != job.published) {
      return fail(Errc::kInternal, "job {} counts {} writing and {} published shards, not {}, {}",
                  job.id.number, job.writing, job.published, writing, published);
    }
    for (const FrameIndex frame : job.frames) {
      const Block& block = blocks[frame];
      if (block.state != FrameState::kWritten || block.owner != row ||
          !owner.emplace(frame, row).second) {
        return fail(Errc::kInternal, "row {} is not written by job {} alone", frame, job.id.number);
      }
      if (job.fate == Job::Fate::kLive && !block.indexed && may_publish(job)) {
        return fail(Errc::kInternal, "row {} of job {} has lost its key", frame, job.id.number);
      }
    }
  }
  for (const auto& [id, holder] : holders) {
    if (holder.writing != writing_of[id]) {
      return fail(Errc::kInternal, "a holder counts {} jobs that it writes, not {}", holder.writing,
                  writing_of[id]);
    }
  }
  std::uint64_t by_fate = 0;
  for (const Job::Fate fate :
       {Job::Fate::kLive, Job::Fate::kForgotten, Job::Fate::kWriterLost, Job::Fate::kEnded}) {
    by_fate += jobs.frames(fate);
  }
  std::uint32_t written = blocks.written_count();
  for (const FetchState state :
       {FetchState::kInFlight, FetchState::kGivenUp, FetchState::kQuiesced}) {
    written -= blocks.fetched(state).frames;
  }
  if (frames != written || frames != by_fate || rows != jobs.size()) {
    return fail(Errc::kInternal, "{} jobs have {} frames, {} are written, {} counted by fate", rows,
                frames, written, by_fate);
  }
  return {};
}

Result<void> BlockStore::Impl::check_shares() const {
  std::unordered_map<std::uint32_t, std::uint64_t> held;
  std::unordered_map<std::uint32_t, std::uint64_t> pinned_of_claim;
  std::uint64_t lost = 0;
  for (std::uint32_t row = pins.oldest(); row != PinTable::kNone; row = pins.newer(row)) {
    const Pin& pin = pins[row];
    const std::uint32_t claim = claims.find(pin.claim, pin.claim_serial);
    if (claim != ClaimTable::kNone) {
      pinned_of_claim[claim] += pin.blocks.size() * pin.frame_bytes;
    } else {
      held[pin.instance] += pin.blocks.size() * pin.frame_bytes;
    }
    if (pin.holder->is_lost) lost += pin.blocks.size();
  }
  for (std::uint32_t row = claims.oldest(); row != ClaimTable::kNone; row = claims.newer(row)) {
    held[claims[row].holder->instance] += claims[row].blocks.size() * claims[row].frame_bytes;
    if (pinned_of_claim[row] != claims[row].pinned_bytes) {
      return fail(Errc::kInternal, "a claim counts {} pinned bytes and has {}",
                  claims[row].pinned_bytes, pinned_of_claim[row]);
    }
  }
  std::unordered_map<std::uint32_t, std::uint32_t> holders_of;
  for (const auto& [id, holder] : holders) ++holders_of[holder.instance];
  for (const auto& [number, instance] : instances) {
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
  if (lost != lost_pinned_blocks) {
    return fail(Errc::kInternal, "{} blocks are pinned by lost readers, {} counted", lost,
                lost_pinned_blocks);
  }
  return {};
}

}  // namespace pegaflow::engine
