#include "cluster/peer_source.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/page_layout.h"
#include "base/units.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow::cluster {
namespace {

constexpr Log kLog{"fetch"};

/// Blocks in one batch.
constexpr std::size_t kMaxBatchBlocks = 64;

/// How long an owner may wait for the next pending blocks before it answers.
constexpr std::chrono::milliseconds kPendingPatience{5};

/// The least time for a confirmation, where the deadline of the request is sooner.
constexpr Duration kConfirmPatience = std::chrono::milliseconds(20);

}  // namespace

/// Blocks that are pending at an owner, which reads them from its disks into its pool.
struct PeerSource::Staged {
  std::uint64_t number = 0;      ///< The owner's; 0 once the staging is over.
  std::size_t next = 0;          ///< Index in the lease of the first block that was not lent yet.
  std::size_t end = 0;           ///< The index behind the last one.
  OnDisks reported{};            ///< The owner's last report about the blocks from `next` on.
  SharedRequest request{};       ///< That of `waiting`.
  std::vector<Block> waiting{};  ///< In the order of the lease.
  /// The bytes of those, by frame.
  std::unordered_map<std::uint32_t, SourceRate::Queued> queued{};
  /// The read under which the rate of the owner's disks counts the next blocks; 0: none.
  std::uint64_t measured = 0;
  TimePoint since{};  ///< When it began.
};

/// The peers that have blocks of a prefix, the one with most first.
struct PeerSource::Candidates : Owners {
  std::vector<Lenders::Owner> list;
};

/// A lease of one peer.
struct PeerSource::PeerLease : Lease {
  Lender* peer = nullptr;
  Queue* queue = nullptr;  ///< The peer's.
  std::uint64_t life = 0;  ///< The peer's life in which it granted the lease.
  Lender::Route route;
  std::uint64_t number = 0;
  TimePoint end;         ///< By the local BootClock.
  std::size_t lent = 0;  ///< Blocks of the prefix that it covers; the others are pending.
  std::unique_ptr<Staged> staged{};  ///< Null: none is pending.
  std::vector<std::uint32_t> pages;
  /// Its holders: the caller of lease(), each batch until it has quiesced, and a confirmation.
  std::size_t users = 1;
  std::vector<Block> whole{};  ///< Read, and not confirmed yet.
  bool is_confirming = false;  ///< A confirmation of earlier blocks is in flight.
};

/// Blocks that are read together.
struct PeerSource::Batch {
  SharedRequest request;
  OneLease lease;
  std::vector<Block> blocks;
  std::optional<SourceRate::Queued> queued;
  TimePoint since{};          ///< When the fabric accepted it.
  bool is_completed = false;  ///< The blocks that are left were given up and are not quiesced.
};

PeerSource::PeerSource(Lenders& peers, std::vector<Lane> lanes, const Clock& clock,
                       const Clock& boot, const Options& options)
    : peers_(peers),
      lanes_(std::move(lanes)),
      clock_(clock),
      boot_(boot),
      options_(options),
      tasks_(*this) {}

PeerSource::~PeerSource() noexcept(false) = default;

PeerSource::Stats PeerSource::stats() const {
  Stats stats = stats_;
  stats.batches = batches_.size() + waiting_ + confirming_ + staging_;
  const TimePoint now = clock_.now();
  for (const auto& [ticket, batch] : batches_) {
    stats.oldest = std::max(stats.oldest, now - batch->since);
  }
  return stats;
}

const SourceRate* PeerSource::rate(const Lender& lender) const {
  const auto found = queues_.find(&lender);
  return found == queues_.end() ? nullptr : found->second.rate.get();
}

// ---- owners and leases

kj::Promise<Source::Located> PeerSource::locate(const Bytes32& space,
                                                std::span<const BlockKey> keys) {
  return locate_at({}, space, keys);
}

