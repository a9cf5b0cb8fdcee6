#include "engine/store/resident_blocks.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/assert.h"

namespace pegaflow::engine {

ResidentBlocks::ResidentBlocks(const BlockStore::Options& options, const Clock& clock,
                               const SpaceTable& spaces, BlockTable table, LostBlocks losses)
    : options_(options),
      clock_(clock),
      spaces_(spaces),
      made_(options.kept == nullptr ? clock.now() : options.kept->made()),
      held_limit_(static_cast<std::uint64_t>(static_cast<double>(options.pool_bytes) *
                                             options.server_share)),
      table_(std::move(table)),
      losses_(std::move(losses)) {}

void ResidentBlocks::read_clock() {
  second_ = static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(clock_.now() - made_).count());
}

// ---- holds

void ResidentBlocks::prefetch_ahead(std::span<const FrameIndex> frames, std::size_t i) const {
  constexpr std::size_t kAhead = 16;
  if (i + 2 * kAhead < frames.size()) table_.prefetch_block(frames[i + 2 * kAhead]);
  if (i + kAhead < frames.size()) table_.prefetch_neighbours(frames[i + kAhead]);
}

ResidentBlocks::HeldPrefix ResidentBlocks::hold_prefix(const Space& space,
                                                       std::span<const BlockKey> keys,
                                                       std::uint64_t room) {
  // First find the blocks, then hold them: so the neighbors in the order of eviction, which lie
  // anywhere, are prefetched meanwhile. One block beyond the limit shows that there is one.
  table_.begin_claim(space.shape);
  HeldPrefix held;
  std::vector<FrameIndex>& found = held.frames;
  found.reserve(std::min<std::size_t>(keys.size(), room + 1));
  table_.find_each(space.shape, space.id, keys, [&](std::size_t, FrameIndex frame) {
    if (!table_.is_readable(frame) || found.size() > room) return false;
    found.push_back(frame);
    return true;
  });
  for (std::size_t i = 0; i < found.size(); ++i) {
    prefetch_ahead(found, i);
    held.is_shortened = i == room || !may_hold(space, found[i]);
    if (held.is_shortened) {
      found.resize(i);
      break;
    }
    table_.hold(found[i]);
    note(found[i], true);
  }
  holds_ += found.size();
  return held;
}

bool ResidentBlocks::find_all(const Space& space, std::span<const BlockKey> keys,
                              std::vector<FrameIndex>& found) const {
  found.reserve(keys.size());
  const std::size_t readable =
      table_.find_each(space.shape, space.id, keys, [&](std::size_t, FrameIndex frame) {
        if (!table_.is_readable(frame)) return false;
        found.push_back(frame);
        return true;
      });
  return readable == keys.size();
}

std::size_t ResidentBlocks::count_not_held(std::span<const FrameIndex> frames) const {
  return static_cast<std::size_t>(std::count_if(
      frames.begin(), frames.end(), [this](FrameIndex frame) { return table_[frame].holds == 0; }));
}

void ResidentBlocks::hold_all(std::span<const FrameIndex> frames) {
  for (std::size_t i = 0; i < frames.size(); ++i) {
    prefetch_ahead(frames, i);
    table_.hold(frames[i]);
    note(frames[i], true);
  }
  holds_ += frames.size();
}

Result<void> ResidentBlocks::hold_again(std::span<const FrameIndex> frames) {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (i + kAhead < frames.size()) table_.prefetch_row(frames[i + kAhead]);
    if (!is_openable(frames[i])) {
      const bool is_in_flight = table_.is_in_flight(frames[i]);
      while (i != 0) table_.unhold_again(frames[--i]);
      if (is_in_flight) return fail(Errc::kBusy, "a block of the claim is in flight");
      return fail(Errc::kGone, "a block of the claim did not arrive, or has wrong bytes");
    }
    table_.hold_again(frames[i]);
  }
  holds_ += frames.size();
  return {};
}

void ResidentBlocks::give_back(FrameIndex frame) {
  const bool is_evictable = table_.unhold(frame, second_);
  const Block& block = table_[frame];
  if (!is_evictable) {
    const bool is_over =
        block.state == FrameState::kFetched && table_.fetch_state(frame) == FetchState::kQuiesced;
    if (is_over && block.holds == 0) table_.free(frame);
    return;
  }
  if (!block.indexed) {
    table_.free(frame);  // Invalidated, and counted at that time.
  } else if (!spaces_.is_live(block.space)) {
    drop(frame, Miss::kReset);
  }
}

// ---- blocks that come

void ResidentBlocks::free_key(FrameIndex present) {
  if (table_[present].state == FrameState::kSealed) {
    drop(present, Miss::kEvicted);  // Its extent is leaving.
  } else {
    // Its job will never seal it, but a writer may still write: the key moves to another frame.
    table_.unlist(present);
  }
}

void ResidentBlocks::discard(FrameIndex frame) {
  const Block& block = table_[frame];
  // Otherwise its key has moved to another frame.
  if (block.indexed) remember_loss(block.space, block.key, Miss::kSaveFailed);
  table_.free(frame);
}

bool ResidentBlocks::give_up(FrameIndex frame) {
  PEGA_ASSERT(table_[frame].state == FrameState::kFetched, "frame {} is not fetched", frame);
  if (!table_.is_in_flight(frame)) return false;
  table_.unlist(frame);
  table_.set_fetch_state(frame, FetchState::kGivenUp);
  return true;
}

void ResidentBlocks::quiesced(FrameIndex frame) {
  PEGA_ASSERT(table_.fetch_state(frame) == FetchState::kGivenUp, "frame {} is quiesced twice",
              frame);
  if (table_[frame].holds == 0) return table_.free(frame);
  table_.set_fetch_state(frame, FetchState::kQuiesced);
}

