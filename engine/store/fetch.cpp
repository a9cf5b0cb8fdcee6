#include <utility>

#include "base/assert.h"
#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

Result<std::uint32_t> BlockStore::Impl::extensible(const Holder& owner, SpaceId space,
                                                   const Id128& token, std::size_t first) const {
  if (token.is_none()) return fail(Errc::kInvalidArgument, "fetch for a claim without token");
  const std::uint32_t row = claims.find(token);
  if (row == ClaimTable::kNone) {
    if (first != 0) return fail(Errc::kGone, "the claim was revoked or ended");
    if (claims.is_full()) return fail(Errc::kBusy, "there are {} claims already", claims.size());
    return row;
  }
  const Claim& claim = claims[row];
  if (claim.holder != &owner || claim.space->id != space || claim.blocks.size() != first) {
    return fail(Errc::kInvalidArgument,
                "fetch after block {} of another claim, or of a claim on {}", first,
                claim.blocks.size());
  }
  if (openable(token) == ClaimTable::kNone) return fail(Errc::kGone, "the claim was revoked");
  return row;
}

Result<BlockStore::Fetch> BlockStore::fetch(HolderId holder, SpaceId space, const Id128& token,
                                            std::size_t first, std::span<const BlockKey> keys,
                                            std::size_t fetchable) {
  Holder* const owner = impl_->active_holder(holder);
  if (owner == nullptr) return fail(Errc::kGone, "fetch for a holder that left");
  PEGA_TRY_LET(const std::uint32_t row, impl_->extensible(*owner, space, token, first));
  Fetch made;
  Space* const where = impl_->live_space(space);
  if (where == nullptr) return made;

  BlockTable& blocks = impl_->blocks;
  const std::uint64_t room =
      impl_->room_for_claim(*owner) / blocks.layout(where->shape).frame_bytes();
  std::uint32_t steps = impl_->options.slice_blocks;
  std::vector<FrameIndex> held;
  impl_->read_clock();
  blocks.find_each(where->shape, space, keys, [&](std::size_t i, FrameIndex present) {
    const bool is_here = blocks.is_readable(present);
    const bool is_in_flight = present != kNoFrame && blocks.is_in_flight(present);
    const bool is_present = is_here || is_in_flight;
    if (!is_present && (i >= fetchable || impl_->is_being_saved(present))) return false;
    if (held.size() == room || !impl_->may_hold(*where, is_present ? present : kNoFrame)) {
      ++impl_->counted.claims_shortened;
      return false;
    }
    const FrameIndex frame = is_present ? present : impl_->bring(*where, keys[i], present, steps);
    if (frame == kNoFrame) {
      ++impl_->counted.fetches_no_room;
      return false;
    }
    // Hold it at once, so that no later key takes its frame.
    blocks.hold(frame);
    held.push_back(frame);
    if (is_here) {
      impl_->note(frame, true);
      return true;
    }
    ++made.in_flight;
    ++(is_in_flight ? impl_->counted.fetches_joined : impl_->counted.fetches);
    if (!is_in_flight) made.frames.push_back({i, frame});
    return true;
  });
  made.blocks = held.size();
  if (!held.empty()) impl_->extend_claim(row, *owner, *where, token, held);
  return made;
}

bool BlockStore::Impl::is_being_saved(FrameIndex frame) const {
  return frame != kNoFrame && blocks[frame].state == FrameState::kWritten &&
         may_publish(jobs[blocks[frame].owner]);
}

FrameIndex BlockStore::Impl::bring(const Space& space, const BlockKey& key, FrameIndex present,
                                   std::uint32_t& steps) {
  const std::uint64_t frame_bytes = blocks.layout(space.shape).frame_bytes();
  if (blocks.fetched_bytes() + frame_bytes > fetch_limit ||
      blocks.busy_bytes() + frame_bytes > busy_limit) {
    return kNoFrame;
  }
  if (present != kNoFrame) move_key(present);
  if (make_room(space.shape, steps, MayRevoke::kNo) != Room::kThere) return kNoFrame;
  return blocks.take_for_fetch(space.shape, space.id, key);
}

void BlockStore::Impl::extend_claim(std::uint32_t row, Holder& owner, Space& space,
                                    const Id128& token, std::span<const FrameIndex> frames) {
  const std::uint64_t frame_bytes = blocks.layout(space.shape).frame_bytes();
  instances[owner.instance].held_bytes += frames.size() * frame_bytes;
  listed_blocks += frames.size();
  if (row != ClaimTable::kNone) {
    claims[row].blocks = FrameList(claims[row].blocks, frames);
    return;
  }
  Claim claim;
  claim.token = token;
  claim.holder = &owner;
  claim.space = &space;
  claim.made = clock.now();
  claim.frame_bytes = frame_bytes;
  claim.blocks = FrameList(frames);
  claims.add(std::move(claim));
}

bool BlockStore::fetched(FrameIndex frame) {
  BlockTable& blocks = impl_->blocks;
  if (!blocks.is_in_flight(frame) || !impl_->is_live(blocks[frame].space)) {
    quiesced(frame);
    return false;
  }
  impl_->read_clock();
  blocks.seal(frame, kReplica, impl_->second);
  impl_->note(frame, true);
  ++impl_->counted.fetched;
  return true;
}

void BlockStore::give_up(FrameIndex frame) {
  BlockTable& blocks = impl_->blocks;
  PEGA_ASSERT(blocks[frame].state == FrameState::kFetched, "frame {} is not fetched", frame);
  if (!blocks.is_in_flight(frame)) return;
  blocks.unlist(frame);
  blocks.set_fetch_state(frame, FetchState::kGivenUp);
  ++impl_->counted.fetches_given_up;
}

void BlockStore::quiesced(FrameIndex frame) {
  give_up(frame);
  BlockTable& blocks = impl_->blocks;
  PEGA_ASSERT(blocks.fetch_state(frame) == FetchState::kGivenUp, "frame {} is quiesced twice",
              frame);
  if (blocks[frame].holds == 0) return blocks.free(frame);
  blocks.set_fetch_state(frame, FetchState::kQuiesced);
}

bool BlockStore::is_awaited(FrameIndex frame) const {
  PEGA_ASSERT(impl_->blocks[frame].state == FrameState::kFetched, "frame {} is not fetched", frame);
  return impl_->blocks[frame].holds != 0;
}

Result<std::size_t> BlockStore::arrived(const Id128& token, std::size_t first,
                                        std::size_t count) const {
  const std::uint32_t row = impl_->openable(token);
  if (row == ClaimTable::kNone) return fail(Errc::kGone, "the claim was revoked or ended");
  PEGA_TRY_LET(const auto range, impl_->range_of(impl_->claims[row], first, count));
  std::size_t here = 0;
  while (here < count && impl_->is_openable(range[here])) ++here;
  if (here == 0 && !impl_->blocks.is_in_flight(range[0])) {
    return fail(Errc::kGone, "a block of the claim did not arrive, or has wrong bytes");
  }
  return here;
}

std::optional<FrameIndex> BlockStore::claimed_frame(const Id128& token, std::size_t place) const {
  const std::uint32_t row = impl_->openable(token);
  if (row == ClaimTable::kNone) return std::nullopt;
  const auto range = impl_->range_of(impl_->claims[row], place, 1);
  if (!range) return std::nullopt;
  return (*range)[0];
}

}  // namespace pegaflow::engine
