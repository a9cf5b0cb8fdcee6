#include <algorithm>
#include <iterator>
#include <list>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "tests/sim/world.h"

namespace pegaflow::sim {

// ---- comparison

void World::compare() {
  compare_stats();
  if (store_->has_work() != oracle_->has_work()) throw Mismatch{"has_work() differs"};
  if (store_->is_idle() != oracle_->is_idle()) throw Mismatch{"is_idle() differs"};
  if (store_->next_deadline() != oracle_->next_deadline())
    throw Mismatch{"next_deadline() differs"};
  const auto& left = store_->cleanup();
  const auto& right = oracle_->cleanup();
  if (left.evicted_blocks != right.evicted_blocks || left.evicted_bytes != right.evicted_bytes ||
      left.done != right.done || left.still_referenced_blocks != right.still_referenced_blocks) {
    throw Mismatch{"cleanup() differs"};
  }
  for (const Connection& connection : connections_) {
    const bool touches = store_->may_touch(connection.holder);
    if (touches != oracle_->may_touch(connection.holder)) throw Mismatch{"may_touch() differs"};
    if (!touches && touches_memory(connection.holder)) {
      throw Mismatch{"a process accesses frames, and may_touch() is false"};
    }
  }
  for (const JobId& job : last_jobs_) {
    if (store_->is_saving(job) != oracle_->is_saving(job)) {
      throw Mismatch{fmt::format("is_saving({}) differs", job.number)};
    }
  }
  compare_order();
  compare_journal();
  if (steps_ % 64 == 0) {
    const auto checked = store_->check();
    if (!checked) throw Mismatch{"check: " + checked.error().detail};
  }
}

void World::compare_stats() {
  const engine::BlockStore::Stats got = store_->stats();
  const engine::BlockStore::Stats want = oracle_->stats();
  const auto same = [](const char* name, std::uint64_t left, std::uint64_t right) {
    if (left != right) throw Mismatch{fmt::format("{} is {} and should be {}", name, left, right)};
  };
  same("free_units", got.free_units, want.free_units);
  same("sealed_bytes", got.sealed_bytes, want.sealed_bytes);
  same("written_bytes", got.written_bytes, want.written_bytes);
  same("quarantined_bytes", got.quarantined_bytes, want.quarantined_bytes);
  same("held_bytes", got.held_bytes, want.held_bytes);
  same("extents_taken", got.extents_taken, want.extents_taken);
  same("reserved", got.reserved, want.reserved);
  same("sealed", got.sealed, want.sealed);
  same("quarantined_timeout", got.quarantined_timeout, want.quarantined_timeout);
  same("quarantined_writer_lost", got.quarantined_writer_lost, want.quarantined_writer_lost);
  same("pinned_by_lost_readers", got.pinned_by_lost_readers, want.pinned_by_lost_readers);
  same("held", got.held, want.held);
  same("in flight", got.in_flight, want.in_flight);
  same("replicas", got.replicas, want.replicas);
  same("quarantined_fetch", got.quarantined_fetch, want.quarantined_fetch);
  same("fetch_bytes", got.fetch_bytes, want.fetch_bytes);
  same("leases", got.leases, want.leases);
  same("lent", got.lent, want.lent);
  same("lent_bytes", got.lent_bytes, want.lent_bytes);
  if (got.oldest_lease != want.oldest_lease) throw Mismatch{"oldest_lease differs"};
  same("evicted_replicas", got.evicted_replicas, want.evicted_replicas);
  same("fetches", got.fetches, want.fetches);
  same("fetches_joined", got.fetches_joined, want.fetches_joined);
  same("fetches_no_room", got.fetches_no_room, want.fetches_no_room);
  same("fetched", got.fetched, want.fetched);
  same("fetches_given_up", got.fetches_given_up, want.fetches_given_up);
  same("leases_made", got.leases_made, want.leases_made);
  same("leases_expired", got.leases_expired, want.leases_expired);
  same("leases_shortened", got.leases_shortened, want.leases_shortened);
  same("claims", got.claims, want.claims);
  same("pins", got.pins, want.pins);
  same("reservations", got.reservations, want.reservations);
  same("oldest_pin", got.oldest_pin.has_value(), want.oldest_pin.has_value());
  if (got.oldest_pin != want.oldest_pin) throw Mismatch{"oldest_pin differs"};
  same("lookups", got.lookups, want.lookups);
  same("lookup_hits", got.lookup_hits, want.lookup_hits);
  same("lookup_misses", got.lookup_misses, want.lookup_misses);
  same("insertions", got.insertions, want.insertions);
  same("evictions", got.evictions, want.evictions);
  same("cleaned", got.cleaned, want.cleaned);
  same("retired", got.retired, want.retired);
  same("invalidated", got.invalidated, want.invalidated);
  same("skipped_present", got.skipped_present, want.skipped_present);
  same("skipped_no_room", got.skipped_no_room, want.skipped_no_room);
  same("skipped_refused", got.skipped_refused, want.skipped_refused);
  same("claims_revoked", got.claims_revoked, want.claims_revoked);
  same("claims_shortened", got.claims_shortened, want.claims_shortened);
  same("reservations_timed_out", got.reservations_timed_out, want.reservations_timed_out);
  same("late_publishes", got.late_publishes, want.late_publishes);
}

void World::compare_journal() {
  // A reader that reads now and then, in parts.
  if (steps_ % 8 != 0) return;
  const std::size_t limit = 1 + pick(64);
  std::uint64_t next = journal_read_;
  for (bool has_more = true; has_more;) {
    for (const OneSpace& space : spaces_) {
      const auto part = store_->journal(space.id, journal_read_, limit);
      std::set<BlockKey>& believed = believed_[space.id];
      if (part.has_lost) {
        coverage_.hit("journal lost");
        believed.clear();
        not_all_read_.insert(space.id);
      }
      for (const auto& said : part.entries) {
        said.is_present ? (void)believed.insert(said.key) : (void)believed.erase(said.key);
      }
      next = part.next;
      has_more = part.has_more;
    }
    journal_read_ = next;
  }
  for (const OneSpace& space : spaces_) {
    const std::set<BlockKey> sealed = oracle_->sealed(space.id);
    const std::set<BlockKey>& believed = believed_[space.id];
    const bool is_right =
        not_all_read_.contains(space.id)
            ? std::includes(sealed.begin(), sealed.end(), believed.begin(), believed.end())
            : sealed == believed;
    if (!is_right) throw Mismatch{"a reader of the journal has a wrong state"};
    if (!believed.empty()) coverage_.hit("journal");
  }
}

void World::compare_order() {
  // One place each step, the whole order of eviction now and then.
  const std::list<engine::FrameIndex>& order = oracle_->evictable();
  const auto expected_at = [&](std::size_t n) -> std::optional<engine::FrameIndex> {
    if (n >= order.size()) return std::nullopt;
    return *std::next(order.rbegin(), static_cast<std::ptrdiff_t>(n));
  };
  const bool all = steps_ % 64 == 0;
  const std::size_t begin = all ? 0 : pick(order.size() + 1);
  const std::size_t end = all ? order.size() + 1 : begin + 1;
  for (std::size_t n = begin; n < end; ++n) {
    if (store_->recent_frame(n) != expected_at(n)) {
      throw Mismatch{fmt::format("another block is the {}-th most recent one", n)};
    }
  }
}

}  // namespace pegaflow::sim
