#include "client/direct/sources.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/pidfd.h"
#include "base/units.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

}  // namespace

const Sources::Source* Sources::find(std::uint64_t source) const {
  const auto found = std::ranges::find(sources_, source, &Source::id);
  return found == sources_.end() ? nullptr : &*found;
}

Sources::Source* Sources::find(std::uint64_t source) {
  return const_cast<Source*>(std::as_const(*this).find(source));
}

void Sources::watch_with(Watch watch) {
  watch_ = std::move(watch);
  if (watch_) return;
  for (Source& source : sources_) source.watch.reset();
}

void Sources::forget(std::uint64_t source) {
  const auto found = std::ranges::find(sources_, source, &Source::id);
  if (found != sources_.end() && found->reads == 0) erase(found);
}

std::vector<Sources::Source>::iterator Sources::erase(std::vector<Source>::iterator source) {
  if (source->peer != 0) device_.remove_peer(source->peer);
  return sources_.erase(source);
}

bool Sources::has_ended(const Source& source) {
  return source.process.get() >= 0 && has_process_ended(source.process.get());
}

void Sources::forget_ended() {
  for (auto source = sources_.begin(); source != sources_.end();) {
    if (source->reads == 0 && has_ended(*source)) {
      source = erase(source);
    } else {
      ++source;
    }
  }
}

std::vector<std::uint64_t> Sources::known() {
  forget_ended();
  // The server describes it again, and the device connects again.
  for (auto source = sources_.begin(); source != sources_.end();) {
    const bool is_over = source->paused_until && clock_.now() >= *source->paused_until;
    source = is_over && source->reads == 0 ? erase(source) : source + 1;
  }
  std::vector<std::uint64_t> names;
  names.reserve(sources_.size());
  for (const Source& source : sources_) names.push_back(source.id);
  return names;
}

Result<void> Sources::add(std::uint64_t source, PeerMemory memory, UniqueFd process, int guards,
                          std::uint32_t guard_count, bool has_turn) {
  if (knows(source)) return {};
  if (has_process_ended(process.get()))
    return fail(Errc::kGone, "the process of engine {} has ended", source);
  PEGA_TRY(make_room());
  Result<PeerGuards> mapped = PeerGuards::map(guards, guard_count);
  if (!mapped) {
    Error error{Errc::kRefused, std::move(mapped.error().detail)};
    add_unreadable(source, std::move(process), error);
    return tl::unexpected<Error>(std::move(error));
  }
  memory.process = process.get();
  memory.network.reset();
  const TimePoint begin = clock_.now();
  const Result<Source*> added = add_readable(source, memory, guard_count);
  if (!added) {
    if (is_final(added.error())) {
      add_unreadable(source, std::move(process), added.error(), has_turn);
    }
    return tl::unexpected<Error>(added.error());
  }
  Source& entry = **added;
  entry.process = std::move(process);
  entry.guards = std::move(*mapped);
  entry.has_turn = has_turn;
  if (watch_) entry.watch = watch_(entry.process.get());
  kLog.info(
      "blocks are read out of the memory of another engine engine={} lane={} blocks={} "
      "mapped_in={}",
      source, memory.is_on_gpu() ? "cuda" : "process_vm_readv", entry.block_count,
      format_duration(clock_.now() - begin));
  return {};
}

Result<void> Sources::add_far(std::uint64_t source, const PeerMemory& memory,
                              std::uint32_t guard_count) {
  if (knows(source)) return {};
  PEGA_TRY(make_room());
  const Result<Source*> added = add_readable(source, memory, guard_count);
  if (!added) {
    if (is_final(added.error())) add_unreadable(source, UniqueFd(), added.error());
    return tl::unexpected<Error>(added.error());
  }
  Source& entry = **added;
  entry.is_far = true;
  kLog.info("blocks are read out of the memory of another engine engine={} lane={} blocks={}",
            source, memory.network->fabric.backend, entry.block_count);
  return {};
}

Result<Sources::Source*> Sources::add_readable(std::uint64_t source, const PeerMemory& memory,
                                               std::uint32_t guard_count) {
  const std::uint64_t peer = ++last_peer_;
  PEGA_TRY(device_.add_peer(peer, memory));
  Source& entry = sources_.emplace_back();
  entry.id = source;
  entry.peer = peer;
  entry.block_count = memory.block_count;
  entry.guard_count = guard_count;
  return &entry;
}

