// The model's lookups, claims and pins.

#include <algorithm>
#include <utility>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

engine::FrameIndex OracleStore::find(engine::SpaceId space, const BlockKey& key) const {
  for (engine::FrameIndex frame = 0; frame < frames_.size(); ++frame) {
    if (frames_[frame].has_key && frames_[frame].space == space && frames_[frame].key == key)
      return frame;
  }
  return engine::kNoFrame;
}

std::size_t OracleStore::lookup(engine::SpaceId space, std::span<const BlockKey> keys) {
  const std::size_t found = present(space, keys);
  ++counted_.lookups;
  counted_.lookup_hits += found;
  counted_.lookup_misses += keys.size() - found;
  return found;
}

std::size_t OracleStore::present(engine::SpaceId space, std::span<const BlockKey> keys) const {
  std::size_t found = 0;
  while (live_spaces_.contains(space) && found < keys.size()) {
    const engine::FrameIndex frame = find(space, keys[found]);
    if (!is_readable(frame)) break;
    ++found;
  }
  if (const std::size_t more = prefix_by_name_hash(space, keys); more > found) {
    if (is_readable(find(space, keys[more - 1]))) found = more;
  }
  return found;
}

std::size_t OracleStore::prefix_by_name_hash(engine::SpaceId space,
                                             std::span<const BlockKey> keys) const {
  const auto is_leaving = [](const auto& extent) { return extent.leaving; };
  if (!live_spaces_.contains(space) || std::any_of(extents_.begin(), extents_.end(), is_leaving)) {
    return 0;
  }
  const auto is_like = [&](const BlockKey& key) {
    for (engine::FrameIndex frame = 0; frame < frames_.size(); ++frame) {
      if (is_readable(frame) && extent_of(frame)->shape == live_spaces_.at(space) &&
          frames_[frame].has_key &&
          name_hash(frames_[frame].space, frames_[frame].key) == name_hash(space, key)) {
        return true;
      }
    }
    return false;
  };
  std::size_t count = 0;
  while (count < keys.size() && is_like(keys[count])) ++count;
  return count;
}

std::set<BlockKey> OracleStore::sealed(engine::SpaceId space) const {
  std::set<BlockKey> keys;
  for (const Frame& frame : frames_) {
    if (frame.state == State::kSealed && frame.has_key && frame.space == space)
      keys.insert(frame.key);
  }
  return keys;
}

Result<std::size_t> OracleStore::claim(engine::HolderId holder, engine::SpaceId space,
                                       std::span<const BlockKey> keys, const Id128& token) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  if (token.is_none() || claim_of(token) != nullptr) return fail(Errc::kInvalidArgument, "token");
  if (claims_.size() == options_.max_claims) return fail(Errc::kBusy, "claims");
  if (!live_spaces_.contains(space)) return 0;

  const std::vector<engine::FrameIndex> blocks = hold_prefix(holder, space, keys);
  if (!blocks.empty()) extend_claim(nullptr, holder, space, token, blocks);
  return blocks.size();
}

Result<std::size_t> OracleStore::claim_more(engine::HolderId holder, const Id128& token,
                                            std::span<const BlockKey> keys) {
  Claim* const claim = claim_of(token);
  if (claim == nullptr || claim->holder != holder || !is_active(holder) ||
      !live_spaces_.contains(claim->space)) {
    return fail(Errc::kGone, "claim");
  }
  const std::vector<engine::FrameIndex> blocks = hold_prefix(holder, claim->space, keys);
  extend_claim(claim, holder, claim->space, token, blocks);
  return blocks.size();
}

