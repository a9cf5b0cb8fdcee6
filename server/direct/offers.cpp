#include "server/direct/offers.h"

#include <algorithm>
#include <utility>

namespace pegaflow::server {

void Offers::add(const Id128& connection, std::uint32_t shard, OfferedMemory memory,
                 UniqueFd guards, UniqueFd process,
                 std::shared_ptr<const Allocations> allocations) {
  remove(connection);
  auto source = std::make_shared<Source>();
  source->id = new_name();
  source->connection = connection;
  source->shard = shard;
  source->memory = std::move(memory);
  source->guards = std::move(guards);
  source->process = std::move(process);
  source->allocations = std::move(allocations);
  consents_.joined(source->id, source->memory.needs_consent);
  by_connection_.emplace(connection, std::move(source));
}

void Offers::remove(const Id128& connection) {
  if (const auto source = by_connection_.extract(connection)) consents_.left(source.mapped()->id);
  for (auto read = reads_.lower_bound({connection, 0});
       read != reads_.end() && read->first.first == connection;) {
    const std::uint64_t pin = read->first.second;
    ++read;
    end_read(connection, pin);
  }
  for (auto job = jobs_.lower_bound({connection, JobId{}});
       job != jobs_.end() && job->first.first == connection;) {
    const auto next = std::next(job);
    withdraw(job->second);
    forget_if_unused(job);
    job = next;
  }
}

const OfferedMemory* Offers::memory_of(const Id128& connection) const {
  const auto found = by_connection_.find(connection);
  return found != by_connection_.end() ? &found->second->memory : nullptr;
}

std::shared_ptr<const Offers::Source> Offers::find_source(SourceId source) const {
  const auto found = std::ranges::find_if(
      by_connection_, [source](const auto& each) { return each.second->id == source; });
  return found != by_connection_.end() ? found->second : nullptr;
}

std::shared_ptr<const Offers::Source> Offers::source_of(const Id128& connection) const {
  const auto found = by_connection_.find(connection);
  return found != by_connection_.end() ? found->second : nullptr;
}

Result<void> Offers::offer(const Id128& connection, const JobId& job, engine::SpaceId space,
                           std::span<const BlockKey> keys, std::span<const std::uint32_t> blocks,
                           const std::vector<bool>& skipped, const Guarded& guard, bool pending) {
  const auto found = by_connection_.find(connection);
  if (found == by_connection_.end()) {
    return fail(Errc::kInvalidArgument, "reserve: blocks of a worker without direct memory");
  }
  const Source& source = *found->second;
  if (blocks.size() != keys.size() || skipped.size() != keys.size()) {
    return fail(Errc::kInvalidArgument, "reserve: {} blocks for {} keys", blocks.size(),
                keys.size());
  }
  if (guard.value == 0 || guard.place >= source.memory.guards) {
    return fail(Errc::kInvalidArgument, "reserve: guard {} of {} with value {}", guard.place,
                source.memory.guards, guard.value);
  }
  const auto beyond = std::find_if(blocks.begin(), blocks.end(), [&](std::uint32_t block) {
    return block >= source.memory.blocks;
  });
  if (beyond != blocks.end()) {
    return fail(Errc::kInvalidArgument, "reserve: block {} of {}", *beyond, source.memory.blocks);
  }
  if (listed_ + keys.size() > kMostBlocks) return {};
  const auto [row, is_new] = jobs_.try_emplace({connection, job});
  Job& one = row->second;
  if (is_new) {
    one.name = row->first;
    one.source = found->second;
  }
  if (!one.pages.empty() && (one.guard.place != guard.place || one.guard.value != guard.value)) {
    return fail(Errc::kInvalidArgument, "reserve: job {} has guard {}, not {}", job.number,
                one.guard.place, guard.place);
  }
  one.guard = guard;
  one.is_pending = pending;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (skipped[i]) continue;
    const Page page{.space = space, .shard = source.shard, .key = keys[i]};
    Entry& entry = pages_[page];
    if (entry.job != &one) {  // Else the call was repeated.
      one.pages.push_back(page);
      ++listed_;
    }
    entry = {.job = &one, .block = blocks[i]};
  }
  forget_if_unused(row);
  return {};
}

bool Offers::ready(const Id128& connection, const JobId& job) {
  const auto found = jobs_.find({connection, job});
  return found != jobs_.end() && std::exchange(found->second.is_pending, false);
}

void Offers::withdraw(Job& job) {
  for (const Page& page : job.pages) {
    // A later writer of the same key has replaced the entry.
    const auto entry = pages_.find(page);
    if (entry != pages_.end() && entry->second.job == &job) pages_.erase(entry);
  }
  listed_ -= job.pages.size();
  job.pages.clear();
}

void Offers::forget_if_unused(std::map<JobName, Job>::iterator job) {
  if (job->second.pages.empty() && job->second.readers == 0) jobs_.erase(job);
}

void Offers::job_ended(const Id128& connection, const JobId& job) {
  const auto found = jobs_.find({connection, job});
  if (found == jobs_.end()) return;
  withdraw(found->second);
  forget_if_unused(found);
}

