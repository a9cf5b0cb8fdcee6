#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

std::size_t BlockStore::lookup(SpaceId space, std::span<const BlockKey> keys) const {
  std::size_t found = 0;
  if (const Space* const where = impl_->live_space(space); where != nullptr) {
    found = impl_->blocks.readable_prefix(where->shape, space, keys);
    if (found != keys.size()) impl_->count_misses(*where, keys.subspan(found));
  } else {
    impl_->counted.misses[static_cast<std::size_t>(Miss::kReset)] += keys.size();
  }
  ++impl_->counted.lookups;
  impl_->counted.lookup_hits += found;
  impl_->counted.lookup_misses += keys.size() - found;
  return found;
}

std::size_t BlockStore::present(SpaceId space, std::span<const BlockKey> keys) const {
  const Space* const where = impl_->live_space(space);
  return where == nullptr ? 0 : impl_->blocks.readable_prefix(where->shape, space, keys);
}

Result<std::size_t> BlockStore::claim(HolderId holder, SpaceId space,
                                      std::span<const BlockKey> keys, const Id128& token) {
  Holder* const owner = impl_->active_holder(holder);
  if (owner == nullptr) return fail(Errc::kGone, "claim for a holder that left");
  if (token.is_none() || impl_->claims.find(token) != ClaimTable::kNone) {
    return fail(Errc::kInvalidArgument, "claim under a token that is {}",
                token.is_none() ? "none" : "in use");
  }
  if (impl_->claims.is_full()) {
    return fail(Errc::kBusy, "there are {} claims already", impl_->claims.size());
  }
  Space* const where = impl_->live_space(space);
  if (where == nullptr) return 0;

  const std::uint64_t frame_bytes = impl_->blocks.layout(where->shape).frame_bytes();
  const auto [found, is_shortened] =
      impl_->hold_prefix(*where, keys, impl_->room_for_claim(*owner) / frame_bytes);
  if (is_shortened) ++impl_->counted.claims_shortened;
  if (!found.empty()) impl_->extend_claim(ClaimTable::kNone, *owner, *where, token, found);
  return found.size();
}

Result<std::size_t> BlockStore::claim_more(HolderId holder, const Id128& token,
                                           std::span<const BlockKey> keys) {
  const std::uint32_t row = impl_->openable(token);
  if (row == ClaimTable::kNone || impl_->claims[row].holder->id != holder) {
    return fail(Errc::kGone, "the claim was revoked or ended");
  }
  Claim& claim = impl_->claims[row];
  const auto [found, is_shortened] = impl_->hold_prefix(
      *claim.space, keys, impl_->room_for_claim(*claim.holder) / claim.frame_bytes);
  if (is_shortened) ++impl_->counted.claims_shortened;
  if (!found.empty()) impl_->extend_claim(row, *claim.holder, *claim.space, token, found);
  return found.size();
}

BlockStore::Impl::HeldPrefix BlockStore::Impl::hold_prefix(const Space& space,
                                                           std::span<const BlockKey> keys,
                                                           std::uint64_t room) {
  // First find the blocks, then hold them: so the neighbors in the order of eviction, which lie
  // anywhere, are prefetched meanwhile. One block beyond the limit shows that there is one.
  HeldPrefix held;
  std::vector<FrameIndex>& found = held.frames;
  found.reserve(std::min<std::size_t>(keys.size(), room + 1));
  blocks.find_each(space.shape, space.id, keys, [&](std::size_t, FrameIndex frame) {
    if (!blocks.is_readable(frame) || found.size() > room) return false;
    found.push_back(frame);
    return true;
  });
  for (std::size_t i = 0; i < found.size(); ++i) {
    constexpr std::size_t kAhead = 16;
    if (i + 2 * kAhead < found.size()) blocks.prefetch_block(found[i + 2 * kAhead]);
    if (i + kAhead < found.size()) blocks.prefetch_neighbours(found[i + kAhead]);
    held.is_shortened = i == room || !may_hold(space, found[i]);
    if (held.is_shortened) {
      found.resize(i);
      break;
    }
    blocks.hold(found[i]);
    note(found[i], true);
  }
  return held;
}

