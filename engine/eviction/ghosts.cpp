#include "engine/eviction/ghosts.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "engine/eviction/policy_memory.h"

namespace pegaflow::engine {

Result<EvictedBlocks> EvictedBlocks::create(std::uint64_t entries) {
  PolicyMemory own;
  return create(entries, own);
}

Result<EvictedBlocks> EvictedBlocks::create(std::uint64_t entries, PolicyMemory& memory) {
  const std::uint64_t buckets = std::max<std::uint64_t>(1, (entries + kWays - 1) / kWays);
  PEGA_TRY_LET(auto pages, ZeroPages<Bucket>::create(buckets, PageUse::kDense));
  unsigned shift = 0;
  while (((buckets * kWays) >> shift) > 256) ++shift;
  EvictedBlocks made(std::move(pages), shift);
  if (!memory.is_kept()) return made;
  PEGA_TRY_LET(made.counts_, memory.take<Counts>(1));
  PEGA_TRY_LET(made.log_, memory.take<Change>(buckets * kWays));
  made.replay();
  return made;
}

// ---- the log

void EvictedBlocks::replay() noexcept {
  constexpr std::uint64_t kAhead = 16;
  const std::uint64_t end = counts_[0].changes;
  const std::uint64_t size = log_.size();
  const std::uint64_t begin = end - std::min(end, size);
  std::uint64_t adds = 0;
  for (std::uint64_t i = begin; i < end; ++i) adds += log_[i % size].uses != 0 ? 1 : 0;
  added_ = counts_[0].added - std::min(counts_[0].added, adds);
  for (std::uint64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) prefetch(log_[(i + kAhead) % size].hash);
    const Change change = log_[i % size];
    if (change.uses == 0) {
      remove(change.hash);
    } else {
      put(change.hash, change.uses);
    }
  }
  next_ = end % size;
}

void EvictedBlocks::note(Change change) noexcept {
  if (log_.size() == 0) return;
  log_[next_] = change;
  next_ = next_ + 1 == log_.size() ? 0 : next_ + 1;
  counts_[0].added = added_;
  std::atomic_ref changes(counts_[0].changes);
  changes.store(changes.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

bool EvictedBlocks::touch(std::size_t page) noexcept {
  if (page < bucket_pages()) return buckets_.touch(page, 1);
  return log_.size() != 0 && log_.touch(page - bucket_pages(), 1);
}

bool EvictedBlocks::forget(std::size_t page, std::size_t count) noexcept {
  const std::size_t first = bucket_pages();
  if (page < first) return buckets_.forget_pages(page, std::min(count, first - page));
  return log_.size() != 0 && log_.forget_pages(page - first, count);
}

void EvictedBlocks::add(std::uint32_t hash, std::uint32_t uses) noexcept {
  put(hash, uses);
  note({.hash = hash, .uses = uses});
}

std::optional<EvictedBlocks::Found> EvictedBlocks::take(std::uint32_t hash) noexcept {
  const auto found = remove(hash);
  if (found) note({.hash = hash, .uses = 0});
  return found;
}

// ---- the table

// put() and find() look at all entries without a branch, so that the compiler processes several at
// a time: the bucket is in the cache, and no branch predictor can predict the matching entry.

void EvictedBlocks::put(std::uint32_t hash, std::uint32_t uses) noexcept {
  ++added_;
  Bucket& in = bucket(hash);
  const std::int32_t time = now();
  // The first free entry, else the first of the oldest: its number is in the low bits.
  std::int32_t best = 0;
  for (std::int32_t i = 0; i < kWays; ++i) {
    const Entry entry = in.entries[i];
    const std::int32_t worth = uses_of(entry) == 0 ? kTimes : age(entry, time);
    best = std::max(best, worth * kWays + (kWays - 1 - i));
  }
  in.entries[kWays - 1 - best % kWays] = make_entry(tag(hash), uses, time);
}

std::int32_t EvictedBlocks::find(const Bucket& in, std::int32_t wanted) noexcept {
  std::int32_t first = 0;
  for (std::int32_t i = 0; i < kWays; ++i) {
    const Entry entry = in.entries[i];
    const bool is_it = uses_of(entry) != 0 && tag_of(entry) == wanted;
    first = std::max(first, is_it ? kWays - i : 0);
  }
  return first == 0 ? kNowhere : kWays - first;
}

std::optional<EvictedBlocks::Found> EvictedBlocks::look(std::uint32_t hash) const noexcept {
  const Bucket& in = bucket(hash);
  const std::int32_t at = find(in, tag(hash));
  if (at == kNowhere) return std::nullopt;
  return found(in.entries[at]);
}

std::optional<EvictedBlocks::Found> EvictedBlocks::remove(std::uint32_t hash) noexcept {
  Bucket& in = bucket(hash);
  const std::int32_t at = find(in, tag(hash));
  if (at == kNowhere) return std::nullopt;
  const Found there = found(in.entries[at]);
  in.entries[at] = 0;
  return there;
}

}  // namespace pegaflow::engine
