#include "engine/store/fetcher.h"

#include <vector>

#include "base/assert.h"
#include "engine/store/reader.h"

namespace pegaflow::engine {

namespace {

std::uint64_t share(const BlockStore::Options& options, double part) {
  return static_cast<std::uint64_t>(static_cast<double>(options.pool_bytes) * part);
}

}  // namespace

Fetcher::Fetcher(const BlockStore::Options& options, ResidentBlocks& blocks, HolderTable& holders,
                 SpaceTable& spaces, const JobTable& jobs, Reader& reader, Reclaimer& reclaimer)
    : options_(options),
      blocks_(blocks),
      holders_(holders),
      spaces_(spaces),
      jobs_(jobs),
      reader_(reader),
      reclaimer_(reclaimer),
      fetch_limit_(share(options, options.fetch_share)),
      busy_limit_(options.pool_bytes - share(options, options.save_reserve)) {}

Result<BlockStore::Fetch> Fetcher::fetch(HolderId holder, SpaceId space, const Id128& token,
                                         std::size_t first, std::span<const BlockKey> keys,
                                         std::size_t fetchable, BlockStore::Evicts evicts) {
  Holder* const owner = holders_.active(holder);
  if (owner == nullptr) return fail(Errc::kGone, "fetch for a holder that left");
  PEGA_TRY_LET(const std::uint32_t row, reader_.extensible(*owner, space, token, first));
  BlockStore::Fetch made;
  Space* const where = spaces_.live(space);
  if (where == nullptr) return made;

  const std::uint64_t room = holders_.room(*owner) / blocks_.frame_bytes(where->shape);
  std::uint32_t steps = options_.slice_blocks;
  std::vector<FrameIndex> held;
  blocks_.read_clock();
  blocks_.table().find_each(where->shape, space, keys, [&](std::size_t i, FrameIndex present) {
    const bool is_here = blocks_.table().is_readable(present);
    const bool is_in_flight = present != kNoFrame && blocks_.table().is_in_flight(present);
    const bool is_present = is_here || is_in_flight;
    if (!is_present && (i >= fetchable || is_being_saved(present))) return false;
    if (held.size() == room || !blocks_.may_hold(*where, is_present ? present : kNoFrame)) {
      ++counted_.claims_shortened;
      return false;
    }
    const FrameIndex frame = is_present ? present : bring(*where, keys[i], present, evicts, steps);
    if (frame == kNoFrame) {
      ++counted_.fetches_no_room;
      return false;
    }
    // Hold it at once, so that no later key takes its frame.
    blocks_.hold(frame);
    held.push_back(frame);
    if (is_here) {
      blocks_.note_present(frame);
      return true;
    }
    ++made.in_flight;
    ++(is_in_flight ? counted_.fetches_joined : counted_.fetches);
    if (!is_in_flight) made.frames.push_back({i, frame});
    return true;
  });
  made.blocks = held.size();
  if (!held.empty()) reader_.extend_claim(row, *owner, *where, token, held);
  return made;
}

bool Fetcher::has_room_to_fetch(HolderId holder,
                                std::span<const BlockStore::ClaimPart> parts) const {
  const Holder* const owner = holders_.active(holder);
  if (owner == nullptr) return false;
  std::uint64_t claimed = 0;
  std::uint64_t not_held = 0;
  std::uint64_t missing = 0;
  std::uint64_t in_flight_not_held = 0;  // Busy already.
  for (const BlockStore::ClaimPart& part : parts) {
    const Space* const where = spaces_.live(part.space);
    if (where == nullptr) return false;
    const std::uint64_t frame_bytes = blocks_.frame_bytes(where->shape);
    claimed += part.keys.size() * frame_bytes;
    const auto count = [&](std::size_t, FrameIndex frame) {
      const bool is_in_flight = frame != kNoFrame && blocks_.table().is_in_flight(frame);
      const bool is_present = is_in_flight || blocks_.table().is_readable(frame);
      const bool is_held = is_present && blocks_[frame].holds != 0;
      if (!is_present) missing += frame_bytes;
      if (!is_held) not_held += frame_bytes;
      if (is_in_flight && !is_held) in_flight_not_held += frame_bytes;
      return true;
    };
    blocks_.table().find_each(where->shape, part.space, part.keys, count);
  }
  const std::uint64_t more_busy = not_held - in_flight_not_held;
  return claimed <= holders_.room(*owner) && not_held <= blocks_.room_to_hold() &&
         (missing == 0 || (blocks_.table().fetched_bytes() + missing <= fetch_limit_ &&
                           blocks_.table().busy_bytes() + more_busy <= busy_limit_));
}

bool Fetcher::is_being_saved(FrameIndex frame) const {
  return frame != kNoFrame && jobs_.is_being_saved(blocks_[frame]);
}

FrameIndex Fetcher::bring(const Space& space, const BlockKey& key, FrameIndex present,
                          BlockStore::Evicts evicts, std::uint32_t& steps) {
  const std::uint64_t frame_bytes = blocks_.frame_bytes(space.shape);
  if (blocks_.table().fetched_bytes() + frame_bytes > fetch_limit_ ||
      blocks_.table().busy_bytes() + frame_bytes > busy_limit_) {
    return kNoFrame;
  }
  if (present != kNoFrame) blocks_.free_key(present);
  const auto room = evicts == BlockStore::Evicts::kReplicas
                        ? reclaimer_.make_room_of_replicas(space.shape)
                        : reclaimer_.make_room(space.shape, steps, Reclaimer::MayRevoke::kNo);
  return room == Reclaimer::Room::kThere ? blocks_.take_to_fetch(space, key) : kNoFrame;
}

bool Fetcher::seal(FrameIndex frame, std::uint32_t writer) {
  if (!blocks_.table().is_in_flight(frame) || !spaces_.is_live(blocks_[frame].space)) {
    quiesced(frame);
    return false;
  }
  blocks_.read_clock();
  blocks_.seal(frame, writer);
  ++counted_.fetched;
  return true;
}

void Fetcher::give_up(FrameIndex frame) {
  if (blocks_.give_up(frame)) ++counted_.fetches_given_up;
}

void Fetcher::quiesced(FrameIndex frame) {
  give_up(frame);
  blocks_.quiesced(frame);
}

bool Fetcher::is_awaited(FrameIndex frame) const {
  PEGA_ASSERT(blocks_[frame].state == FrameState::kFetched, "frame {} is not fetched", frame);
  return blocks_[frame].holds != 0;
}

void Fetcher::report(BlockStore::Stats& stats) const {
  stats.fetches = counted_.fetches;
  stats.fetches_joined = counted_.fetches_joined;
  stats.fetches_no_room = counted_.fetches_no_room;
  stats.fetched = counted_.fetched;
  stats.fetches_given_up = counted_.fetches_given_up;
  stats.claims_shortened += counted_.claims_shortened;
}

}  // namespace pegaflow::engine