Result<bool> OracleStore::claim_together(engine::HolderId holder,
                                         std::span<const engine::BlockStore::ClaimPart> parts) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  for (const engine::BlockStore::ClaimPart& part : parts) {
    if (part.token.is_none() || claim_of(part.token) != nullptr) {
      return fail(Errc::kInvalidArgument, "token");
    }
  }
  if (claims_.size() + parts.size() > options_.max_claims) return fail(Errc::kBusy, "claims");
  std::vector<std::vector<engine::FrameIndex>> blocks(parts.size());
  std::uint64_t bytes = 0;
  std::uint64_t new_bytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!live_spaces_.contains(parts[i].space)) return false;
    for (const BlockKey& key : parts[i].keys) {
      const engine::FrameIndex frame = find(parts[i].space, key);
      if (!is_readable(frame)) return false;
      blocks[i].push_back(frame);
      bytes += bytes_of(frame);
      if (frames_[frame].holds == 0) new_bytes += bytes_of(frame);
    }
  }
  const std::uint32_t instance = holders_.at(holder).instance;
  if (!is_within(options_.instance_share, held_by_instance(instance) + bytes) ||
      (new_bytes != 0 && !is_within(options_.server_share, held_on_server() + new_bytes))) {
    ++counted_.claims_shortened;
    return false;
  }
  const std::uint64_t group = next_serial_;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const engine::FrameIndex frame : blocks[i]) hold(frame);
    extend_claim(nullptr, holder, parts[i].space, parts[i].token, blocks[i]);
    claims_.back().group = group;
  }
  return true;
}

std::vector<engine::FrameIndex> OracleStore::hold_prefix(engine::HolderId holder,
                                                         engine::SpaceId space,
                                                         std::span<const BlockKey> keys) {
  const std::uint64_t frame_bytes = shapes_.at(live_spaces_.at(space)).frame_bytes;
  const std::uint64_t held_before = held_by_instance(holders_.at(holder).instance);
  uses_ += shapes_.at(live_spaces_.at(space)).order->claim_begins();
  std::vector<engine::FrameIndex> blocks;
  for (const BlockKey& key : keys) {
    const engine::FrameIndex frame = find(space, key);
    if (!is_readable(frame)) break;
    if (!is_within(options_.instance_share, held_before + (blocks.size() + 1) * frame_bytes) ||
        !server_may_hold(space, frame)) {
      ++counted_.claims_shortened;
      break;
    }
    hold(frame);
    blocks.push_back(frame);
  }
  return blocks;
}

void OracleStore::extend_claim(Claim* claim, engine::HolderId holder, engine::SpaceId space,
                               const Id128& token, const std::vector<engine::FrameIndex>& blocks) {
  if (claim == nullptr) {
    claims_.push_back({.serial = next_serial_++,
                       .token = token,
                       .holder = holder,
                       .space = space,
                       .made = clock_.now()});
    claim = &claims_.back();
  }
  claim->blocks.insert(claim->blocks.end(), blocks.begin(), blocks.end());
}

bool OracleStore::is_within(double share, std::uint64_t bytes) const {
  return bytes <= static_cast<std::uint64_t>(share * static_cast<double>(options_.pool_bytes));
}

bool OracleStore::server_may_hold(engine::SpaceId space, engine::FrameIndex frame) const {
  const std::uint64_t frame_bytes = shapes_.at(live_spaces_.at(space)).frame_bytes;
  return (frame != engine::kNoFrame && frames_[frame].holds != 0) ||
         is_within(options_.server_share, held_on_server() + frame_bytes);
}

std::uint64_t OracleStore::held_by_instance(std::uint32_t instance) const {
  std::uint64_t held = 0;
  for (const Claim& claim : claims_) {
    if (holders_.at(claim.holder).instance != instance) continue;
    for (const engine::FrameIndex frame : claim.blocks) held += bytes_of(frame);
  }
  for (const Pin& pin : pins_) {
    if (pin.instance == instance && !has_claim(pin.claim)) held += pin.bytes;
  }
  return held;
}

std::uint64_t OracleStore::held_on_server() const {
  std::uint64_t held = 0;
  for (engine::FrameIndex frame = 0; frame < frames_.size(); ++frame) {
    if (frames_[frame].holds != 0) held += bytes_of(frame);
  }
  return held;
}

bool OracleStore::has_claim(std::uint64_t serial) const {
  return std::any_of(claims_.begin(), claims_.end(),
                     [&](const Claim& claim) { return claim.serial == serial; });
}

OracleStore::Claim* OracleStore::claim_of(const Id128& token) {
  for (Claim& claim : claims_) {
    if (claim.token == token) return &claim;
  }
  return nullptr;
}

