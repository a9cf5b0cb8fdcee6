// The model's fetches and leases.

#include <algorithm>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

Result<engine::BlockStore::Fetch> OracleStore::fetch(
    engine::HolderId holder, engine::SpaceId space, const Id128& token, std::size_t first,
    std::span<const BlockKey> keys, std::size_t fetchable,
    const Result<engine::BlockStore::Fetch>& chosen) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  if (token.is_none()) return fail(Errc::kInvalidArgument, "token");
  Claim* const claim = claim_of(token);
  if (claim == nullptr) {
    if (first != 0) return fail(Errc::kGone, "claim");
    if (claims_.size() == options_.max_claims) return fail(Errc::kBusy, "claims");
  } else {
    if (claim->holder != holder || claim->space != space || claim->blocks.size() != first) {
      return fail(Errc::kInvalidArgument, "claim");
    }
    if (!live_spaces_.contains(space)) return fail(Errc::kGone, "space");
  }
  engine::BlockStore::Fetch made;
  if (!live_spaces_.contains(space)) return made;
  if (!chosen) throw Mismatch{"fetch fails, and should not"};

  const engine::ShapeId shape = live_spaces_.at(space);
  const std::uint64_t frame_bytes = shapes_.at(shape).frame_bytes;
  const std::uint64_t held_before = held_by_instance(holders_.at(holder).instance);
  std::size_t steps = options_.slice_blocks;
  std::vector<engine::FrameIndex> blocks;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    engine::FrameIndex frame = find(space, keys[i]);
    const bool is_present = is_readable(frame) ||
                            (frame != engine::kNoFrame && frames_[frame].state == State::kInFlight);
    const bool is_being_saved = frame != engine::kNoFrame &&
                                frames_[frame].state == State::kWritten &&
                                !is_doomed(*job_of(frames_[frame].job));
    if (!is_present && (i >= fetchable || is_being_saved)) break;
    if (!is_within(options_.instance_share, held_before + (blocks.size() + 1) * frame_bytes) ||
        !server_may_hold(space, is_present ? frame : engine::kNoFrame)) {
      ++counted_.claims_shortened;
      break;
    }
    if (!is_present) {
      const bool is_allowed = may_fetch(frame_bytes);
      if (is_allowed && frame != engine::kNoFrame) move_key(frame);
      if (!is_allowed || make_room(shape, steps, false) != Room::kThere) {
        ++counted_.fetches_no_room;
        break;
      }
      const std::size_t nth = made.frames.size();
      frame = nth < chosen->frames.size() ? chosen->frames[nth].frame : engine::kNoFrame;
      take(frame, shape);
      frames_[frame] = Frame{};
      frames_[frame].state = State::kInFlight;
      frames_[frame].space = space;
      frames_[frame].key = keys[i];
      frames_[frame].has_key = true;
      made.frames.push_back({i, frame});
      ++counted_.fetches;
      ++made.in_flight;
    } else if (frames_[frame].state == State::kInFlight) {
      ++counted_.fetches_joined;
      ++made.in_flight;
    }
    hold(frame);
    blocks.push_back(frame);
  }
  made.blocks = blocks.size();
  if (!blocks.empty()) extend_claim(claim, holder, space, token, blocks);
  return made;
}

bool OracleStore::may_fetch(std::uint64_t bytes) const {
  std::uint64_t fetched = bytes;
  std::uint64_t busy = bytes;
  for (engine::FrameIndex frame = 0; frame < frames_.size(); ++frame) {
    if (frames_[frame].is_fetched()) fetched += bytes_of(frame);
    if (frames_[frame].is_written() || frames_[frame].holds != 0) busy += bytes_of(frame);
  }
  const auto kept =
      static_cast<std::uint64_t>(options_.save_reserve * static_cast<double>(options_.pool_bytes));
  return is_within(options_.fetch_share, fetched) && busy + kept <= options_.pool_bytes;
}