kj::Promise<Source::Located> PeerSource::locate_at(std::span<const Id128> nodes,
                                                   const Bytes32& space,
                                                   std::span<const BlockKey> keys) {
  return peers_.owners(space, keys, nodes)
      .then([this](std::vector<Lenders::Owner>&& owners) -> Located {
        if (owners.empty()) return {};
        auto all = std::make_shared<Candidates>();
        all->list = std::move(owners);
        const Lenders::Owner& best = all->list.front();
        return {.blocks = best.blocks,
                .rate = queues_[best.peer].rate,
                .batch_bytes = options_.batch_bytes,
                .all = std::move(all),
                .on_disks = best.on_disks,
                .disks = queues_[best.peer].disks};
      });
}

Source::Holding PeerSource::holding(Lender& peer, std::uint64_t life, std::vector<bool> has,
                                    const OnDisks& on_disks) {
  auto only = std::make_shared<Candidates>();
  const auto count = static_cast<std::size_t>(std::count(has.begin(), has.end(), true));
  only->list.push_back({.peer = &peer, .life = life, .blocks = count});
  return {.rate = queues_[&peer].rate,
          .batch_bytes = options_.batch_bytes,
          .has = std::move(has),
          .all = std::move(only),
          .on_disks = on_disks,
          .disks = queues_[&peer].disks};
}

kj::Promise<std::vector<Source::Holding>> PeerSource::locate_prefixes(
    const Bytes32& space, std::span<const BlockKey> keys) {
  return peers_.owners(space, keys)
      .then([this, asked = keys.size()](std::vector<Lenders::Owner>&& owners) {
        std::vector<Holding> found;
        for (const Lenders::Owner& owner : owners) {
          std::vector<bool> has(asked);
          std::fill_n(has.begin(), owner.blocks, true);
          found.push_back(holding(*owner.peer, owner.life, std::move(has), owner.on_disks));
        }
        return found;
      });
}

kj::Promise<std::vector<Source::Holding>> PeerSource::locate_each(const Bytes32& space,
                                                                  std::span<const BlockKey> keys) {
  return peers_.holders(space, keys).then([this](std::vector<Lenders::Holder>&& holders) {
    std::vector<Holding> found;
    for (Lenders::Holder& each : holders) {
      found.push_back(holding(*each.peer, each.life, std::move(each.has), each.on_disks));
    }
    return found;
  });
}

kj::Promise<Source::SharedLease> PeerSource::lease(SharedRequest request,
                                                   std::vector<BlockKey> keys, Located located) {
  if (located.blocks == 0) return SharedLease();
  return lease_from(std::move(request), std::move(keys),
                    static_cast<const Candidates&>(*located.all).list);
}

kj::Promise<Source::SharedLease> PeerSource::lease_from(SharedRequest request,
                                                        std::vector<BlockKey> keys,
                                                        std::vector<Lenders::Owner> owners) {
  std::erase_if(owners, [&](const Lenders::Owner& owner) {
    const auto& failed = request->failed;
    return !owner.peer->is_ready() || owner.peer->life() != owner.life ||
           std::find(failed.begin(), failed.end(), queues_[owner.peer].rate.get()) != failed.end();
  });
  if (owners.empty() || request->failed.size() >= kMostOwners ||
      clock_.now() >= request->deadline) {
    return SharedLease();
  }
  const Lenders::Owner owner = owners.front();
  keys.resize(std::min({keys.size(), owner.blocks, kMaxPagesPerLease / request->shards()}));
  const TimePoint requested = boot_.now();
  auto granted = owner.peer->lease(request->space, keys, request->shards(), options_.lease);
  return granted.then([this, owner, requested, request = std::move(request), keys = std::move(keys),
                       owners = std::move(owners)](
                          Result<LeaseGrant>&& grant) mutable -> kj::Promise<SharedLease> {
    if (grant && (!grant->pages.empty() || grant->staging != 0)) {
      return SharedLease(note_granted(owner, std::move(*grant), request->shards(), requested));
    }
    if (!grant) {
      kLog.debug("no lease peer={} error=\"{}\"", owner.peer->address(), to_string(grant.error()));
    }
    request->note_failed(queues_[owner.peer].rate.get());
    return lease_from(std::move(request), std::move(keys), std::move(owners));
  });
}

