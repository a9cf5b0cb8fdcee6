#include "engine/store/reader.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace pegaflow::engine {

std::size_t Reader::lookup(SpaceId space, std::span<const BlockKey> keys) {
  const std::size_t found = present(space, keys);
  count_lookup(space, keys, found, 0, 0);
  return found;
}

void Reader::note_lookup(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                         std::size_t elsewhere) {
  count_lookup(space, keys, found, elsewhere, present(space, keys.subspan(found + elsewhere)));
}

void Reader::count_lookup(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                          std::size_t elsewhere, std::size_t readable) {
  const auto missing = keys.subspan(found + elsewhere);
  counted_.misses[static_cast<std::size_t>(Miss::kOtherTier)] += elsewhere;
  if (const Space* const where = spaces_.live(space); where == nullptr) {
    counted_.misses[static_cast<std::size_t>(Miss::kReset)] += missing.size();
  } else {
    counted_.misses[static_cast<std::size_t>(Miss::kBehindHole)] += readable;
    if (readable != missing.size()) count_misses(*where, missing.subspan(readable));
  }
  ++counted_.lookups;
  counted_.lookup_hits += found;
  counted_.lookup_misses += keys.size() - found;
}

std::size_t Reader::present(SpaceId space, std::span<const BlockKey> keys) const {
  const Space* const where = spaces_.live(space);
  return where == nullptr ? 0 : blocks_.table().readable_prefix(where->shape, space, keys);
}

template <typename Has>
std::uint64_t Reader::mask_of(SpaceId space, std::span<const BlockKey> keys, Has has) const {
  PEGA_ASSERT(keys.size() <= 64, "{} keys in one mask", keys.size());
  const Space* const where = spaces_.live(space);
  if (where == nullptr) return 0;
  std::uint64_t bits = 0;
  blocks_.table().find_each(where->shape, space, keys, [&](std::size_t i, FrameIndex frame) {
    bits |= std::uint64_t{blocks_.table().is_readable(frame) && has(frame)} << i;
    return true;
  });
  return bits;
}

std::uint64_t Reader::present_each(SpaceId space, std::span<const BlockKey> keys) const {
  return mask_of(space, keys, [](FrameIndex) { return true; });
}

std::uint64_t Reader::held_each(SpaceId space, std::span<const BlockKey> keys) const {
  return mask_of(space, keys, [this](FrameIndex frame) { return blocks_[frame].holds != 0; });
}

// ---- misses

void Reader::count_misses(const Space& space, std::span<const BlockKey> missing) {
  const auto prefetch = [&](std::size_t first) {
    const std::size_t end = std::min(first + BlockTable::kGroup, missing.size());
    for (std::size_t i = first; i < end; ++i) blocks_.prefetch_loss(space.id, missing[i]);
  };
  // An unknown block between known ones was present too: a later block of a chain is never
  // requested or saved without the earlier ones. It was lost long ago, and so most likely evicted.
  constexpr std::size_t kPatience = BlockTable::kGroup;
  std::size_t told = 0;
  prefetch(0);
  blocks_.table().find_each(space.shape, space.id, missing, [&](std::size_t i, FrameIndex frame) {
    if (i % BlockTable::kGroup == 0) prefetch(i + BlockTable::kGroup);
    const Miss why = why_missing(space, missing[i], frame);
    if (why == Miss::kNew) return i - told < kPatience;
    counted_.misses[static_cast<std::size_t>(Miss::kEvicted)] += i - told;
    ++counted_.misses[static_cast<std::size_t>(why)];
    told = i + 1;
    return true;
  });
  counted_.misses[static_cast<std::size_t>(Miss::kNew)] += missing.size() - told;
}

Miss Reader::why_missing(const Space& space, const BlockKey& key, FrameIndex frame) const {
  if (frame != kNoFrame) {
    if (blocks_[frame].state == FrameState::kSealed) {
      return blocks_.table().is_leaving(frame) ? Miss::kEvicted : Miss::kBehindHole;
    }
    if (blocks_.table().is_in_flight(frame)) return Miss::kInFlight;
    return jobs_.may_publish(blocks_[frame].owner) ? Miss::kBeingSaved : Miss::kSaveFailed;
  }
  const Miss why = blocks_.why_lost(space.id, key);
  return why == Miss::kNew && space.former ? blocks_.why_lost(*space.former, key) : why;
}

