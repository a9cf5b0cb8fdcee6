// The server's work with other nodes: fetches, and leases.

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "tests/sim/world.h"
#include "tests/sim/world_words.h"

namespace pegaflow::sim {

void World::fetch() {
  const auto who = pick_talking();
  if (!who) return;
  engine::HolderId holder = connections_[*who].holder;
  engine::SpaceId space = pick_space(processes_[connections_[*who].process].instance);
  Id128 token{0, next_token_++};
  std::size_t first = 0;
  if (!claims_.empty() && chance(0.5)) {  // Continues a claim.
    const Claim& claim = claims_[pick(claims_.size())];
    if (may_speak(claim.holder)) holder = claim.holder;
    if (chance(0.95)) space = claim.space;
    token = claim.token;
    first = claim.blocks.size() + (chance(0.05) ? 1 : 0);
  }
  const std::vector<BlockKey> keys = pick_keys();
  const std::size_t fetchable = chance(0.7) ? keys.size() : pick(keys.size() + 1);
  note("fetch holder={} space={} token={} first={} keys={} fetchable={}", number(holder),
       number(space), token.low, first, keys.size(), fetchable);
  const auto made = store_->fetch(holder, space, token, first, keys, fetchable);
  const auto expected = oracle_->fetch(holder, space, token, first, keys, fetchable, made);
  const auto is_same_frame = [](const auto& left, const auto& right) {
    return left.place == right.place && left.frame == right.frame;
  };
  if (!same_outcome(made, expected) ||
      (made && (made->blocks != expected->blocks || made->in_flight != expected->in_flight ||
                !std::equal(made->frames.begin(), made->frames.end(), expected->frames.begin(),
                            expected->frames.end(), is_same_frame)))) {
    throw Mismatch{fmt::format("fetch returns {} instead of {}", outcome(made), outcome(expected))};
  }
  coverage_.hit("fetch " + outcome(made));
  if (made && made->blocks != 0) note_fetch(holder, space, token, keys, *made);
}

void World::note_fetch(engine::HolderId holder, engine::SpaceId space, const Id128& token,
                       std::span<const BlockKey> keys, const engine::BlockStore::Fetch& made) {
  const engine::ShapeId shape = shape_of(space);
  for (const engine::BlockStore::Fetch::Frame& each : made.frames) {
    Bringing brought{.space = space, .key = keys[each.place], .frame = each.frame};
    const auto shards = static_cast<std::uint32_t>(shapes_.at(shape).shards.size());
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      const Stamp stamp{next_stamp_++};
      const Page page{each.frame, place_of(each.frame, shard, shape), keys[each.place], stamp};
      note("bring {} into frame {}, cells {} to {}", number(stamp), each.frame, page.place.first,
           page.place.first + page.place.count);
      memory_->begin_write(page.place, stamp);
      brought.pages.push_back(page);
      brought.stamps[shard] = stamp;
    }
    bringing_.push_back(std::move(brought));
  }
  auto claim = std::find_if(claims_.begin(), claims_.end(),
                            [&](const Claim& each) { return each.token == token; });
  if (claim == claims_.end()) {
    claims_.push_back({.holder = holder, .token = token, .space = space});
    claim = claims_.end() - 1;
  }
  for (std::size_t i = 0; i < made.blocks; ++i) {
    const Bringing* const in_flight = bringing(space, keys[i]);
    if (in_flight != nullptr) claim->came.insert(claim->blocks.size());
    claim->blocks.push_back(in_flight != nullptr ? in_flight->stamps
                                                 : published_.at({space, keys[i]}));
  }
}

World::Bringing* World::bringing(engine::SpaceId space, const BlockKey& key) {
  for (Bringing& each : bringing_) {
    if (each.space == space && each.key == key && !each.is_given_up) return &each;
  }
  return nullptr;
}

void World::end_writes(const Bringing& of, bool whole) {
  for (const Page& page : of.pages) memory_->end_write(page.place, page.stamp, whole);
}