PeerSource::OneLease PeerSource::note_granted(const Lenders::Owner& owner, LeaseGrant&& grant,
                                              std::size_t shards, TimePoint requested) {
  ++stats_.leases;
  auto lease = std::make_shared<PeerLease>();
  lease->peer = owner.peer;
  lease->queue = &queues_[owner.peer];
  lease->life = owner.life;
  lease->route = owner.peer->route();
  lease->number = grant.lease;
  lease->end = requested + std::min(grant.granted, options_.lease);
  lease->lent = grant.pages.size() / shards;
  lease->blocks = lease->lent + grant.pending.blocks;
  if (grant.staging != 0) {
    ++staging_;
    lease->staged = std::make_unique<Staged>(
        Staged{.number = grant.staging, .next = lease->lent, .end = lease->blocks});
    lease->staged->reported = grant.pending;
  }
  lease->pages = std::move(grant.pages);
  lease->checksums = std::move(grant.checksums);
  return lease;
}

void PeerSource::end(const SharedLease& lease) {
  const OneLease granted = std::static_pointer_cast<PeerLease>(lease);
  if (granted->staged != nullptr) {
    measure_pending(*granted);
    request_pending(granted);
  }
  let_go(*granted);
}

std::optional<Source::InPool> PeerSource::in_pool(const SharedLease& lease,
                                                  std::string_view backend) const {
  const auto& granted = static_cast<const PeerLease&>(*lease);
  const Lender& peer = *granted.peer;
  // Another life has another fabric, and pending blocks have no place yet.
  if (granted.staged != nullptr || !peer.is_ready() || peer.life() != granted.life) return {};
  if (boot_.now() >= granted.end - kLeaseMargin) return {};
  const FabricDescriptor* const fabric = peer.fabric();
  if (fabric == nullptr || fabric->backend != backend) return {};
  return InPool{
      .node = peer.node(), .rate = granted.queue->rate, .fabric = fabric, .pages = granted.pages};
}

kj::Promise<bool> PeerSource::confirm_reads(const SharedLease& lease, Duration patience) {
  const OneLease granted = std::static_pointer_cast<PeerLease>(lease);
  const bool may_ask = granted->peer->is_ready() && granted->peer->can_release(granted->life);
  if (!may_ask || boot_.now() >= granted->end) return false;
  ++granted->users;
  return granted->peer->confirm(granted->number, patience)
      .then([this, granted](Result<bool>&& held) {
        let_go(*granted);
        return held.value_or(false);
      });
}

void PeerSource::let_go(PeerLease& lease) {
  if (--lease.users != 0 || lease.number == 0) return;
  if (lease.peer->can_release(lease.life)) lease.peer->release(lease.number);
}

// ---- reads

void PeerSource::read(const SharedRequest& request, const SharedLease& lease,
                      std::vector<Block>&& blocks) {
  const OneLease granted = std::static_pointer_cast<PeerLease>(lease);
  if (request->reserved) {
    request->reserved->queued(blocks.size() * std::max<std::uint64_t>(1, request->block_bytes()));
  }
  const auto pending = std::find_if(blocks.begin(), blocks.end(), [&](const Block& block) {
    return block.leased >= granted->lent;
  });
  const auto count = static_cast<std::size_t>(pending - blocks.begin());
  queue_batches(request, granted, std::span(blocks).first(count));
  if (count != blocks.size()) wait_for_pending(request, *granted, std::span(blocks).subspan(count));
}

void PeerSource::queue_batches(const SharedRequest& request, const OneLease& lease,
                               std::span<Block> blocks) {
  Queue& queue = *lease->queue;
  const std::uint64_t block_bytes = std::max<std::uint64_t>(1, request->block_bytes());
  const std::uint64_t fit =
      queue.rate->bytes_within(kBatchTime, options_.batch_bytes) / block_bytes;
  const std::size_t step = std::clamp<std::size_t>(fit, 1, kMaxBatchBlocks);
  for (std::size_t from = 0; from < blocks.size(); from += step) {
    const std::size_t count = std::min(blocks.size() - from, step);
    const std::span<Block> part = blocks.subspan(from, count);
    auto batch = std::make_unique<Batch>();
    batch->request = request;
    batch->lease = lease;
    ++lease->users;
    batch->queued.emplace(queue.rate, count * block_bytes);
    sink().queued(part, *queue.rate, batch->queued->end());
    batch->blocks.assign(std::make_move_iterator(part.begin()),
                         std::make_move_iterator(part.end()));
    queue.waiting.push_back(std::move(batch));
    ++waiting_;
  }
  submit_some(queue);
}

