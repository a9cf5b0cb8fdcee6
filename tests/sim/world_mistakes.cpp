// Calls that no correct process makes.

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "tests/sim/world.h"
#include "tests/sim/world_words.h"

namespace pegaflow::sim {

template <typename Answered, typename Expected>
void World::expect(const char* what, const Answered& answered, const Expected& expected) {
  note("wrong: {}", what);
  if (!same_outcome(answered, expected)) {
    throw Mismatch{
        fmt::format("{} returns {} instead of {}", what, outcome(answered), outcome(expected))};
  }
  coverage_.hit("wrong " + outcome(answered));
}

void World::call_wrongly() {
  const std::vector<BlockKey> keys = pick_keys();
  const auto who = pick_talking();
  const engine::HolderId talking = who ? connections_[*who].holder : engine::HolderId{0};
  const engine::HolderId former = former_holders_.empty()
                                      ? engine::HolderId{1U << 30}
                                      : former_holders_[pick(former_holders_.size())];
  const Id128 old_token =
      former_tokens_.empty() ? Id128{7, 7} : former_tokens_[pick(former_tokens_.size())];
  const Wrong wrong{keys, talking, former, old_token};
  switch (pick(10)) {
    case 0:
      expect("claim of a former holder", store_->claim(former, spaces_[0].id, keys, Id128{9, 9}),
             oracle_->claim(former, spaces_[0].id, keys, Id128{9, 9}));
      break;
    case 1:
      expect("claim without token", store_->claim(talking, spaces_[0].id, keys, Id128{}),
             oracle_->claim(talking, spaces_[0].id, keys, Id128{}));
      break;
    case 2: {
      if (claims_.empty()) break;
      const Id128 token = claims_[pick(claims_.size())].token;
      const auto answered = store_->claim(talking, spaces_[0].id, {}, token);
      expect("claim under a used token", answered,
             oracle_->claim(talking, spaces_[0].id, {}, token));
      break;
    }
    case 3:
      expect("open of an old token",
             store_->open(talking, old_token, 0, 1, engine::PinId{next_pin_}),
             oracle_->open(talking, old_token, 0, 1, engine::PinId{next_pin_}));
      break;
    case 4: {
      const JobId job{Id128{3, 3}, 1};
      const auto answered = store_->reserve(former, spaces_[0].id, job, 0, keys);
      expect("reserve of a former holder", answered,
             oracle_->reserve(former, spaces_[0].id, job, 0, keys, answered));
      break;
    }
    case 5: {
      if (former_spaces_.empty()) break;
      const engine::SpaceId space = former_spaces_[pick(former_spaces_.size())];
      const JobId job{Id128{3, 3}, 2};
      const auto answered = store_->reserve(talking, space, job, 0, keys);
      expect("reserve in a former space", answered,
             oracle_->reserve(talking, space, job, 0, keys, answered));
      break;
    }
    case 6:
      reserve_foreign_job(wrong);
      break;
    case 7:
      fetch_wrongly(wrong);
      break;
    case 8:
      lend_wrongly(wrong);
      break;
    default:
      end_unknown(wrong);
  }
}

void World::reserve_foreign_job(const Wrong& wrong) {
  // Another holder's job: neither its frames nor its blocks may change owners.
  if (saves_.empty()) return;
  const Save& save = saves_[pick(saves_.size())];
  const JobId job = save.job;
  const engine::HolderId other = chance(0.5) ? wrong.talking : wrong.former;
  if (other == save.holder || shards_of_save(save) > 1) return;
  const auto reserved = store_->reserve(other, save.space, job, 0, wrong.keys);
  expect("reserve for a foreign job", reserved,
         oracle_->reserve(other, save.space, job, 0, wrong.keys, reserved));
  // Where the job is over already, that has begun it again as the other holder's own, and
  // nothing has written its frames.
  if (!reserved) {
    const auto answered = store_->publish(other, job, 1);
    expect("publish of a foreign job", answered, oracle_->publish(other, job, 1));
  }
  store_->abandon(other, job);
  oracle_->abandon(other, job);
}

void World::fetch_wrongly(const Wrong& wrong) {
  // For an unknown holder, without a token, behind the end of a claim, for another holder's
  // claim.
  const bool has_claim = !claims_.empty();
  const Claim claim = has_claim ? claims_[pick(claims_.size())] : Claim{};
  const engine::HolderId caller = chance(0.3) ? wrong.former : wrong.talking;
  const Id128 token = chance(0.3) ? Id128{} : chance(0.5) ? wrong.old_token : claim.token;
  const std::size_t first = claim.blocks.size() + pick(2);
  const auto answered = store_->fetch(caller, spaces_[0].id, token, first, {}, 0);
  expect("fetch", answered, oracle_->fetch(caller, spaces_[0].id, token, first, {}, 0, answered));
}

void World::lend_wrongly(const Wrong& wrong) {
  const Duration time = std::chrono::seconds(chance(0.5) ? 0 : 11);
  const auto answered = store_->lend(spaces_[0].id, wrong.keys, time);
  expect("lend for no time", answered, oracle_->lend(spaces_[0].id, wrong.keys, time, answered));
  store_->end_lease(engine::LeaseId{});
  store_->end_lease(engine::LeaseId{~std::uint64_t{0}});
}

void World::end_unknown(const Wrong& wrong) {
  note("wrong: release, unclaim, lost and gone of an unknown holder");
  store_->release(wrong.former, engine::PinId{1});
  oracle_->release(wrong.former, engine::PinId{1});
  store_->unclaim(wrong.talking, wrong.old_token);
  oracle_->unclaim(wrong.talking, wrong.old_token);
  store_->holder_lost(wrong.former);
  oracle_->holder_lost(wrong.former);
  store_->holder_gone(wrong.former);
  oracle_->holder_gone(wrong.former);
  if (!former_spaces_.empty()) {
    store_->retire_space(former_spaces_[0]);
    oracle_->retire_space(former_spaces_[0]);
  }
}

}  // namespace pegaflow::sim