bool OracleStore::is_openable(engine::FrameIndex frame) const {
  return frames_[frame].state == State::kSealed && frames_[frame].has_key;
}

bool OracleStore::fetched(engine::FrameIndex frame) {
  Frame& content = frames_[frame];
  if (content.state != State::kInFlight || !live_spaces_.contains(content.space)) {
    quiesced(frame);
    return false;
  }
  content.is_replica = true;
  seal(frame, Id128{});
  ++counted_.fetched;
  return true;
}

void OracleStore::give_up(engine::FrameIndex frame) {
  Frame& content = frames_[frame];
  if (content.state != State::kInFlight) return;
  content.state = State::kGivenUp;
  content.has_key = false;
  ++counted_.fetches_given_up;
}

void OracleStore::quiesced(engine::FrameIndex frame) {
  give_up(frame);
  if (frames_[frame].holds == 0) return free(frame);
  frames_[frame].state = State::kQuiesced;
}

Result<std::size_t> OracleStore::arrived(const Id128& token, std::size_t first, std::size_t count) {
  const Claim* const claim = claim_of(token);
  if (claim == nullptr || !is_active(claim->holder) || !live_spaces_.contains(claim->space)) {
    return fail(Errc::kGone, "claim");
  }
  if (count == 0 || first >= claim->blocks.size() || count > claim->blocks.size() - first) {
    return fail(Errc::kInvalidArgument, "range");
  }
  std::size_t here = 0;
  while (here < count && is_openable(claim->blocks[first + here])) ++here;
  if (here == 0 && frames_[claim->blocks[first]].state != State::kInFlight) {
    return fail(Errc::kGone, "did not arrive");
  }
  return here;
}

Result<std::vector<engine::FrameIndex>> OracleStore::lend(
    engine::SpaceId space, std::span<const BlockKey> keys, Duration time,
    const Result<engine::BlockStore::Lent>& chosen) {
  if (time <= Duration::zero() || time > options_.longest_lease) {
    return fail(Errc::kInvalidArgument, "time");
  }
  if (leases_.size() == options_.max_leases) return fail(Errc::kBusy, "leases");
  Lease lease{.made = clock_.now(), .end = clock_.now() + time + options_.lease_margin};
  if (!live_spaces_.contains(space)) return lease.blocks;
  uses_ += shapes_.at(live_spaces_.at(space)).order->claim_begins();
  std::uint64_t lent = shapes_.at(live_spaces_.at(space)).frame_bytes;
  for (const Lease& each : leases_) {
    for (const engine::FrameIndex frame : each.blocks) lent += bytes_of(frame);
  }
  for (const BlockKey& key : keys) {
    const engine::FrameIndex frame = find(space, key);
    if (!is_readable(frame)) break;
    if (!is_within(options_.lend_share, lent) || !server_may_hold(space, frame)) {
      ++counted_.leases_shortened;
      break;
    }
    hold(frame);
    lease.blocks.push_back(frame);
    lent += bytes_of(frame);
  }
  if (lease.blocks.empty()) return lease.blocks;
  if (!chosen || chosen->lease == engine::LeaseId{} || is_lent(chosen->lease)) {
    throw Mismatch{"the name of a lease is not unique"};
  }
  lease.id = chosen->lease;
  ++counted_.leases_made;
  leases_.push_back(lease);
  return lease.blocks;
}

void OracleStore::end_lease(engine::LeaseId id) {
  const auto lease = std::find_if(leases_.begin(), leases_.end(),
                                  [&](const Lease& each) { return each.id == id; });
  if (lease == leases_.end()) return;
  queue_.push_back({.kind = Kind::kGiveBack, .blocks = lease->blocks});
  leases_.erase(lease);
  slice();
}

bool OracleStore::is_lent(engine::LeaseId id) const {
  return std::any_of(leases_.begin(), leases_.end(),
                     [&](const Lease& lease) { return lease.id == id; });
}

}  // namespace pegaflow::sim