void PeerSource::submit_some(Queue& queue) {
  const SourceRate& rate = *queue.rate;
  while (!queue.waiting.empty() && batches_.size() < options_.batches) {
    // Two, so that the route is never idle between one batch and the next.
    const std::uint64_t bytes = rate.read_bytes() + queue.waiting.front()->queued->bytes();
    const bool fits = rate.reads() < 2 || bytes <= rate.bytes_within(kWindowTime, bytes);
    if (rate.reads() >= options_.batches_per_owner || !fits) return;
    auto next = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    --waiting_;
    const OneLease lease = next->lease;
    if (!submit(queue, std::move(next))) let_go(*lease);
  }
}

/// Submits what each owner may have at the fabrics. Owners take turns where places are short.
void PeerSource::submit_all() {
  if (waiting_ == 0) return;
  std::vector<Queue*> turns;
  for (auto& [lender, queue] : queues_) {
    if (!queue.waiting.empty()) turns.push_back(&queue);
  }
  std::sort(turns.begin(), turns.end(), [](const Queue* one, const Queue* other) {
    return one->last_ticket < other->last_ticket;
  });
  for (Queue* const queue : turns) submit_some(*queue);
}

/// Gives a batch to the fabric. Returns false when nothing is read; the caller then ends the
/// batch's use of its lease.
bool PeerSource::submit(Queue& queue, std::unique_ptr<Batch> batch) {
  sink().remove_unwanted(batch->blocks);
  if (batch->blocks.empty()) return false;
  const TimePoint now = clock_.now();
  ++last_ticket_;
  Fabric::Batch wanted = to_fabric(*batch, now);
  const bool is_late = wanted.deadline <= now;
  const auto accepted = is_late
                            ? Result<void>(fail(Errc::kTimeout, "no time is left"))
                            : lanes_.at(batch->lease->route.lane).fabric->read(std::move(wanted));
  if (!accepted) {
    kLog.debug("blocks are not read peer={} blocks={} error=\"{}\"", batch->lease->peer->address(),
               batch->blocks.size(), to_string(accepted.error()));
    sink().rejected(batch->blocks);
    return false;
  }
  batch->since = now;
  queue.last_ticket = last_ticket_;
  queue.rate->read_began(last_ticket_, batch->queued->bytes(), now);
  batches_.emplace(last_ticket_, std::move(batch));
  return true;
}

/// The batch as reads by its lease, under the last ticket.
Fabric::Batch PeerSource::to_fabric(const Batch& batch, TimePoint now) const {
  const Request& request = *batch.request;
  const PeerLease& lease = *batch.lease;
  const std::size_t shards = request.shards();
  Fabric::Batch wanted{
      .ticket = last_ticket_,
      .peer = lease.route.peer,
      .priority = Fabric::Priority::kForeground,
      .deadline = std::min(request.deadline, now + (lease.end - boot_.now()) - kLeaseMargin),
      .chunks = {}};
  wanted.chunks.reserve(batch.blocks.size() * request.pages());
  for (const Block& block : batch.blocks) {
    for (std::size_t shard = 0; shard < shards; ++shard) {
      if (request.page_bytes[shard] == 0) continue;  // The shard has no page of this kind.
      wanted.chunks.push_back({.remote_region = lease.route.pool,
                               .remote_offset = lease.pages[block.leased * shards + shard] *
                                                std::uint64_t{kSlotAlignment},
                               .local_region = lanes_.at(lease.route.lane).pool,
                               .local_offset = block.offsets[shard],
                               .size_bytes = request.page_bytes[shard]});
    }
  }
  return wanted;
}

