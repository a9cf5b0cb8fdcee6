// The processes' calls and copies for loads.

#include <algorithm>
#include <bit>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "tests/sim/world.h"
#include "tests/sim/world_words.h"

namespace pegaflow::sim {

void World::lookup() {
  const engine::SpaceId space = chance(0.95) || former_spaces_.empty()
                                    ? spaces_[pick(spaces_.size())].id
                                    : former_spaces_[pick(former_spaces_.size())];
  const std::vector<BlockKey> keys = pick_keys();
  const std::size_t found = store_->lookup(space, keys);
  note("lookup space={} keys={} found={}", number(space), keys.size(), found);
  if (store_->present(space, keys) != found)
    throw Mismatch{"present() returns another prefix than lookup()"};
  if (found != oracle_->lookup(space, keys)) throw Mismatch{"lookup finds another prefix"};
  coverage_.hit("lookup hit", found);
}

void World::claim() {
  const auto who = pick_talking();
  if (!who) return;
  const engine::HolderId holder = connections_[*who].holder;
  // One more slice of a claim, or a new one.
  if (!claims_.empty() && chance(0.2)) {
    Claim& claim = claims_[pick(claims_.size())];
    if (claim.holder != holder && chance(0.9)) return;
    const std::vector<BlockKey> keys = pick_keys();
    note("claim more holder={} token={} keys={}", number(holder), claim.token.low, keys.size());
    const auto count = store_->claim_more(holder, claim.token, keys);
    const auto expected = oracle_->claim_more(holder, claim.token, keys);
    if (!same_outcome(count, expected) || (count && *count != *expected)) {
      throw Mismatch{
          fmt::format("claim more returns {} instead of {}", outcome(count), outcome(expected))};
    }
    coverage_.hit("claim more " + outcome(count));
    for (std::size_t i = 0; count && i < *count; ++i) {
      claim.blocks.push_back(published_.at({claim.space, keys[i]}));
    }
    return;
  }
  const std::uint32_t instance = processes_[connections_[*who].process].instance;
  if (chance(0.3)) return claim_together(holder, instance);
  const engine::SpaceId space = pick_space(instance);
  const std::vector<BlockKey> keys = pick_keys();
  const Id128 token{0, next_token_++};
  note("claim holder={} space={} token={} keys={}", number(holder), number(space), token.low,
       keys.size());
  const auto count = store_->claim(holder, space, keys, token);
  const auto expected = oracle_->claim(holder, space, keys, token);
  if (!same_outcome(count, expected) || (count && *count != *expected)) {
    throw Mismatch{
        fmt::format("claim returns {} instead of {}", outcome(count), outcome(expected))};
  }
  coverage_.hit("claim " + outcome(count));
  if (!count || *count == 0) return;
  Claim made{.holder = holder, .token = token, .space = space};
  for (std::size_t i = 0; i < *count; ++i) {
    made.blocks.push_back(published_.at({space, keys[i]}));
  }
  claims_.push_back(std::move(made));
}

/// Whether the store says that all blocks of the parts are present and within the limits.
bool World::fits_together(engine::HolderId holder,
                          std::span<const engine::BlockStore::ClaimPart> parts) const {
  std::uint64_t bytes = 0;
  std::uint64_t new_bytes = 0;
  for (const engine::BlockStore::ClaimPart& part : parts) {
    const std::uint64_t frame_bytes = store_->frame_bytes(part.space);
    for (std::size_t first = 0; first < part.keys.size(); first += 64) {
      const std::size_t count = std::min<std::size_t>(64, part.keys.size() - first);
      const auto keys = part.keys.subspan(first, count);
      const int present = std::popcount(store_->present_each(part.space, keys));
      const int held = std::popcount(store_->held_each(part.space, keys));
      if (static_cast<std::size_t>(present) != count) return false;
      bytes += count * frame_bytes;
      new_bytes += (count - static_cast<std::size_t>(held)) * frame_bytes;
    }
  }
  const engine::BlockStore::ClaimRoom room = store_->room_to_claim(holder);
  return bytes <= room.bytes && new_bytes <= room.new_bytes;
}

void World::claim_together(engine::HolderId holder, std::uint32_t instance) {
  std::vector<Claim> made(1 + pick(3));
  std::vector<std::vector<BlockKey>> keys;
  std::vector<engine::BlockStore::ClaimPart> parts;
  for (Claim& claim : made) {
    // Mostly what is there, so that all parts are found.
    claim = {.holder = holder, .token = {0, next_token_++}, .space = pick_space(instance)};
    std::size_t found = 0;
    keys.emplace_back();
    for (int attempt = 0; attempt < 8 && found == 0; ++attempt) {
      keys.back() = pick_keys();
      found = store_->present(claim.space, keys.back());
    }
    if (found != 0 && chance(0.9)) keys.back().resize(1 + pick(found));
    if (keys.back().empty()) keys.back().push_back(chains_[0][0]);
  }
  if (!claims_.empty() && chance(0.05)) made.back().token = claims_[pick(claims_.size())].token;
  for (std::size_t i = 0; i < made.size(); ++i) {
    parts.push_back({.space = made[i].space, .keys = keys[i], .token = made[i].token});
  }
  note("claim together holder={} parts={} first token={}", number(holder), parts.size(),
       made.front().token.low);
  const bool is_allowed = fits_together(holder, parts);
  const auto answered = store_->claim_together(holder, parts);
  const auto expected = oracle_->claim_together(holder, parts);
  if (answered && *answered != is_allowed) {
    throw Mismatch{fmt::format("claim together returns {}, but its blocks and room allow {}",
                               *answered, is_allowed)};
  }
  if (!same_outcome(answered, expected) || (answered && *answered != *expected)) {
    throw Mismatch{fmt::format("claim together returns {} instead of {}", outcome(answered),
                               outcome(expected))};
  }
  const bool is_made = answered && *answered;
  coverage_.hit(is_made     ? "claim together ok"
                : !answered ? "claim together " + outcome(answered)
                            : "claim together without a block or room");
  if (is_made) {  // Revoked claims are still listed here, and the last one may have such a token.
    std::erase_if(claims_, [&](const Claim& each) { return each.token == made.back().token; });
  }
  for (std::size_t i = 0; is_made && i < made.size(); ++i) {
    for (const BlockKey& key : keys[i]) {
      made[i].blocks.push_back(published_.at({made[i].space, key}));
    }
    claims_.push_back(std::move(made[i]));
  }
}

void World::unclaim() {
  if (claims_.empty()) return;
  const std::size_t which = pick(claims_.size());
  const Claim claim = claims_[which];
  if (!may_speak(claim.holder)) return;
  note("unclaim holder={} token={}", number(claim.holder), claim.token.low);
  store_->unclaim(claim.holder, claim.token);
  oracle_->unclaim(claim.holder, claim.token);
  former_tokens_.push_back(claim.token);
  claims_.erase(claims_.begin() + static_cast<std::ptrdiff_t>(which));
}

void World::open() {
  const auto who = pick_talking();
  if (!who || claims_.empty()) return;
  const Claim& claim = claims_[pick(claims_.size())];
  const engine::HolderId holder = connections_[*who].holder;
  const std::size_t first = pick(claim.blocks.size() + (chance(0.1) ? 2 : 0));
  const std::size_t count =
      pick(claim.blocks.size() - std::min(first, claim.blocks.size()) + 1) + (chance(0.05) ? 1 : 0);
  const engine::PinId pin{next_pin_++};
  const std::size_t limit = chance(0.7) ? count : 1 + pick(count);
  note("open holder={} token={} first={} count={} limit={} pin={}", number(holder), claim.token.low,
       first, count, limit, number(pin));
  const auto pages = store_->open(holder, claim.token, first, count, pin, limit);
  const auto expected = oracle_->open(holder, claim.token, first, count, pin, limit);
  if (!same_outcome(pages, expected) ||
      (pages && (pages->frames != expected->frames ||
                 pages->by_this_process != expected->by_this_process))) {
    throw Mismatch{fmt::format("open returns {} instead of {}", outcome(pages), outcome(expected))};
  }
  coverage_.hit("open " + outcome(pages));
  if (!pages) return;
  Load load{.holder = holder, .pin = pin, .token = claim.token, .first = first, .count = count};
  read_pages(load, claim, pages->frames);
  loads_.push_back(std::move(load));
}

void World::read_pages(Load& load, const Claim& claim,
                       const std::vector<engine::FrameIndex>& frames) {
  const engine::ShapeId shape = shape_of(claim.space);
  const auto reader =
      std::find_if(connections_.begin(), connections_.end(),
                   [&](const Connection& each) { return each.holder == load.holder; });
  const std::uint32_t shard = processes_[reader->process].shard;
  for (const engine::FrameIndex frame : frames) {
    // A process of another instance may open the token; it reads the first shard.
    const std::uint32_t own = shard < shapes_.at(shape).shards.size() ? shard : 0;
    const std::size_t place = load.first + load.pages.size();
    const Page page{frame, place_of(frame, own, shape), {}, claim.blocks[place].at(own)};
    if (claim.came.contains(place)) coverage_.hit("opened after a fetch");
    memory_->verify(page.place, page.stamp);
    memory_->begin_read(page.place);
    load.pages.push_back(page);
  }
}

void World::open_again() {
  // The same name twice: a repeated call, or one for another range.
  if (loads_.empty()) return;
  Load& load = loads_[pick(loads_.size())];
  if (!may_speak(load.holder)) return;
  const bool is_same = chance(0.5);
  const std::size_t first = is_same ? load.first : pick(4);
  const std::size_t count = is_same ? load.count : 1 + pick(4);
  const Id128 token = is_same || claims_.empty() ? load.token : claims_[pick(claims_.size())].token;
  const std::size_t limit = chance(0.5) ? count : 1 + pick(count);
  note("open again holder={} token={} first={} count={} limit={} pin={}", number(load.holder),
       token.low, first, count, limit, number(load.pin));
  const auto pages = store_->open(load.holder, token, first, count, load.pin, limit);
  const auto expected = oracle_->open(load.holder, token, first, count, load.pin, limit);
  if (!same_outcome(pages, expected) ||
      (pages && (pages->frames != expected->frames || pages->is_new != expected->is_new))) {
    throw Mismatch{
        fmt::format("open again returns {} instead of {}", outcome(pages), outcome(expected))};
  }
  coverage_.hit("open again " + outcome(pages));
  if (!pages || !pages->is_new) return;
  coverage_.hit("open goes on");
  const auto claim = std::find_if(claims_.begin(), claims_.end(),
                                  [&](const Claim& each) { return each.token == token; });
  read_pages(load, *claim, pages->frames);
}

void World::release() {
  if (loads_.empty()) return;
  const std::size_t which = pick(loads_.size());
  if (may_speak(loads_[which].holder)) release_load(which);
}

void World::release_load(std::size_t which) {
  const Load load = loads_[which];
  if (!load.copies_ended) {
    for (const Page& page : load.pages) {
      memory_->verify(page.place, page.stamp);
      memory_->end_read(page.place);
    }
  }
  const int times = chance(0.1) ? 2 : 1;
  for (int i = 0; i < times; ++i) {
    note("release holder={} pin={}", number(load.holder), number(load.pin));
    store_->release(load.holder, load.pin);
    oracle_->release(load.holder, load.pin);
  }
  loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(which));
}

void World::invalidate() {
  // A process finds wrong bytes in a page that it loads; also one whose connection was lost.
  if (loads_.empty()) return;
  const Load& load = loads_[pick(loads_.size())];
  if (!may_speak(load.holder)) return;
  const std::size_t place = pick(load.pages.size() + (chance(0.1) ? 2 : 0));
  const engine::PinId pin = chance(0.8) ? load.pin : engine::PinId{next_pin_};
  note("invalidate holder={} pin={} place={}", number(load.holder), number(pin), place);
  const auto news = store_->invalidate(load.holder, pin, place);
  const auto expected = oracle_->invalidate(load.holder, pin, place);
  if (!same_outcome(news, expected) || (news && *news != *expected)) {
    throw Mismatch{
        fmt::format("invalidate returns {} instead of {}", outcome(news), outcome(expected))};
  }
  coverage_.hit(news && !*news ? "invalidate again" : "invalidate " + outcome(news));
}

}  // namespace pegaflow::sim