// ---- blocks that go

void ResidentBlocks::drop(FrameIndex frame, Miss why, bool is_victim) {
  const Block& block = table_[frame];
  const Miss reason = spaces_.is_live(block.space) ? why : Miss::kReset;
  if (block.indexed && reason != Miss::kReset) note(frame, false);
  remember_loss(block.space, block.key, reason);
  if (reason == Miss::kEvicted) {
    ++counted_.evictions;
    if (table_.is_replica(frame)) ++counted_.evicted_replicas;
    counted_.evicted_age.record(second_ - block.sealed_s);
    counted_.evicted_idle.record(second_ - block.idle_since_s);
    is_victim ? table_.evict(frame) : table_.free(frame);
    return;
  }
  ++(reason == Miss::kCleaned ? counted_.cleaned : counted_.retired);
  counted_.dropped_age.record(second_ - block.sealed_s);
  table_.free(frame);
}

void ResidentBlocks::evict(FrameIndex victim) {
  ahead_.step(table_, victim, [this](FrameIndex next) { prefetch_drop(next); });
  drop(victim, Miss::kEvicted, true);
}

void ResidentBlocks::prefetch_drop(FrameIndex frame) const {
  const Block& block = table_[frame];
  prefetch_loss(block.space, block.key);
  table_.prefetch_free(frame);
}

bool ResidentBlocks::invalidate(FrameIndex frame) {
  const Block& block = table_[frame];
  if (!block.indexed) return false;
  remember_loss(block.space, block.key, Miss::kCorrupt);
  if (spaces_.is_live(block.space)) note(frame, false);
  ++counted_.invalidated;
  if (block.holds == 0) {
    table_.free(frame);
  } else {
    table_.unlist(frame);
  }
  return true;
}

std::optional<std::uint32_t> ResidentBlocks::next_victim_idle_s() {
  read_clock();
  std::optional<std::uint32_t> longest;
  for (std::uint32_t shape = 0; shape < table_.shape_count(); ++shape) {
    if (!table_.has_shape(ShapeId{shape})) continue;
    const FrameIndex next = victim(ShapeId{shape});
    if (next == kNoFrame) continue;
    longest = std::max(longest.value_or(0), second_ - table_[next].idle_since_s);
  }
  return longest;
}

// ---- the journal

Result<void> ResidentBlocks::keep_journal() {
  if (journal_) return {};
  PEGA_TRY_LET(auto made, Journal::create(options_.journal_entries, options_.journal_first));
  journal_.emplace(std::move(made));
  return {};
}

BlockStore::JournalPart ResidentBlocks::journal(std::span<const SpaceId> spaces, std::uint64_t from,
                                                std::size_t limit) const {
  BlockStore::JournalPart part;
  if (!journal_) return part;
  part.next = journal_->end();
  if (from == BlockStore::kJournalEnd) return part;
  part.has_lost = from < journal_->begin() || from > journal_->end();
  const std::uint64_t begin = part.has_lost ? journal_->begin() : from;
  part.next = begin + std::min<std::uint64_t>(limit, journal_->end() - begin);
  part.has_more = part.next != journal_->end();
  part.entries.reserve(part.next - begin);
  std::vector<std::pair<SpaceId, std::uint8_t>> places;
  places.reserve(spaces.size());
  for (const SpaceId space : spaces) {
    places.emplace_back(space, static_cast<std::uint8_t>(places.size()));
  }
  std::sort(places.begin(), places.end());
  for (std::uint64_t position = begin; position != part.next; ++position) {
    const Journal::Entry& entry = (*journal_)[position];
    const auto found =
        std::lower_bound(places.begin(), places.end(), std::pair(entry.space, std::uint8_t{0}));
    if (found == places.end() || found->first != entry.space) continue;
    part.entries.push_back({entry.key, entry.is_present, found->second, entry.depth});
  }
  return part;
}

// ---- statistics

void ResidentBlocks::report(BlockStore::Stats& stats) const {
  stats.sealed_bytes = table_.sealed_bytes();
  stats.written_bytes = table_.written_bytes();
  stats.used_bytes = stats.sealed_bytes + stats.written_bytes;
  const BlockTable::Fetched& in_flight = table_.fetched(FetchState::kInFlight);
  stats.fetch_bytes = table_.fetched_bytes();
  stats.quarantined_bytes += stats.fetch_bytes - in_flight.bytes;
  stats.held_bytes = table_.held_bytes();
  stats.units = table_.extents().unit_count();
  stats.free_units = table_.extents().free_units();
  stats.unit_steps = table_.extents().visited();
  stats.extents_taken = table_.exchanged_extents();
  stats.sealed = table_.sealed_count();
  stats.in_flight = in_flight.frames;
  stats.replicas = table_.replica_count();
  stats.quarantined_fetch =
      table_.fetched(FetchState::kGivenUp).frames + table_.fetched(FetchState::kQuiesced).frames;
  stats.held = table_.held_count();
  stats.evictions = counted_.evictions;
  stats.evicted_replicas = counted_.evicted_replicas;
  stats.cleaned = counted_.cleaned;
  stats.retired = counted_.retired;
  stats.invalidated = counted_.invalidated;
  stats.evicted_age = counted_.evicted_age;
  stats.dropped_age = counted_.dropped_age;
  stats.evicted_idle = counted_.evicted_idle;
}

std::uint64_t ResidentBlocks::memory_bytes() const {
  // Frames are listed by their holds, and by the jobs that write them.
  const std::uint64_t listed = holds_ + table_.written_count();
  return table_.memory_bytes() + losses_.memory_bytes() + listed * sizeof(FrameIndex) +
         (journal_ ? journal_->memory_bytes() : 0);
}

}  // namespace pegaflow::engine