void PeerSource::completed(const Fabric::Completion& completion) {
  const auto found = batches_.find(completion.ticket);
  PEGA_ASSERT(found != batches_.end(), "the fabric completed unknown batch {}", completion.ticket);
  Batch& batch = *found->second;
  if (batch.is_completed) {
    sink().quiesced(batch.blocks);
  } else {
    end_read(batch, completion);
  }
  if (completion.quiesced) {
    const OneLease lease = batch.lease;
    batches_.erase(found);
    let_go(*lease);
  }
  submit_all();
  sink().progressed();
}

/// The first completion of a batch: it has a result for each chunk.
void PeerSource::end_read(Batch& batch, const Fabric::Completion& completion) {
  batch.is_completed = true;
  batch.lease->queue->rate->read_ended(completion.ticket);
  stats_.duration.record(clock_.now() - batch.since);
  Verdict verdict = judge(batch, completion);
  batch.queued.reset();
  if (!verdict.failed.empty()) note_failure(batch, verdict, completion);
  batch.blocks = std::move(verdict.failed);
  confirm(batch.request, batch.lease);
  if (!completion.quiesced) {
    sink().given_up(batch.blocks);
  } else if (!batch.blocks.empty()) {
    sink().failed(batch.request, std::exchange(batch.blocks, {}));
  }
}

/// Moves the blocks that were read within the lease to the lease, and the others to the verdict.
PeerSource::Verdict PeerSource::judge(Batch& batch, const Fabric::Completion& completion) {
  PeerLease& lease = *batch.lease;
  const std::size_t pages = batch.request->pages();
  PEGA_ASSERT(completion.chunks.size() == batch.blocks.size() * pages,
              "batch {} completed with {} chunks of {}", completion.ticket,
              completion.chunks.size(), batch.blocks.size() * pages);
  // After the last byte: only then the bytes are those of the leased blocks.
  Verdict verdict{.failed = {}, .why = {}, .is_in_time = boot_.now() < lease.end};
  std::size_t arrived = 0;
  for (std::size_t i = 0; i < batch.blocks.size(); ++i) {
    const auto chunks = std::span(completion.chunks).subspan(i * pages, pages);
    const auto bad = std::find_if(chunks.begin(), chunks.end(),
                                  [](const auto& chunk) { return chunk.has_value(); });
    if (bad == chunks.end() && verdict.is_in_time) {
      ++arrived;
      lease.whole.push_back(std::move(batch.blocks[i]));
      continue;
    }
    if (bad == chunks.end()) {
      ++stats_.outlived;
    } else {
      verdict.why = *bad;
      if (**bad == Errc::kCorrupt) ++stats_.corrupt;
    }
    verdict.failed.push_back(std::move(batch.blocks[i]));
  }
  const std::uint64_t bytes = arrived * batch.request->block_bytes();
  if (bytes != 0) lease.queue->rate->arrived(bytes, batch.since, clock_.now());
  return verdict;
}

/// Reports the failed blocks of a batch, and what they show about the peer.
void PeerSource::note_failure(const Batch& batch, const Verdict& verdict,
                              const Fabric::Completion& completion) {
  const PeerLease& lease = *batch.lease;
  const std::optional<Errc> why = verdict.why;
  kLog.warn("blocks did not arrive peer={} blocks={} of={} error=\"{}: {}\"", lease.peer->address(),
            verdict.failed.size(), batch.blocks.size(),
            why ? to_string(*why) : "the lease had ended", completion.detail);
  // The route is broken, or leads to another life of the peer: no other read should wait for it. A
  // lane that received invalid data gives the peer up until the next greeting.
  const bool route_broke = why == Errc::kPeerLost || why == Errc::kCorrupt;
  if (route_broke) lease.peer->route_lost(lease.life, lease.route, completion.detail);
  if (why == Errc::kGone && verdict.is_in_time) lease.peer->lost(lease.life, completion.detail);
  const bool has_other_route =
      route_broke && lease.peer->is_ready() && lease.peer->route() != lease.route;
  if (!has_other_route) batch.request->note_failed(lease.queue->rate.get());
}

// ---- blocks that are pending at their owner

