// Lookups and claims over several kinds of blocks, of which another node has some.
#include <algorithm>
#include <utility>

#include <kj/vector.h>

#include "server/fetches/fetches.h"
#include "server/fetches/fetches_impl.h"

namespace pegaflow::server {
namespace {

std::vector<engine::BlockStore::ClaimPart> blocks_of(const PeerSearch& search,
                                                     const PeerSearch::Found& found) {
  std::vector<engine::BlockStore::ClaimPart> blocks;
  for (const PeerSearch::Part& part : found.parts) {
    blocks.push_back(
        {.space = search.wants().kinds[part.kind].generation, .keys = part.keys, .token = {}});
  }
  return blocks;
}

}  // namespace

/// Null: no owner can have more than this node.
std::shared_ptr<PeerSearch> Fetches::search_for(const Id128& connection,
                                                std::span<const BlockKey> units,
                                                std::size_t local_units) {
  if (source_ == nullptr || units.empty() || !source_->is_ready()) return nullptr;
  auto wants = service_.wants_of_kinds(connection, local_units);
  if (!wants) return nullptr;
  auto search = std::make_shared<PeerSearch>(service_.store(), *source_, std::move(*wants), units);
  return search->may_find_more() ? search : nullptr;
}

kj::Maybe<kj::Promise<std::size_t>> Fetches::reach_kinds(const Id128& connection,
                                                         std::span<const BlockKey> units,
                                                         std::size_t local_units) {
  const auto search = search_for(connection, units, local_units);
  if (search == nullptr) return nullptr;
  ++stats_.lookups;
  return search->run().then([this, search, connection](PeerSearch::Found&& found) -> std::size_t {
    if (!service_.has_room_to_fetch(connection, blocks_of(*search, found))) return 0;
    return found.tokens / search->wants().rules.unit_tokens;
  });
}

kj::Maybe<kj::Promise<Fetches::ClaimOfKinds>> Fetches::claim_kinds(
    const Id128& connection, const Id128& token, std::span<const BlockKey> units,
    std::size_t local_units, const cluster::ComputeTime& compute) {
  if (token.is_none()) return nullptr;
  auto plan = std::make_shared<PlanOfKinds>();
  plan->search = search_for(connection, units, local_units);
  if (plan->search == nullptr) return nullptr;
  plan->connection = connection;
  plan->token = token;
  plan->deadline = clock_.now() + options_.deadline;
  plan->compute = compute;
  extending_.insert(token);
  ++stats_.claims;
  // A task of its own: frames that were taken have an end even if the caller has left.
  auto made = kj::newPromiseAndFulfiller<ClaimOfKinds>();
  tasks_.add(
      make_claim(plan).then([fulfiller = kj::mv(made.fulfiller)](ClaimOfKinds&& claim) mutable {
        fulfiller->fulfill(std::move(claim));
      }));
  return kj::mv(made.promise);
}

kj::Promise<Fetches::ClaimOfKinds> Fetches::make_claim(const OnePlanOfKinds& plan) {
  return plan->search->run()
      .then([this, plan](PeerSearch::Found&& found) -> kj::Promise<void> {
        plan->found = std::move(found);
        const auto blocks = blocks_of(*plan->search, plan->found);
        if (plan->found.tokens == 0 || !extending_.contains(plan->token) ||
            !service_.has_room_to_fetch(plan->connection, blocks) || !is_worth(*plan)) {
          return kj::READY_NOW;
        }
        return lease_all(plan);
      })
      .then([this, plan]() -> kj::Promise<bool> {
        const auto is_leased = [](const PartOfKind& part) {
          return part.leased == part.wanted.missing.size();
        };
        if (plan->parts.empty() ||
            !std::all_of(plan->parts.begin(), plan->parts.end(), is_leased)) {
          return false;
        }
        // Other claims may have taken the room meanwhile.
        std::vector<engine::BlockStore::ClaimPart> blocks;
        for (const PartOfKind& part : plan->parts) {
          blocks.push_back(
              {.space = part.generation, .keys = part.wanted.keys, .token = part.token});
        }
        if (!service_.has_room_to_fetch(plan->connection, blocks)) return false;
        return take_all_frames(plan);
      })
      .then([this, plan](bool is_claimed) {
        read_all(*plan);
        ClaimOfKinds claim;
        claim.is_ended = extending_.erase(plan->token) == 0;
        if (!is_claimed) return claim;
        ++stats_.claims_coming;
        claim.arrival = plan->arrival;
        claim.claimed.units = plan->found.tokens / plan->search->wants().rules.unit_tokens;
        claim.claimed.complete = true;
        for (const PartOfKind& part : plan->parts) {
          claim.claimed.ranges.push_back({.kind = part.wanted.kind, .blocks = part.wanted.blocks});
        }
        return claim;
      });
}

/// Whether to fetch the missing blocks rather than compute the tokens. An owner of unknown rate is
/// probed with the whole claim: a part of it is of no use.
bool Fetches::is_worth(PlanOfKinds& plan) {
  const CacheService::WantsOfKinds& wants = plan.search->wants();
  const cluster::Source::Located& owner = plan.found.owner;
  const TimePoint now = clock_.now();
  std::uint64_t bytes = 0;
  std::uint64_t disk_bytes = 0;
  std::size_t blocks = 0;
  for (const PeerSearch::Part& part : plan.found.parts) {
    bytes += part.missing.size() * wants.kinds[part.kind].block_bytes();
    disk_bytes += part.owner.on_disks.blocks * wants.kinds[part.kind].block_bytes();
    blocks += part.missing.size();
  }
  plan.arrival = owner.predict(bytes, disk_bytes);
  if (!plan.compute.is_known()) return true;
  const std::uint64_t without = std::max(plan.search->local(), wants.local_tokens);
  const Duration computing =
      plan.compute.of((plan.found.tokens - without) / wants.rules.unit_tokens);
  const bool is_slow = !owner.is_known() || plan.arrival.last > computing;
  const bool may_probe = !owner.is_fresh(now) && owner.queued_bytes() == 0;
  if (now >= owner.stuck_at() || (is_slow && !may_probe)) {
    stats_.declined += blocks;
    return false;
  }
  if (is_slow) plan.arrival = {.first = computing, .last = computing};
  return true;
}

kj::Promise<void> Fetches::lease_all(const OnePlanOfKinds& plan) {
  const CacheService::WantsOfKinds& wants = plan->search->wants();
  for (PeerSearch::Part& wanted : plan->found.parts) {
    const CacheService::Wants& kind = wants.kinds[wanted.kind];
    const auto token = service_.claim_of_kind(plan->connection, plan->token, wanted.kind);
    if (!token) {
      plan->parts.clear();
      return kj::READY_NOW;
    }
    PartOfKind& part = plan->parts.emplace_back();
    part.token = *token;
    part.generation = kind.generation;
    part.request = std::make_shared<cluster::Source::Request>();
    part.request->space = kind.space;
    part.request->page_bytes = kind.page_bytes;
    part.request->keys = wanted.keys;
    part.request->deadline = plan->deadline;
    part.request->reserved = std::make_unique<cluster::SourceRate::Reserved>(
        plan->found.owner.rate, wanted.missing.size() * kind.block_bytes());
    part.wanted = std::move(wanted);
  }
  kj::Vector<kj::Promise<void>> leasing;
  for (std::size_t part = 0; part < plan->parts.size(); ++part) {
    leasing.add(lease_rest(plan, part));
  }
  return kj::joinPromises(leasing.releaseAsArray());
}

/// An owner may grant less than it was asked for: then the rest is leased separately.
kj::Promise<void> Fetches::lease_rest(const OnePlanOfKinds& plan, std::size_t index) {
  PartOfKind& part = plan->parts[index];
  if (part.leased == part.wanted.missing.size() || part.leases.size() == kMostRuns) {
    return kj::READY_NOW;
  }
  std::vector<BlockKey> keys;
  for (std::size_t i = part.leased; i < part.wanted.missing.size(); ++i) {
    keys.push_back(part.wanted.keys[part.wanted.missing[i]]);
  }
  return source_->lease(part.request, std::move(keys), part.wanted.owner)
      .then([this, plan, index](SharedLease&& lease) -> kj::Promise<void> {
        if (lease == nullptr) return kj::READY_NOW;
        PartOfKind& leased = plan->parts[index];
        leased.leases.push_back({.lease = lease, .from = leased.leased, .blocks = {}});
        leased.leased += lease->blocks;
        return lease_rest(plan, index);
      });
}

/// Makes the claims on all kinds, a slice for each event-loop iteration, or none: returns false.
kj::Promise<bool> Fetches::take_all_frames(const OnePlanOfKinds& plan) {
  std::size_t budget = CacheService::kSliceBlocks;
  bool is_whole = extending_.contains(plan->token);
  bool is_begun = false;
  for (PartOfKind& part : plan->parts) {
    const std::size_t count = std::min(budget, part.wanted.keys.size() - part.claimed);
    if (is_whole && count != 0) is_whole = take_some_frames(*plan, part, count);
    budget -= count;
    is_begun = is_begun || part.claimed != 0;
  }
  if (is_whole && budget == 0) {
    return next_turn(timer_).then([this, plan]() { return take_all_frames(plan); });
  }
  if (is_whole) {
    std::vector<Id128> tokens;
    for (const PartOfKind& part : plan->parts) tokens.push_back(part.token);
    is_whole = service_.join_claims(plan->connection, tokens).has_value();
  }
  // The claims that were made are of no use. A connection that ended has lost them already.
  if (!is_whole && is_begun) (void)service_.unclaim(plan->connection, plan->token);
  return is_whole;
}

/// Extends the claim on one kind by `count` blocks; returns false when it did not get them all.
bool Fetches::take_some_frames(PlanOfKinds& plan, PartOfKind& part, std::size_t count) {
  const std::size_t first = part.claimed;
  auto fetch =
      service_.fetch(plan.connection, part.generation, part.token, first,
                     std::span(part.wanted.keys).subspan(first, count), count, part.wanted.kind);
  if (!fetch) return false;
  note_joined_staging(part.token, first, fetch->blocks);
  part.claimed += fetch->blocks;
  bool is_whole = fetch->blocks == count;
  const std::vector<std::size_t>& missing = part.wanted.missing;
  for (CacheService::Fetched& frame : fetch->frames) {
    const std::size_t place = first + frame.place;
    const auto found = std::lower_bound(missing.begin(), missing.end(), place);
    if (found == missing.end() || *found != place) {
      // It was here until now, so it is not leased.
      quiesce(frame.frame);
      is_whole = false;
      continue;
    }
    const auto number = static_cast<std::size_t>(found - missing.begin());
    const auto behind = std::find_if(part.leases.begin(), part.leases.end(),
                                     [&](const auto& each) { return each.from > number; });
    PartOfKind::Leased& leased = *std::prev(behind);
    leased.blocks.push_back({.place = place,
                             .frame = frame.frame,
                             .offsets = std::move(frame.offsets),
                             .leased = number - leased.from});
  }
  return is_whole;
}

/// Queues what frames were taken for, and ends the leases. Of a claim that was not made only the
/// blocks are read that another claim waits for by now.
void Fetches::read_all(PlanOfKinds& plan) {
  for (PartOfKind& part : plan.parts) {
    for (PartOfKind::Leased& each : part.leases) {
      if (!each.blocks.empty()) source_->read(part.request, each.lease, std::move(each.blocks));
      source_->end(each.lease);
    }
    part.request->reserved.reset();
  }
}

}  // namespace pegaflow::server