// ---- claims

Result<void> Reader::check_unused(const Id128& token) const {
  if (!token.is_none() && claims_.find(token) == ClaimTable::kNone) return {};
  return fail(Errc::kInvalidArgument, "claim under a token that is {}",
              token.is_none() ? "none" : "in use");
}

Result<std::size_t> Reader::claim(HolderId holder, SpaceId space, std::span<const BlockKey> keys,
                                  const Id128& token) {
  Holder* const owner = holders_.active(holder);
  if (owner == nullptr) return fail(Errc::kGone, "claim for a holder that left");
  PEGA_TRY(check_unused(token));
  if (claims_.is_full()) {
    return fail(Errc::kBusy, "there are {} claims already", claims_.size());
  }
  Space* const where = spaces_.live(space);
  if (where == nullptr) return 0;

  const std::uint64_t frame_bytes = blocks_.frame_bytes(where->shape);
  const auto [found, is_shortened] =
      blocks_.hold_prefix(*where, keys, holders_.room(*owner) / frame_bytes);
  if (is_shortened) ++counted_.claims_shortened;
  if (!found.empty()) extend_claim(ClaimTable::kNone, *owner, *where, token, found);
  return found.size();
}

Result<std::size_t> Reader::claim_more(HolderId holder, const Id128& token,
                                       std::span<const BlockKey> keys) {
  const std::uint32_t row = claims_.openable(token);
  if (row == ClaimTable::kNone || claims_[row].holder->id != holder) {
    return fail(Errc::kGone, "the claim was revoked or ended");
  }
  const Claim& claim = claims_[row];
  const auto [found, is_shortened] =
      blocks_.hold_prefix(*claim.space, keys, holders_.room(*claim.holder) / claim.frame_bytes);
  if (is_shortened) ++counted_.claims_shortened;
  if (!found.empty()) extend_claim(row, *claim.holder, *claim.space, token, found);
  return found.size();
}

Result<bool> Reader::claim_together(HolderId holder, std::span<const BlockStore::ClaimPart> parts) {
  Holder* const owner = holders_.active(holder);
  if (owner == nullptr) return fail(Errc::kGone, "claim for a holder that left");
  for (const BlockStore::ClaimPart& part : parts) PEGA_TRY(check_unused(part.token));
  if (!claims_.has_room_for(parts.size())) {
    return fail(Errc::kBusy, "there are {} claims already", claims_.size());
  }
  // All blocks are found before the first is held, so that nothing has to be undone.
  std::vector<std::vector<FrameIndex>> found(parts.size());
  std::uint64_t bytes = 0;
  std::uint64_t new_bytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Space* const where = spaces_.live(parts[i].space);
    if (where == nullptr || !blocks_.find_all(*where, parts[i].keys, found[i])) return false;
    const std::uint64_t frame_bytes = blocks_.frame_bytes(where->shape);
    bytes += found[i].size() * frame_bytes;
    new_bytes += blocks_.count_not_held(found[i]) * frame_bytes;
  }
  if (bytes > holders_.room(*owner) || new_bytes > blocks_.room_to_hold()) {
    ++counted_.claims_shortened;
    return false;
  }
  std::uint32_t last = ClaimTable::kNone;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    blocks_.hold_all(found[i]);
    const std::uint32_t row = extend_claim(ClaimTable::kNone, *owner, *spaces_.live(parts[i].space),
                                           parts[i].token, found[i]);
    if (last != ClaimTable::kNone) claims_.join(last, row);
    last = row;
  }
  return true;
}

Result<void> Reader::join_claims(HolderId holder, std::span<const Id128> tokens) {
  std::vector<std::uint32_t> rows;
  for (const Id128& token : tokens) {
    const std::uint32_t row = claims_.openable(token);
    if (row == ClaimTable::kNone || claims_[row].holder->id != holder) {
      return fail(Errc::kGone, "the claim was revoked or ended");
    }
    PEGA_ASSERT(claims_[row].next_together == row, "a claim of two groups");
    rows.push_back(row);
  }
  for (std::size_t i = 1; i < rows.size(); ++i) claims_.join(rows[i - 1], rows[i]);
  return {};
}