void PeerSource::wait_for_pending(const SharedRequest& request, PeerLease& lease,
                                  std::span<Block> blocks) {
  Staged& staged = *lease.staged;
  const std::shared_ptr<SourceRate>& disks = lease.queue->disks;
  const std::uint64_t block_bytes = std::max<std::uint64_t>(1, request->block_bytes());
  staged.request = request;
  for (Block& block : blocks) {
    const auto [queued, is_new] = staged.queued.try_emplace(block.frame, disks, block_bytes);
    sink().queued({&block, 1}, *disks, queued->second.end());
    staged.waiting.push_back(std::move(block));
  }
}

/// Called once all reads were queued, and then after each answer: requests the next blocks, or ends
/// the staging.
void PeerSource::request_pending(const OneLease& lease) {
  Staged& staged = *lease->staged;
  if (!staged.waiting.empty()) sink().remove_unwanted(staged.waiting);
  if (staged.queued.size() != staged.waiting.size()) {
    std::unordered_set<std::uint32_t> wanted;
    for (const Block& block : staged.waiting) wanted.insert(block.frame);
    std::erase_if(staged.queued, [&](const auto& each) { return !wanted.contains(each.first); });
  }
  if (staged.waiting.empty()) return end_staging(*lease);
  const bool may_ask = lease->peer->is_ready() && lease->peer->life() == lease->life &&
                       clock_.now() < staged.request->deadline;
  if (!may_ask) return lose_pending(*lease, staged.next);
  const TimePoint requested = boot_.now();
  auto granted = lease->peer->lease_pending({.space = staged.request->space,
                                             .number = staged.number,
                                             .pending = staged.end - staged.next,
                                             .shards = staged.request->shards()},
                                            options_.lease, kPendingPatience);
  tasks_.add(granted.then([this, lease, requested](Result<LeaseGrant>&& grant) {
    note_pending(lease, std::move(grant), requested);
    sink().progressed();
  }));
}

void PeerSource::note_pending(const OneLease& lease, Result<LeaseGrant>&& grant,
                              TimePoint requested) {
  const bool is_same_life = lease->peer->is_ready() && lease->peer->life() == lease->life;
  if (!grant || !is_same_life || (grant->pages.empty() && grant->staging == 0)) {
    kLog.debug("pending blocks do not follow peer={} error=\"{}\"", lease->peer->address(),
               grant ? "the owner gave them up" : to_string(grant.error()));
    return lose_pending(*lease, lease->staged->next);
  }
  read_pending(*lease, std::move(*grant), requested);
  request_pending(lease);
}

/// Queues the blocks that the owner has lent now, under a lease of their own.
void PeerSource::read_pending(PeerLease& lease, LeaseGrant&& grant, TimePoint requested) {
  Staged& staged = *lease.staged;
  const SharedRequest request = staged.request;
  const OnDisks pending = grant.pending;
  const std::size_t count = grant.pages.size() / request->shards();
  const std::size_t first = staged.next;
  if (count != 0) {
    grant.pending = {};
    grant.staging = 0;
    const OneLease part = note_granted({.peer = lease.peer, .life = lease.life, .blocks = count},
                                       std::move(grant), request->shards(), requested);
    const auto behind =
        std::find_if(staged.waiting.begin(), staged.waiting.end(),
                     [&](const Block& block) { return block.leased >= first + count; });
    std::vector<Block> ready(std::make_move_iterator(staged.waiting.begin()),
                             std::make_move_iterator(behind));
    staged.waiting.erase(staged.waiting.begin(), behind);
    for (Block& block : ready) {
      block.leased -= first;
      staged.queued.erase(block.frame);
    }
    lease.queue->disks->arrived(count * request->block_bytes(), staged.since, clock_.now());
    staged.next += count;
    stats_.pending += count;
    queue_batches(request, part, ready);
    let_go(*part);
  }
  staged.reported = pending;
  if (staged.next + pending.blocks < staged.end) lose_pending(lease, staged.next + pending.blocks);
  if (count != 0) measure_pending(lease);
}

