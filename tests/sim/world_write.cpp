// The processes' calls and copies for saves.

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "tests/sim/world.h"
#include "tests/sim/world_words.h"

namespace pegaflow::sim {

void World::reserve() {
  const auto who = pick_talking();
  if (!who) return;
  const engine::HolderId holder = connections_[*who].holder;
  const Process& process = processes_[connections_[*who].process];
  if (shards_of(process.instance) > 1) return reserve_shared(*who);
  const engine::SpaceId space = pick_space(process.instance);
  // One more slice of a job, or a new one.
  std::optional<std::size_t> save;
  for (std::size_t i = 0; i < saves_.size() && chance(0.5); ++i) {
    if (saves_[i].holder == holder && !saves_[i].copies_ended) save = i;
  }
  const JobId job = save ? saves_[*save].job : JobId{process.incarnation, next_job_++};
  const engine::SpaceId where = save && chance(0.9) ? saves_[*save].space : space;
  const std::vector<BlockKey> keys = pick_keys();
  note("reserve holder={} space={} job={} keys={}", number(holder), number(where), job.number,
       keys.size());
  remember(job);
  const auto no_room =
      chance(0.5) ? engine::BlockStore::NoRoom::kStop : engine::BlockStore::NoRoom::kSkip;
  const auto may_refuse =
      chance(0.7) ? engine::BlockStore::MayRefuse::kYes : engine::BlockStore::MayRefuse::kNo;
  const auto chosen = store_->reserve(holder, where, job, 0, keys, no_room, {}, may_refuse);
  const auto expected = oracle_->reserve(holder, where, job, 0, keys, chosen, no_room, may_refuse);
  if (!same_outcome(chosen, expected) || (chosen && *chosen != *expected)) {
    throw Mismatch{
        fmt::format("reserve returns {} instead of {}", outcome(chosen), outcome(expected))};
  }
  coverage_.hit("reserve " + outcome(chosen));
  if (!chosen) return;
  if (chosen->size() != keys.size()) coverage_.hit("reserve stopped");
  for (std::size_t i = 0; i < chosen->size(); ++i) {
    const engine::FrameIndex frame = (*chosen)[i];
    if (frame == engine::kNoFrame) continue;
    if (!save) {
      saves_.push_back({.job = job, .holder = holder, .space = where});
      save = saves_.size() - 1;
    }
    add_page(saves_[*save], frame, keys[i], 0);
  }
}

void World::remember(const JobId& job) {
  if (std::find(last_jobs_.begin(), last_jobs_.end(), job) != last_jobs_.end()) return;
  last_jobs_.push_back(job);
  if (last_jobs_.size() > 32) last_jobs_.pop_front();
}

void World::add_page(Save& save, engine::FrameIndex frame, const BlockKey& key,
                     std::uint32_t shard) {
  const Stamp stamp{next_stamp_++};
  const Place place = place_of(frame, shard, shape_of(save.space));
  note("copy {} of job {} into frame {}, cells {} to {}", number(stamp), save.job.number, frame,
       place.first, place.first + place.count);
  memory_->begin_write(place, stamp);
  save.pages.push_back({frame, place, key, stamp});
}

World::SharedJob& World::pick_shared_job(const Process& process) {
  // All ranks get the same job from their scheduler: a job that others know, or a new one; whole or
  // in slices; now and then beyond what was decided.
  std::optional<std::size_t> which;
  for (std::size_t i = 0; i < shared_jobs_.size(); ++i) {
    if (chance(0.4)) which = i;
  }
  if (!which || chance(0.2)) {
    shared_jobs_.push_back({.job = {Id128{5, 5}, next_job_++},
                            .instance = process.instance,
                            .space = pick_space(process.instance),
                            .keys = pick_keys()});
    // Old jobs are no longer reserved, but their writers may still publish.
    if (shared_jobs_.size() > 12) {
      const auto idle =
          std::find_if(shared_jobs_.begin(), shared_jobs_.end() - 1, [&](const SharedJob& each) {
            return std::none_of(saves_.begin(), saves_.end(),
                                [&](const Save& save) { return save.job == each.job; });
          });
      if (idle != shared_jobs_.end() - 1) shared_jobs_.erase(idle);
    }
    which = shared_jobs_.size() - 1;
  }
  return shared_jobs_[*which];
}

void World::reserve_shared(std::size_t connection) {
  const engine::HolderId holder = connections_[connection].holder;
  const Process& process = processes_[connections_[connection].process];
  SharedJob& job = pick_shared_job(process);
  const auto known = std::find_if(saves_.begin(), saves_.end(), [&](const Save& save) {
    return save.holder == holder && save.job == job.job;
  });
  const std::size_t asked = known == saves_.end() ? 0 : known->asked;
  // A rank reserves nothing for a job that it has ended.
  if (known != saves_.end() && known->copies_ended) return;
  const bool beyond = chance(0.02);
  // A repeated call changes nothing; it starts at the second key, so that it begins no job again.
  const bool again = !beyond && asked > 1 && chance(0.1);
  const std::size_t first = beyond ? asked + 1 + pick(3) : again ? 1 + pick(asked - 1) : asked;
  const std::size_t left = (again ? asked : job.keys.size()) - std::min(first, job.keys.size());
  const std::span<const BlockKey> keys = std::span(job.keys).subspan(
      std::min(first, job.keys.size()), chance(0.6) ? left : pick(left + 1));
  note("reserve holder={} shard={} space={} job={} first={} keys={}", number(holder), process.shard,
       number(job.space), job.job.number, first, keys.size());
  remember(job.job);
  const auto no_room =
      chance(0.5) ? engine::BlockStore::NoRoom::kStop : engine::BlockStore::NoRoom::kSkip;
  const auto may_refuse =
      chance(0.7) ? engine::BlockStore::MayRefuse::kYes : engine::BlockStore::MayRefuse::kNo;
  const auto chosen =
      store_->reserve(holder, job.space, job.job, first, keys, no_room, {}, may_refuse);
  const auto expected =
      oracle_->reserve(holder, job.space, job.job, first, keys, chosen, no_room, may_refuse);
  if (!same_outcome(chosen, expected) || (chosen && *chosen != *expected)) {
    throw Mismatch{
        fmt::format("reserve returns {} instead of {}", outcome(chosen), outcome(expected))};
  }
  coverage_.hit((again ? "shared reserve again " : "shared reserve ") + outcome(chosen));
  if (!chosen || beyond || again) return;
  Save* save = known == saves_.end() ? nullptr : &*known;
  if (save == nullptr) {
    saves_.push_back({.job = job.job, .holder = holder, .space = job.space});
    save = &saves_.back();
  }
  if (chosen->size() != keys.size()) coverage_.hit("shared reserve stopped");
  save->asked += chosen->size();
  for (std::size_t i = 0; i < chosen->size(); ++i) {
    const engine::FrameIndex frame = (*chosen)[i];
    if (frame == engine::kNoFrame) continue;
    const bool is_new = !job.stamps.contains(frame);
    add_page(*save, frame, keys[i], process.shard);
    job.stamps[frame][process.shard] = save->pages.back().stamp;
    if (is_new) job.frames.push_back(frame);
  }
}

void World::copy_some() {
  for (const Save& save : saves_) {
    if (save.copies_ended || !chance(0.5)) continue;
    for (const Page& page : save.pages) memory_->write(page.place, page.stamp);
    note("job {} writes {} pages", save.job.number, save.pages.size());
    coverage_.hit("pages written", save.pages.size());
  }
  for (const Load& load : loads_) {
    if (load.copies_ended || !chance(0.5)) continue;
    for (const Page& page : load.pages) memory_->verify(page.place, page.stamp);
    note("pin {} reads {} pages", number(load.pin), load.pages.size());
    coverage_.hit("pages read", load.pages.size());
  }
  for (const Bringing& each : bringing_) {
    if (!chance(0.5)) continue;
    for (const Page& page : each.pages) memory_->write(page.place, page.stamp);
    note("frame {} is filled from another node", each.frame);
    coverage_.hit(each.is_given_up ? "pages fetched late" : "pages fetched", each.pages.size());
  }
  for (const Loan& loan : loans_) {
    if (loan.is_over || !chance(0.5)) continue;
    for (const Page& page : loan.pages) memory_->verify(page.place, page.stamp);
    note("lease {} reads {} pages", number(loan.lease), loan.pages.size());
    coverage_.hit("pages read by another node", loan.pages.size());
  }
}

void World::publish() {
  if (saves_.empty()) return;
  const std::size_t which = pick(saves_.size());
  if (!may_speak(saves_[which].holder)) return;
  // Also for a connection that was lost meanwhile: its last calls may still be in flight.
  const std::size_t limit = chance(0.5) ? ~std::size_t{0} : pick(6);
  do_publish(which, saves_[which].holder, limit);
}

void World::do_publish(std::size_t which, engine::HolderId caller, std::size_t limit) {
  Save& save = saves_[which];
  if (!save.copies_ended) {
    for (const Page& page : save.pages) memory_->end_write(page.place, page.stamp, true);
    save.copies_ended = true;
  }
  note("publish holder={} job={} limit={} of {}", number(caller), save.job.number,
       static_cast<std::int64_t>(limit), save.pages.size());
  const auto left = store_->publish(caller, save.job, limit);
  const auto expected = oracle_->publish(caller, save.job, limit);
  if (!same_outcome(left, expected) || (left && *left != *expected)) {
    throw Mismatch{
        fmt::format("publish returns {} instead of {}", outcome(left), outcome(expected))};
  }
  const auto shared = std::find_if(shared_jobs_.begin(), shared_jobs_.end(),
                                   [&](const SharedJob& each) { return each.job == save.job; });
  const bool is_shared = shards_of_save(save) > 1;
  coverage_.hit((is_shared ? "shared publish " : "publish ") + outcome(left));
  if (!left) {
    saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
    return;
  }
  if (!is_shared) {
    while (save.pages.size() > *left) {
      published_[{save.space, save.pages.back().key}] = {{0, save.pages.back().stamp}};
      save.pages.pop_back();
    }
    if (*left == 0) saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
    return;
  }
  save.published = true;
  // Lookups show whether it was sealed; here only the writers are recorded, in case it was.
  for (const Page& page : save.pages) {
    if (shared == shared_jobs_.end()) throw Mismatch{"the world has lost a job"};
    const auto& stamps = shared->stamps.at(page.frame);
    if (stamps.size() == shards_) published_[{save.space, page.key}] = stamps;
  }
  const bool all_published = shards_ == static_cast<std::size_t>(std::count_if(
                                            saves_.begin(), saves_.end(), [&](const Save& each) {
                                              return each.job == save.job && each.published;
                                            }));
  if (all_published && *left == 0) {
    const JobId done = save.job;
    // A late rank may have begun the job again after it was forgotten: it still copies.
    std::erase_if(saves_, [&](const Save& each) { return each.job == done && each.copies_ended; });
    if (std::none_of(saves_.begin(), saves_.end(),
                     [&](const Save& each) { return each.job == done; })) {
      std::erase_if(shared_jobs_, [&](const SharedJob& each) { return each.job == done; });
    }
    coverage_.hit("shared job sealed");
  }
}

std::uint32_t World::shards_of_save(const Save& save) const {
  return save.job.scheduler == Id128{5, 5} ? shards_ : 1;
}

void World::abandon() {
  if (saves_.empty()) return;
  const std::size_t which = pick(saves_.size());
  const Save save = saves_[which];
  if (!may_speak(save.holder)) return;
  if (!save.copies_ended) {
    for (const Page& page : save.pages) memory_->end_write(page.place, page.stamp, false);
  }
  note("abandon holder={} job={}", number(save.holder), save.job.number);
  store_->abandon(save.holder, save.job);
  oracle_->abandon(save.holder, save.job);
  saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
}

}  // namespace pegaflow::sim