void World::bring() {
  if (bringing_.empty()) return;
  const std::size_t which = pick(bringing_.size());
  Bringing& each = bringing_[which];
  if (!each.is_given_up && chance(0.2)) {
    note("give up frame {}", each.frame);
    for (int times = chance(0.1) ? 2 : 1; times != 0; --times) {
      store_->give_up(each.frame);
      oracle_->give_up(each.frame);
    }
    each.is_given_up = true;
    coverage_.hit("given up");
    return;
  }
  // The last byte has arrived, or nothing will write again.
  if (chance(each.is_given_up ? 0.3 : 0.8)) {
    note("fetched frame {}", each.frame);
    end_writes(each, true);
    const bool is_sealed = store_->fetched(each.frame);
    if (is_sealed != oracle_->fetched(each.frame))
      throw Mismatch{"fetched() returns another result"};
    if (is_sealed) published_[{each.space, each.key}] = each.stamps;
    if (!is_sealed) coverage_.hit("fetched too late");
  } else {
    note("quiesced frame {}", each.frame);
    end_writes(each, false);
    const std::uint32_t left = store_->stats().quarantined_fetch + (each.is_given_up ? 0 : 1);
    store_->quiesced(each.frame);
    oracle_->quiesced(each.frame);
    coverage_.hit("quiesced");
    if (store_->stats().quarantined_fetch == left) coverage_.hit("quiesced under a claim");
  }
  bringing_.erase(bringing_.begin() + static_cast<std::ptrdiff_t>(which));
}

void World::look_for_arrivals() {
  if (claims_.empty()) return;
  const Claim& claim = claims_[pick(claims_.size())];
  const std::size_t first = pick(claim.blocks.size());
  const std::size_t count = pick(claim.blocks.size() - first + 2);
  note("arrived token={} first={} count={}", claim.token.low, first, count);
  const auto here = store_->arrived(claim.token, first, count);
  const auto expected = oracle_->arrived(claim.token, first, count);
  if (!same_outcome(here, expected) || (here && *here != *expected)) {
    throw Mismatch{
        fmt::format("arrived returns {} instead of {}", outcome(here), outcome(expected))};
  }
  coverage_.hit("arrived " + (!here ? outcome(here) : *here == count ? "all" : "some"));
}

void World::lend() {
  const engine::SpaceId space = chance(0.95) || former_spaces_.empty()
                                    ? spaces_[pick(spaces_.size())].id
                                    : former_spaces_[pick(former_spaces_.size())];
  const std::vector<BlockKey> keys = pick_keys();
  const auto time = std::chrono::milliseconds(chance(0.3) ? 10000 : 1 + pick(4000));
  note("lend space={} keys={} for {} ms", number(space), keys.size(), time.count());
  const auto lent = store_->lend(space, keys, time);
  const auto expected = oracle_->lend(space, keys, time, lent);
  if (!same_outcome(lent, expected) || (lent && lent->frames != *expected)) {
    throw Mismatch{fmt::format("lend returns {} instead of {}", outcome(lent), outcome(expected))};
  }
  coverage_.hit("lend " + outcome(lent));
  if (!lent || lent->frames.empty()) return;
  Loan loan{.lease = lent->lease, .end = clock_.now() + time + options_.lease_margin};
  for (std::size_t i = 0; i < lent->frames.size(); ++i) {
    for (const auto& [shard, stamp] : published_.at({space, keys[i]})) {
      const Page page{
          lent->frames[i], place_of(lent->frames[i], shard, shape_of(space)), {}, stamp};
      memory_->verify(page.place, page.stamp);
      memory_->begin_read(page.place);
      loan.pages.push_back(page);
    }
  }
  loans_.push_back(std::move(loan));
}

void World::end_lease() {
  if (loans_.empty()) return;
  const std::size_t which = pick(loans_.size());
  Loan& loan = loans_[which];
  if (store_->is_lent(loan.lease) != oracle_->is_lent(loan.lease)) {
    throw Mismatch{"is_lent() differs"};
  }
  note("end lease {}", number(loan.lease));
  if (!loan.is_over) {
    for (const Page& page : loan.pages) {
      memory_->verify(page.place, page.stamp);
      memory_->end_read(page.place);
    }
    coverage_.hit("lease ended");
  }
  store_->end_lease(loan.lease);
  oracle_->end_lease(loan.lease);
  loans_.erase(loans_.begin() + static_cast<std::ptrdiff_t>(which));
}

void World::end_late_reads() {
  for (Loan& loan : loans_) {
    if (loan.is_over || clock_.now() < loan.end) continue;
    for (const Page& page : loan.pages) {
      memory_->verify(page.place, page.stamp);
      memory_->end_read(page.place);
    }
    loan.is_over = true;
  }
}

}  // namespace pegaflow::sim