/// The blocks from that index of the lease on are not lent by this owner.
void PeerSource::lose_pending(PeerLease& lease, std::size_t from) {
  Staged& staged = *lease.staged;
  const auto first = std::find_if(staged.waiting.begin(), staged.waiting.end(),
                                  [from](const Block& block) { return block.leased >= from; });
  std::vector<Block> lost(std::make_move_iterator(first),
                          std::make_move_iterator(staged.waiting.end()));
  staged.waiting.erase(first, staged.waiting.end());
  for (const Block& block : lost) staged.queued.erase(block.frame);
  const SharedRequest request = staged.request;
  if (from == staged.next) end_staging(lease);
  staged.end = from;
  if (lost.empty()) return;
  request->note_failed(lease.queue->rate.get());
  sink().failed(request, std::move(lost));
}

/// From now on the owner's disks are due to deliver the next blocks.
void PeerSource::measure_pending(PeerLease& lease) {
  Staged& staged = *lease.staged;
  SourceRate& disks = *lease.queue->disks;
  const TimePoint now = clock_.now();
  if (staged.measured != 0) disks.read_ended(std::exchange(staged.measured, 0));
  if (staged.waiting.empty() || staged.number == 0) return;
  const std::uint64_t bytes = staged.waiting.size() * staged.request->block_bytes();
  disks.take_reported(staged.reported.bytes_per_second, now);
  staged.measured = ++last_measured_;
  staged.since = now;
  disks.read_began(
      staged.measured,
      staged.reported.queued_bytes + std::min<std::uint64_t>(bytes, options_.batch_bytes), now);
}

void PeerSource::end_staging(PeerLease& lease) {
  Staged& staged = *lease.staged;
  if (staged.number == 0) return;
  if (staged.measured != 0) lease.queue->disks->read_ended(std::exchange(staged.measured, 0));
  const bool is_same_life = lease.peer->is_ready() && lease.peer->life() == lease.life;
  if (staged.next != staged.end && is_same_life) lease.peer->end_staging(staged.number);
  staged.number = 0;
  --staging_;
}

// ---- confirmation

/// Asks the owner whether it held the lease while the blocks were read, unless such a request is
/// in flight.
void PeerSource::confirm(const SharedRequest& request, const OneLease& lease) {
  if (lease->is_confirming || lease->whole.empty()) return;
  auto blocks = std::exchange(lease->whole, {});
  lease->is_confirming = true;
  ++lease->users;
  ++confirming_;
  const std::shared_ptr<SourceRate> rate = lease->queue->rate;
  const std::uint64_t number = rate->confirm_began(clock_.now());
  const bool may_ask = lease->peer->is_ready() && lease->peer->can_release(lease->life);
  const Duration patience = std::max(request->deadline - clock_.now(), kConfirmPatience);
  auto asked = options_.mistakes.skips_confirmation ? kj::Promise<Result<bool>>(Result<bool>(true))
               : may_ask                            ? lease->peer->confirm(lease->number, patience)
                                                    : kj::Promise<Result<bool>>(Result<bool>(
                               fail(Errc::kPeerLost, "the peer that granted the lease is gone")));
  tasks_.add(asked
                 .then([this, request, lease, rate, number,
                        blocks = std::move(blocks)](Result<bool>&& held) mutable {
                   rate->confirm_ended(number);
                   return confirmed(request, lease, std::move(blocks), held);
                 })
                 .then([this, request, lease]() {
                   lease->is_confirming = false;
                   --confirming_;
                   confirm(request, lease);
                   let_go(*lease);
                   sink().progressed();
                 }));
}

kj::Promise<void> PeerSource::confirmed(const SharedRequest& request, const OneLease& lease,
                                        std::vector<Block>&& blocks, const Result<bool>& held) {
  if (held && *held) {
    stats_.lane_bytes.at(lease->route.lane) += blocks.size() * request->block_bytes();
    return sink().arrived(request, lease, std::move(blocks));
  }
  kLog.warn("blocks are not confirmed peer={} blocks={} error=\"{}\"", lease->peer->address(),
            blocks.size(), held ? "the owner had ended the lease" : to_string(held.error()));
  stats_.unconfirmed += blocks.size();
  request->note_failed(lease->queue->rate.get());
  sink().failed(request, std::move(blocks));
  return kj::READY_NOW;
}

void PeerSource::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a confirmation failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::cluster