void OracleStore::unclaim(engine::HolderId holder, const Id128& token) {
  const Claim* const claim = claim_of(token);
  if (claim == nullptr || claim->holder != holder) return;
  end_group_of(claim->serial);
  slice();
}

Result<engine::BlockStore::OpenedPages> OracleStore::open(engine::HolderId holder,
                                                          const Id128& token, std::size_t first,
                                                          std::size_t count, engine::PinId pin,
                                                          std::size_t limit) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  const auto answer = [&](std::vector<engine::FrameIndex> frames, bool is_new) {
    engine::BlockStore::OpenedPages pages{.frames = std::move(frames), .is_new = is_new};
    for (const engine::FrameIndex frame : pages.frames) {
      if (frames_[frame].writer == holders_.at(holder).writer()) ++pages.by_this_process;
    }
    return pages;
  };
  Pin* begun = nullptr;
  for (Pin& known : pins_) {
    if (known.holder != holder || known.name != pin) continue;
    const bool same = known.token == token && known.first == first && known.count == count;
    if (!same) return fail(Errc::kInvalidArgument, "another range");
    if (known.blocks.size() == count) return answer(known.blocks, false);
    begun = &known;
  }
  Claim* const claim = claim_of(token);
  if (claim == nullptr || !is_active(claim->holder) || !live_spaces_.contains(claim->space) ||
      (begun != nullptr && begun->claim != claim->serial)) {
    return fail(Errc::kGone, "claim");
  }
  if (count == 0 || first >= claim->blocks.size() || count > claim->blocks.size() - first) {
    return fail(Errc::kInvalidArgument, "range");
  }
  if (begun == nullptr && pins_.size() == options_.max_pins) return fail(Errc::kBusy, "pins");
  const std::size_t from = first + (begun == nullptr ? 0 : begun->blocks.size());
  const std::size_t to = from + std::min(limit, first + count - from);
  for (std::size_t i = from; i < to; ++i) {
    if (frames_[claim->blocks[i]].state == State::kInFlight) return fail(Errc::kBusy, "in flight");
    if (!is_openable(claim->blocks[i])) return fail(Errc::kGone, "invalidated, or did not arrive");
  }
  claim->opened = true;
  for (Claim& other : claims_) {
    if (claim->group != 0 && other.group == claim->group) other.opened = true;
  }
  Pin opened{.holder = holder,
             .name = pin,
             .token = token,
             .first = first,
             .count = count,
             .claim = claim->serial,
             .instance = holders_.at(claim->holder).instance,
             .opened = clock_.now()};
  if (begun == nullptr) {
    pins_.push_back(opened);
    begun = &pins_.back();
  }
  std::vector<engine::FrameIndex> slice;
  for (std::size_t i = from; i < to; ++i) {
    ++frames_[claim->blocks[i]].holds;
    slice.push_back(claim->blocks[i]);
    begun->blocks.push_back(claim->blocks[i]);
    begun->bytes += bytes_of(claim->blocks[i]);
  }
  return answer(slice, true);
}

void OracleStore::release(engine::HolderId holder, engine::PinId pin) {
  if (!is_known(holder)) return;
  const bool exists = std::any_of(pins_.begin(), pins_.end(), [&](const Pin& each) {
    return each.holder == holder && each.name == pin;
  });
  if (!exists) return;
  end_pin(holder, pin);
  slice();
}

Result<bool> OracleStore::invalidate(engine::HolderId holder, engine::PinId name,
                                     std::size_t place) {
  const auto pin = std::find_if(pins_.begin(), pins_.end(), [&](const Pin& each) {
    return each.holder == holder && each.name == name;
  });
  if (pin == pins_.end() || !is_known(holder)) return fail(Errc::kGone, "pin");
  if (place >= pin->blocks.size()) return fail(Errc::kInvalidArgument, "place");
  Frame& frame = frames_[pin->blocks[place]];
  if (!frame.has_key) return false;
  frame.has_key = false;
  ++counted_.invalidated;
  return true;
}

}  // namespace pegaflow::sim