bool BlockStore::Impl::may_hold(const Space& space, FrameIndex frame) const {
  const bool is_held = frame != kNoFrame && blocks[frame].holds != 0;
  return is_held || blocks.held_bytes() + blocks.layout(space.shape).frame_bytes() <= server_limit;
}

std::uint64_t BlockStore::Impl::room_for_claim(const Holder& holder) const {
  const std::uint64_t held = instances.at(holder.instance).held_bytes;
  return held < instance_limit ? instance_limit - held : 0;
}

void BlockStore::unclaim(HolderId holder, const Id128& token) {
  const std::uint32_t row = impl_->claims.find(token);
  if (row == ClaimTable::kNone || impl_->claims[row].holder->id != holder) return;
  impl_->end_claim(row);
  impl_->do_slice();
}

std::uint32_t BlockStore::Impl::openable(const Id128& token) const {
  const std::uint32_t row = claims.find(token);
  if (row == ClaimTable::kNone) return row;
  const Claim& claim = claims[row];
  // The queued work has not reached the claim yet.
  const bool is_doomed = claim.holder->is_lost || claim.holder->is_gone || claim.space->is_retired;
  return is_doomed ? ClaimTable::kNone : row;
}

std::optional<SpaceId> BlockStore::space_of_claim(const Id128& token) const {
  const std::uint32_t row = impl_->openable(token);
  if (row == ClaimTable::kNone) return std::nullopt;
  return impl_->claims[row].space->id;
}

Result<BlockStore::OpenedPages> BlockStore::open(HolderId holder, const Id128& token,
                                                 std::size_t first, std::size_t count, PinId pin,
                                                 std::size_t limit) {
  Holder* const reader = impl_->active_holder(holder);
  if (reader == nullptr) return fail(Errc::kGone, "open for a holder that left");
  const std::uint32_t begun = impl_->pins.find(holder, pin);
  std::size_t done = 0;
  if (begun != PinTable::kNone) {
    const Pin& same = impl_->pins[begun];
    if (same.token != token || same.first != first || same.count != count) {
      return fail(Errc::kInvalidArgument, "pin {} is open on another range",
                  static_cast<std::uint64_t>(pin));
    }
    done = same.blocks.size();
    if (done == count) {
      return impl_->pages_of({same.blocks.data(), same.blocks.size()}, reader->writer_tag);
    }
  }
  const std::uint32_t claim_row = impl_->openable(token);
  if (claim_row == ClaimTable::kNone) return fail(Errc::kGone, "the claim was revoked or ended");
  Claim& claim = impl_->claims[claim_row];
  if (begun != PinTable::kNone && impl_->pins[begun].claim_serial != claim.serial) {
    return fail(Errc::kGone, "the claim that pin {} began with has ended",
                static_cast<std::uint64_t>(pin));
  }
  PEGA_TRY_LET(const std::span<const FrameIndex> range, Impl::range_of(claim, first, count));
  if (begun == PinTable::kNone && impl_->pins.is_full()) {
    return fail(Errc::kBusy, "there are {} pins already", impl_->pins.size());
  }
  const auto slice = range.subspan(done, std::min(limit, count - done));
  PEGA_TRY(impl_->hold_again(slice));
  claim.pinned_bytes += slice.size() * claim.frame_bytes;
  impl_->claims.mark_opened(claim_row);
  impl_->listed_blocks += slice.size();
  OpenedPages pages = impl_->pages_of(slice, reader->writer_tag);
  pages.is_new = true;
  if (begun != PinTable::kNone) {
    impl_->pins.extend(begun, slice);
    return pages;
  }
  Pin opened;
  opened.name = pin;
  opened.holder = reader;
  opened.token = token;
  opened.first = static_cast<std::uint32_t>(first);
  opened.count = static_cast<std::uint32_t>(count);
  opened.claim = claim_row;
  opened.claim_serial = claim.serial;
  opened.instance = claim.holder->instance;
  opened.opened = impl_->clock.now();
  opened.frame_bytes = claim.frame_bytes;
  opened.blocks = FrameList(slice);
  impl_->pins.add(std::move(opened));
  return pages;
}