BlockStore::ClaimRoom Reader::room_to_claim(HolderId holder) {
  const Holder* const owner = holders_.active(holder);
  if (owner == nullptr) return {};
  return {.bytes = holders_.room(*owner), .new_bytes = blocks_.room_to_hold()};
}

std::uint64_t Reader::frame_bytes(SpaceId space) const {
  const Space* const where = spaces_.live(space);
  return where == nullptr ? 0 : blocks_.frame_bytes(where->shape);
}

void Reader::unclaim(HolderId holder, const Id128& token) {
  const std::uint32_t row = claims_.find(token);
  if (row == ClaimTable::kNone || claims_[row].holder->id != holder) return;
  reclaimer_.end_claims_together(row);
  reclaimer_.do_slice();
}

std::optional<SpaceId> Reader::space_of_claim(const Id128& token) const {
  const std::uint32_t row = claims_.openable(token);
  if (row == ClaimTable::kNone) return std::nullopt;
  return claims_[row].space->id;
}

Result<std::size_t> Reader::arrived(const Id128& token, std::size_t first,
                                    std::size_t count) const {
  const std::uint32_t row = claims_.openable(token);
  if (row == ClaimTable::kNone) return fail(Errc::kGone, "the claim was revoked or ended");
  PEGA_TRY_LET(const auto range, range_of(claims_[row], first, count));
  std::size_t here = 0;
  while (here < count && blocks_.is_openable(range[here])) ++here;
  if (here == 0 && !blocks_.table().is_in_flight(range[0])) {
    return fail(Errc::kGone, "a block of the claim did not arrive, or has wrong bytes");
  }
  return here;
}

std::optional<FrameIndex> Reader::claimed_frame(const Id128& token, std::size_t place) const {
  const std::uint32_t row = claims_.openable(token);
  if (row == ClaimTable::kNone) return std::nullopt;
  const auto range = range_of(claims_[row], place, 1);
  if (!range) return std::nullopt;
  return (*range)[0];
}

Result<std::uint32_t> Reader::extensible(const Holder& owner, SpaceId space, const Id128& token,
                                         std::size_t first) const {
  if (token.is_none()) return fail(Errc::kInvalidArgument, "fetch for a claim without token");
  const std::uint32_t row = claims_.find(token);
  if (row == ClaimTable::kNone) {
    if (first != 0) return fail(Errc::kGone, "the claim was revoked or ended");
    if (claims_.is_full()) return fail(Errc::kBusy, "there are {} claims already", claims_.size());
    return row;
  }
  const Claim& claim = claims_[row];
  if (claim.holder != &owner || claim.space->id != space || claim.blocks.size() != first) {
    return fail(Errc::kInvalidArgument,
                "fetch after block {} of another claim, or of a claim on {}", first,
                claim.blocks.size());
  }
  if (claims_.openable(token) == ClaimTable::kNone)
    return fail(Errc::kGone, "the claim was revoked");
  return row;
}

std::uint32_t Reader::extend_claim(std::uint32_t row, Holder& owner, Space& space,
                                   const Id128& token, std::span<const FrameIndex> frames) {
  const std::uint64_t frame_bytes = blocks_.frame_bytes(space.shape);
  holders_.add_held(owner.instance, frames.size() * frame_bytes);
  if (row != ClaimTable::kNone) {
    claims_.extend(row, frames);
    return row;
  }
  Claim claim;
  claim.token = token;
  claim.holder = &owner;
  claim.space = &space;
  claim.made = clock_.now();
  claim.frame_bytes = frame_bytes;
  claim.blocks = FrameList(frames);
  return claims_.add(std::move(claim));
}

// ---- pins