bool Offers::is_read(const Id128& connection, const JobId& job) const {
  const auto found = jobs_.find({connection, job});
  return found != jobs_.end() && found->second.readers != 0;
}

std::optional<Offers::Reader> Offers::reader(const Id128& connection) const {
  const auto found = by_connection_.find(connection);
  if (found == by_connection_.end()) return std::nullopt;
  const Source& source = *found->second;
  return Reader{.group = source.memory.group,
                .shard = source.shard,
                .source = source.id,
                .reads_without_consent = source.memory.reads_without_consent};
}

std::optional<std::vector<Offers::Reader>> Offers::readers(
    std::span<const Id128> connections) const {
  std::vector<Reader> all;
  for (const Id128& connection : connections) {
    auto one = reader(connection);
    if (!one) return std::nullopt;
    all.push_back(std::move(*one));
  }
  return all;
}

const Offers::Entry* Offers::find(const Reader& reader, engine::SpaceId space,
                                  const BlockKey& key) const {
  const auto found = pages_.find({.space = space, .shard = reader.shard, .key = key});
  if (found == pages_.end()) return nullptr;
  const Source& source = *found->second.job->source;
  const bool may_read = source.memory.group == reader.group && source.id != reader.source &&
                        (!reader.is_there || source.memory.network.has_value());
  return may_read ? &found->second : nullptr;
}

std::optional<Offers::Found> Offers::begin_read(const Id128& connection, const Reader& reader,
                                                engine::SpaceId space,
                                                std::span<const BlockKey> keys, std::uint64_t pin) {
  Found found;
  std::vector<Job*> jobs;
  for (const BlockKey& key : keys) {
    const Entry* const entry = find(reader, space, key);
    if (entry == nullptr || entry->job->is_pending) break;
    Job& job = *entry->job;
    if (found.source != nullptr && job.source != found.source) break;
    found.source = job.source;
    if (jobs.empty() || jobs.back() != &job) {
      jobs.push_back(&job);
      found.guards.push_back({.guard = job.guard});
    }
    found.blocks.push_back(entry->block);
    ++found.guards.back().blocks;
  }
  if (found.source == nullptr) return std::nullopt;
  end_read(connection, pin);  // A repeated call.
  std::size_t& reads = reads_of_[connection];
  if (reads >= kMostReads) return std::nullopt;
  const bool needs_consent =
      found.source->memory.needs_consent && !reader.is_there && !reader.reads_without_consent;
  if (needs_consent) {
    const Consents::Answer answer = consents_.begin(found.source->id, reader.source);
    if (answer == Consents::Answer::kWait) {
      if (reads == 0) reads_of_.erase(connection);
      return std::nullopt;
    }
    found.has_turn = answer == Consents::Answer::kTurn;
  }
  ++reads;
  std::vector<JobName> names;
  for (Job* const job : jobs) {
    if (std::find(names.begin(), names.end(), job->name) != names.end()) continue;
    ++job->readers;
    names.push_back(job->name);
  }
  reads_.emplace(
      Pin{connection, pin},
      Read{.jobs = std::move(names), .permitted = found.has_turn ? found.source->id : SourceId{}});
  ++counted_.begun;
  counted_.read_blocks += found.blocks.size();
  return found;
}

bool Offers::end_read(const Id128& connection, std::uint64_t pin) {
  const auto read = reads_.extract(Pin{connection, pin});
  if (read.empty()) return false;
  if (const auto count = reads_of_.find(connection); --count->second == 0) reads_of_.erase(count);
  if (read.mapped().permitted != SourceId{}) consents_.ended(read.mapped().permitted);
  for (const JobName& name : read.mapped().jobs) {
    const auto job = jobs_.find(name);
    if (job == jobs_.end()) continue;
    --job->second.readers;
    forget_if_unused(job);
  }
  return true;
}

void Offers::end_turns(const Id128& connection, const JobId& job) {
  for (auto& [pin, read] : reads_) {
    const bool is_of_job = std::ranges::count(read.jobs, JobName{connection, job}) != 0;
    const SourceId permitted = is_of_job ? std::exchange(read.permitted, {}) : SourceId{};
    if (permitted != SourceId{}) consents_.ended(permitted);
  }
}

std::size_t Offers::count(std::span<const Reader> readers, engine::SpaceId space,
                          std::span<const BlockKey> keys) const {
  std::size_t least = readers.empty() ? 0 : keys.size();
  for (const Reader& reader : readers) {
    std::size_t each = 0;
    while (each < least && find(reader, space, keys[each]) != nullptr) ++each;
    least = each;
    if (least == 0) break;
  }
  return least;
}

Offers::Stats Offers::stats() const {
  Stats stats = counted_;
  stats.sources = by_connection_.size();
  stats.gpu_sources = static_cast<std::size_t>(std::ranges::count_if(
      by_connection_, [](const auto& each) { return each.second->memory.is_on_gpu(); }));
  stats.far_sources = static_cast<std::size_t>(std::ranges::count_if(
      by_connection_, [](const auto& each) { return each.second->memory.network.has_value(); }));
  stats.blocks = pages_.size();
  stats.reads = reads_.size();
  return stats;
}

}  // namespace pegaflow::server