Result<std::span<const FrameIndex>> BlockStore::Impl::range_of(const Claim& claim,
                                                               std::size_t first,
                                                               std::size_t count) {
  if (count == 0 || first >= claim.blocks.size() || count > claim.blocks.size() - first) {
    return fail(Errc::kInvalidArgument, "blocks {} to {} of a claim on {}", first, first + count,
                claim.blocks.size());
  }
  return std::span<const FrameIndex>(claim.blocks.data() + first, count);
}

Result<void> BlockStore::Impl::hold_again(std::span<const FrameIndex> frames) {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (i + kAhead < frames.size()) blocks.prefetch_row(frames[i + kAhead]);
    if (!is_openable(frames[i])) {
      const bool is_in_flight = blocks.is_in_flight(frames[i]);
      while (i != 0) blocks.unhold_again(frames[--i]);
      if (is_in_flight) return fail(Errc::kBusy, "a block of the claim is in flight");
      return fail(Errc::kGone, "a block of the claim did not arrive, or has wrong bytes");
    }
    blocks.hold_again(frames[i]);
  }
  return {};
}

BlockStore::OpenedPages BlockStore::Impl::pages_of(std::span<const FrameIndex> frames,
                                                   std::uint32_t writer_tag) const {
  OpenedPages pages;
  pages.frames.assign(frames.begin(), frames.end());
  for (const FrameIndex frame : frames) {
    pages.by_this_process += blocks[frame].owner == writer_tag ? 1 : 0;
  }
  return pages;
}

void BlockStore::release(HolderId holder, PinId pin) {
  // A lost holder may still release: its copies ended, which is all that matters.
  if (impl_->known_holder(holder) == nullptr) return;
  const std::uint32_t row = impl_->pins.find(holder, pin);
  if (row == PinTable::kNone) return;
  impl_->end_pin(row);
  impl_->do_slice();
}

Result<bool> BlockStore::invalidate(HolderId holder, PinId pin, std::size_t place) {
  const std::uint32_t row = impl_->pins.find(holder, pin);
  if (row == PinTable::kNone || impl_->known_holder(holder) == nullptr) {
    return fail(Errc::kGone, "there is no pin {} of this holder", static_cast<std::uint64_t>(pin));
  }
  const FrameList& frames = impl_->pins[row].blocks;
  if (place >= frames.size()) {
    return fail(Errc::kInvalidArgument, "page {} of a pin on {}", place, frames.size());
  }
  const Block& block = impl_->blocks[frames[place]];
  if (!block.indexed) return false;
  impl_->losses.remember(key_hash(block.space, block.key), Miss::kCorrupt);
  if (impl_->is_live(block.space)) impl_->note(frames[place], false);
  impl_->blocks.unlist(frames[place]);
  ++impl_->counted.invalidated;
  return true;
}

void BlockStore::Impl::end_claim(std::uint32_t row) {
  Claim claim = claims.remove(row);
  // Its pins live on and take over its share.
  Instance& instance = instances.at(claim.holder->instance);
  instance.held_bytes -= claim.blocks.size() * claim.frame_bytes;
  instance.held_bytes += claim.pinned_bytes;
  queue.emplace_back(GiveBackWork{std::move(claim.blocks)});
}

void BlockStore::Impl::end_pin(std::uint32_t row) {
  Pin pin = pins.remove(row);
  const std::uint32_t claim = claims.find(pin.claim, pin.claim_serial);
  if (claim != ClaimTable::kNone) {
    claims[claim].pinned_bytes -= pin.blocks.size() * pin.frame_bytes;
  } else {
    instances.at(pin.instance).held_bytes -= pin.blocks.size() * pin.frame_bytes;
    forget_instance_if_unused(pin.instance);
  }
  if (pin.holder->is_lost) lost_pinned_blocks -= pin.blocks.size();
  if (pin.blocks.size() > FrameList::kInside) {
    queue.emplace_back(GiveBackWork{std::move(pin.blocks)});
    return;
  }
  // At once: otherwise a client with 100,000 pins of one block each would leave as many queue
  // entries.
  step_cost = static_cast<std::uint32_t>(pin.blocks.size());
  while (!pin.blocks.empty()) give_back_last(pin.blocks);
}

}  // namespace pegaflow::engine