Result<BlockStore::OpenedPages> Reader::open(HolderId holder, const Id128& token, std::size_t first,
                                             std::size_t count, PinId pin, std::size_t limit) {
  Holder* const reader = holders_.active(holder);
  if (reader == nullptr) return fail(Errc::kGone, "open for a holder that left");
  const std::uint32_t begun = pins_.find(holder, pin);
  std::size_t done = 0;
  if (begun != PinTable::kNone) {
    const Pin& same = pins_[begun];
    if (same.token != token || same.first != first || same.count != count) {
      return fail(Errc::kInvalidArgument, "pin {} is open on another range",
                  static_cast<std::uint64_t>(pin));
    }
    done = same.blocks.size();
    if (done == count) {
      return pages_of({same.blocks.data(), same.blocks.size()}, reader->writer_tag);
    }
  }
  const std::uint32_t claim_row = claims_.openable(token);
  if (claim_row == ClaimTable::kNone) return fail(Errc::kGone, "the claim was revoked or ended");
  const Claim& claim = claims_[claim_row];
  if (begun != PinTable::kNone && pins_[begun].claim_serial != claim.serial) {
    return fail(Errc::kGone, "the claim that pin {} began with has ended",
                static_cast<std::uint64_t>(pin));
  }
  PEGA_TRY_LET(const std::span<const FrameIndex> range, range_of(claim, first, count));
  if (begun == PinTable::kNone && pins_.is_full()) {
    return fail(Errc::kBusy, "there are {} pins already", pins_.size());
  }
  const auto slice = range.subspan(done, std::min(limit, count - done));
  PEGA_TRY(blocks_.hold_again(slice));
  claims_.add_pinned(claim_row, slice.size());
  claims_.mark_opened(claim_row);
  BlockStore::OpenedPages pages = pages_of(slice, reader->writer_tag);
  pages.is_new = true;
  if (begun != PinTable::kNone) {
    pins_.extend(begun, slice);
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
  opened.opened = clock_.now();
  opened.frame_bytes = claim.frame_bytes;
  opened.blocks = FrameList(slice);
  pins_.add(std::move(opened));
  return pages;
}

Result<std::span<const FrameIndex>> Reader::range_of(const Claim& claim, std::size_t first,
                                                     std::size_t count) {
  if (count == 0 || first >= claim.blocks.size() || count > claim.blocks.size() - first) {
    return fail(Errc::kInvalidArgument, "blocks {} to {} of a claim on {}", first, first + count,
                claim.blocks.size());
  }
  return std::span<const FrameIndex>(claim.blocks.data() + first, count);
}

BlockStore::OpenedPages Reader::pages_of(std::span<const FrameIndex> frames,
                                         std::uint32_t writer_tag) const {
  BlockStore::OpenedPages pages;
  pages.frames.assign(frames.begin(), frames.end());
  for (const FrameIndex frame : frames) {
    pages.by_this_process += blocks_[frame].owner == writer_tag ? 1 : 0;
  }
  return pages;
}

void Reader::release(HolderId holder, PinId pin) {
  // A lost holder may still release: its copies ended, which is all that matters.
  if (holders_.known(holder) == nullptr) return;
  const std::uint32_t row = pins_.find(holder, pin);
  if (row == PinTable::kNone) return;
  reclaimer_.end_pin(row);
  reclaimer_.do_slice();
}

Result<bool> Reader::invalidate(HolderId holder, PinId pin, std::size_t place) {
  const std::uint32_t row = pins_.find(holder, pin);
  if (row == PinTable::kNone || holders_.known(holder) == nullptr) {
    return fail(Errc::kGone, "there is no pin {} of this holder", static_cast<std::uint64_t>(pin));
  }
  const FrameList& frames = pins_[row].blocks;
  if (place >= frames.size()) {
    return fail(Errc::kInvalidArgument, "page {} of a pin on {}", place, frames.size());
  }
  return blocks_.invalidate(frames[place]);
}

// ---- statistics

void Reader::report(BlockStore::Stats& stats) const {
  stats.claims = claims_.size();
  stats.pins = pins_.size();
  stats.pinned_by_lost_readers = pins_.blocks_of_lost();
  if (pins_.oldest() != PinTable::kNone) stats.oldest_pin = pins_[pins_.oldest()].opened;
  stats.lookups = counted_.lookups;
  stats.lookup_hits = counted_.lookup_hits;
  stats.lookup_misses = counted_.lookup_misses;
  stats.misses = counted_.misses;
  stats.claims_shortened += counted_.claims_shortened;
}

}  // namespace pegaflow::engine