void Sources::add_unreadable(std::uint64_t source, UniqueFd process, const Error& why,
                             bool has_turn) {
  Source& entry = sources_.emplace_back();
  entry.id = source;
  entry.process = std::move(process);
  entry.has_turn = has_turn;
  refuse(source, why);
}

Result<void> Sources::make_room() {
  if (sources_.size() < kMost) return {};
  const auto oldest = std::ranges::find(sources_, std::size_t{0}, &Source::reads);
  if (oldest == sources_.end()) {
    return fail(Errc::kBusy, "the memory of {} engines is being read", kMost);
  }
  erase(oldest);
  return {};
}

Result<Sources::Reading> Sources::begin(std::uint64_t source, std::span<const std::uint32_t> blocks,
                                        std::span<const BlockGuard> guards) {
  const auto found = std::ranges::find(sources_, source, &Source::id);
  if (found == sources_.end()) return fail(Errc::kGone, "engine {} is not known", source);
  if (found->is_unreadable) {
    return fail(Errc::kRefused, "the memory of engine {} cannot be read", source);
  }
  std::uint64_t guarded = 0;
  for (const BlockGuard& one : guards) {
    guarded += one.blocks;
    if (one.blocks == 0 || one.guard.place >= found->guard_count || one.guard.value == 0) {
      return fail(Errc::kInternal, "guard {} of {} with value {} for {} blocks", one.guard.place,
                  found->guard_count, one.guard.value, one.blocks);
    }
  }
  const bool exist =
      std::ranges::all_of(blocks, [&](std::uint32_t block) { return block < found->block_count; });
  if (!exist || guarded != blocks.size()) {
    return fail(Errc::kInternal, "{} blocks under guards of {}, or one beyond the {} of its engine",
                blocks.size(), guarded, found->block_count);
  }
  ++found->reads;
  Reading reading{.peer = found->peer};
  if (found->is_far) {
    for (const BlockGuard& one : guards) reading.guards.push_back(one.guard.place);
  }
  std::rotate(found, found + 1, sources_.end());
  return reading;
}

std::size_t Sources::end(std::uint64_t source, std::span<const BlockGuard> guards,
                         std::span<const std::uint64_t> values) {
  Source* const found = find(source);
  PEGA_ASSERT(found != nullptr && found->reads != 0, "engine {} is not being read", source);
  --found->reads;
  std::size_t good = 0;
  if (found->is_far) {
    // A process that has ended answers no read of its guards.
    for (std::size_t i = 0; i < std::min(guards.size(), values.size()); ++i) {
      if (values[i] != guards[i].guard.value) break;
      good += guards[i].blocks;
    }
    return good;
  }
  for (const BlockGuard& one : guards) {
    if (!found->guards.is_open(one.guard)) break;
    good += one.blocks;
  }
  // The end of a process closes no guard. After the looks at them: one that ended before them is
  // found here.
  if (!has_process_ended(found->process.get())) return good;
  forget_ended();
  return 0;
}

void Sources::refuse(std::uint64_t source, const Error& why) {
  Source* const found = find(source);
  if (found == nullptr || found->is_unreadable) return;
  found->is_unreadable = true;
  if (found->has_turn) found->paused_until = clock_.now() + kPause;
  kLog.warn(
      "the memory of another engine of the direct group cannot be read{}, its blocks are loaded "
      "once they are saved engine={} error=\"{}\"",
      found->has_turn ? " at present" : "", source, to_string(why));
}

bool Sources::suspend(std::uint64_t source, const Error& why) {
  Source* const found = find(source);
  if (found == nullptr || !found->is_far) return false;
  if (found->is_unreadable) return true;
  found->is_unreadable = true;
  found->paused_until = clock_.now() + kPause;
  kLog.warn(
      "an engine of another host cannot be read at present, its blocks are loaded once they are "
      "saved engine={} error=\"{}\" pause={}",
      source, to_string(why), format_duration(kPause));
  return true;
}

void Sources::clear() {
  for (const Source& source : sources_) {
    if (source.peer != 0) device_.remove_peer(source.peer);
  }
  sources_.clear();
  ++period_;
}

}  // namespace pegaflow
