#include "server/cache/fetches.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/page_layout.h"
#include "base/units.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/fetches_impl.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"fetch"};

/// Blocks that are sealed in one turn of the loop.
constexpr std::size_t kMaxBatchBlocks = 64;

/// A confirmation is waited for at least so long, where the fetch's own deadline is sooner.
constexpr Duration kConfirmPatience = std::chrono::milliseconds(20);

}  // namespace

Fetches::Fetches(CacheService& service, cluster::Lenders& peers, std::vector<Lane> lanes,
                 Background& background, kj::Timer& timer, const Clock& clock, const Clock& boot,
                 const Options& options)
    : service_(service),
      peers_(peers),
      lanes_(std::move(lanes)),
      background_(background),
      timer_(timer),
      clock_(clock),
      boot_(boot),
      options_(options),
      progress_made_(nullptr),
      tasks_(*this) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  progress_ = kj::mv(pair.fulfiller);
  progress_made_ = pair.promise.fork();
}

Fetches::~Fetches() noexcept(false) = default;

Fetches::Stats Fetches::stats() const {
  Stats stats = stats_;
  stats.batches = batches_.size() + waiting_ + confirming_;
  const TimePoint now = clock_.now();
  for (const auto& [ticket, batch] : batches_) {
    stats.oldest = std::max(stats.oldest, now - batch->since);
  }
  return stats;
}

// ---- what a scheduler asks

kj::Promise<std::size_t> Fetches::reach(const Id128& connection, std::span<const BlockKey> keys) {
  if (keys.empty() || !peers_.has_ready()) return std::size_t{0};
  const auto wants = service_.wants(connection);
  if (!wants) return std::size_t{0};
  ++stats_.lookups;
  return peers_.owners(wants->space, keys).then([](std::vector<cluster::Lenders::Owner>&& owners) {
    return owners.empty() ? std::size_t{0} : owners.front().blocks;
  });
}

kj::Promise<Fetches::Extension> Fetches::extend(const Id128& connection, const Id128& token,
                                                std::span<const BlockKey> keys, std::size_t ready,
                                                const cluster::ComputeTime& compute) {
  auto wants = service_.wants(connection);
  if (!wants || ready >= keys.size() || token.is_none()) return Extension{};
  auto plan = std::make_shared<Plan>(Plan{.connection = connection,
                                          .token = token,
                                          .wants = std::move(*wants),
                                          .keys = {keys.begin(), keys.end()},
                                          .claimed = ready,
                                          .compute = compute,
                                          .ready = ready,
                                          .arrival = {},
                                          .deadline = clock_.now() + options_.deadline});
  extending_.insert(token);
  // First what somebody else's claim has on its way already.
  return take_frames(plan, nullptr, 0)
      .then([this, plan]() -> kj::Promise<void> {
        note_joined(*plan);
        if (plan->claimed == plan->keys.size() || !peers_.has_ready()) return kj::READY_NOW;
        ++stats_.claims;
        const std::size_t before = plan->claimed;
        return ask_peers(plan).then([this, plan, before]() {
          if (plan->claimed != before) ++stats_.claims_coming;
        });
      })
      .then([this, plan, ready]() {
        extending_.erase(plan->token);
        return Extension{.blocks = plan->claimed - ready, .arrival = plan->arrival};
      });
}

/// Blocks that another claim fetches already: they come when that does.
void Fetches::note_joined(Plan& plan) const {
  if (plan.claimed == plan.ready) return;
  const Coming* const last = coming(plan.token, plan.claimed - 1);
  if (last == nullptr) return;
  plan.arrival.last = last->source->rate->until(last->end);
  plan.arrival.first = plan.arrival.last;
}

const cluster::SourceRate* Fetches::rate(const cluster::Lender& lender) const {
  const auto found = sources_.find(&lender);
  return found == sources_.end() ? nullptr : found->second.rate.get();
}

/// How many of the owner's blocks are fetched and not computed: all of them, none, or those of a
/// probe. Time and bytes are proportional to blocks, so a part of them is never better than all.
std::size_t Fetches::worth_fetching(Plan& plan, const cluster::Lenders::Owner& owner) {
  const cluster::ComputeTime& compute = plan.compute;
  const std::size_t before = plan.claimed - plan.ready;
  const cluster::SourceRate& rate = *sources_[owner.peer].rate;
  const TimePoint now = clock_.now();
  const std::uint64_t block = std::max<std::uint64_t>(1, plan.wants.block_bytes());
  cluster::Arrival arrival = rate.predict(owner.blocks * block, options_.batch_bytes);
  arrival.last = std::max(arrival.last, plan.arrival.last);
  if (before != 0) arrival.first = plan.arrival.first;
  std::size_t blocks = owner.blocks;
  if (compute.is_known() && now >= rate.stuck_at()) {
    stats_.declined += owner.blocks;
    return 0;
  }
  if (compute.is_known() && (!rate.is_known() || arrival.last > compute.of(before + blocks))) {
    // One probe at a time: what is queued tells the rate soon.
    if (rate.is_fresh(now) || rate.queued_bytes() != 0 || before != 0) {
      stats_.declined += owner.blocks;
      return 0;
    }
    blocks = std::min<std::size_t>(blocks, std::max<std::size_t>(1, options_.batch_bytes / block));
    stats_.declined += owner.blocks - blocks;
    arrival = {.first = compute.of(blocks), .last = compute.of(blocks)};
  }
  plan.arrival = arrival;
  plan.reserved =
      std::make_unique<cluster::SourceRate::Reserved>(sources_[owner.peer].rate, blocks * block);
  return blocks;
}

void Fetches::ended(const Id128& token) { extending_.erase(token); }

kj::Promise<void> Fetches::ask_peers(const OnePlan& plan) {
  const std::size_t before = plan->claimed;
  const std::span<const BlockKey> wanted = std::span(plan->keys).subspan(before);
  return peers_.owners(plan->wants.space, wanted)
      .then([this, plan](std::vector<cluster::Lenders::Owner>&& owners) -> kj::Promise<OneLease> {
        if (owners.empty() || !extending_.contains(plan->token)) return OneLease();
        const auto first = plan->keys.begin() + static_cast<std::ptrdiff_t>(plan->claimed);
        const auto count = static_cast<std::ptrdiff_t>(worth_fetching(*plan, owners.front()));
        if (count == 0) return OneLease();
        return take_lease(plan, {first, first + count}, std::move(owners));
      })
      .then([this, plan](OneLease&& lease) -> kj::Promise<void> {
        if (lease == nullptr) return kj::READY_NOW;
        return take_frames(plan, lease, plan->claimed).then([this, lease]() { let_go(*lease); });
      })
      .then([this, plan, before]() -> kj::Promise<void> {
        plan->reserved.reset();
        // What comes next may be somebody else's: a chain is saved where its requests were.
        const bool goes_on = plan->claimed != before && plan->claimed != plan->keys.size();
        if (!goes_on || ++plan->runs == kMostRuns) return kj::READY_NOW;
        return ask_peers(plan);
      });
}

kj::Promise<Fetches::OneLease> Fetches::take_lease(OnePlan plan, std::vector<BlockKey> keys,
                                                   std::vector<cluster::Lenders::Owner> owners) {
  std::erase_if(owners, [&](const cluster::Lenders::Owner& owner) {
    return !owner.peer->is_ready() || owner.peer->life() != owner.life ||
           std::find(plan->failed.begin(), plan->failed.end(), owner.peer) != plan->failed.end();
  });
  if (owners.empty() || plan->failed.size() >= kMostOwners || clock_.now() >= plan->deadline) {
    return OneLease();
  }
  const cluster::Lenders::Owner owner = owners.front();
  keys.resize(std::min({keys.size(), owner.blocks, kMaxPagesPerLease / plan->shards()}));
  const TimePoint asked = boot_.now();
  auto granted = owner.peer->lease(plan->wants.space, keys, plan->shards(), options_.lease);
  return granted.then(
      [this, plan, owner, asked, keys = std::move(keys),
       owners = std::move(owners)](Result<LeaseGrant>&& grant) mutable -> kj::Promise<OneLease> {
        if (!grant || grant->pages.empty()) {
          if (!grant) {
            kLog.debug("no lease peer={} error=\"{}\"", owner.peer->address(),
                       to_string(grant.error()));
          }
          plan->note_failed(owner.peer);
          return take_lease(plan, std::move(keys), std::move(owners));
        }
        ++stats_.leases;
        auto lease = std::make_shared<Lease>();
        lease->peer = owner.peer;
        lease->life = owner.life;
        lease->route = owner.peer->route();
        lease->number = grant->lease;
        lease->end = asked + std::min(grant->granted, options_.lease);
        lease->blocks = grant->pages.size() / plan->shards();
        lease->pages = std::move(grant->pages);
        lease->checksums = std::move(grant->checksums);
        return lease;
      });
}

kj::Promise<void> Fetches::take_frames(const OnePlan& plan, const OneLease& lease,
                                       std::size_t lent_from) {
  // Ended meanwhile: to go on would make the claim anew, and nobody would end it.
  if (!extending_.contains(plan->token)) return kj::READY_NOW;
  const std::size_t lent_to = lease == nullptr ? 0 : lent_from + lease->blocks;
  const std::size_t first = plan->claimed;
  const std::size_t fetchable = lent_to > first ? lent_to - first : 0;
  const auto keys =
      std::span(plan->keys)
          .subspan(first, std::min(CacheService::kSliceBlocks, plan->keys.size() - first));
  engine::SpaceId generation = plan->wants.generation;
  if (options_.mistakes.forgets_generation) {
    if (const auto now = service_.wants(plan->connection)) generation = now->generation;
  }
  auto fetch = service_.fetch(plan->connection, generation, plan->token, first, keys, fetchable);
  background_.poke();
  if (!fetch) {
    kLog.debug("a claim did not get longer error=\"{}\"", to_string(fetch.error()));
    return kj::READY_NOW;
  }
  plan->claimed += fetch->blocks;
  std::vector<Block> blocks;
  blocks.reserve(fetch->frames.size());
  for (CacheService::Fetched& frame : fetch->frames) {
    blocks.push_back({.place = first + frame.place,
                      .frame = frame.frame,
                      .offsets = std::move(frame.offsets),
                      .lent = first + frame.place - lent_from});
  }
  if (!blocks.empty()) read(plan, lease, std::move(blocks));
  if (fetch->blocks < keys.size() || plan->claimed == plan->keys.size()) return kj::READY_NOW;
  return next_turn(timer_).then(
      [this, plan, lease, lent_from]() { return take_frames(plan, lease, lent_from); });
}

// ---- bytes

void Fetches::read(const OnePlan& plan, const OneLease& lease, std::vector<Block>&& blocks) {
  Source& source = sources_[lease->peer];
  const std::uint64_t block_bytes = std::max<std::uint64_t>(1, plan->wants.block_bytes());
  const std::uint64_t fit =
      source.rate->bytes_within(kBatchTime, options_.batch_bytes) / block_bytes;
  const std::size_t step = std::clamp<std::size_t>(fit, 1, kMaxBatchBlocks);
  if (plan->reserved) plan->reserved->queued(blocks.size() * block_bytes);
  for (std::size_t from = 0; from < blocks.size(); from += step) {
    auto batch = std::make_unique<Batch>();
    batch->plan = plan;
    batch->lease = lease;
    ++lease->users;
    const std::size_t to = std::min(blocks.size(), from + step);
    batch->queued.emplace(source.rate, (to - from) * block_bytes);
    for (std::size_t i = from; i < to; ++i) {
      coming_[blocks[i].frame] = {.source = &source, .end = batch->queued->end()};
      batch->blocks.push_back(std::move(blocks[i]));
    }
    source.queue.push_back(std::move(batch));
    ++waiting_;
  }
  submit_some(source);
}

void Fetches::submit_some(Source& source) {
  const cluster::SourceRate& rate = *source.rate;
  while (!source.queue.empty() && batches_.size() < options_.batches) {
    // Two, so that the way is never idle between one batch and the next.
    const std::uint64_t bytes = rate.read_bytes() + source.queue.front()->queued->bytes();
    const bool fits = rate.reads() < 2 || bytes <= rate.bytes_within(kWindowTime, bytes);
    if (rate.reads() >= options_.batches_per_owner || !fits) return;
    auto next = std::move(source.queue.front());
    source.queue.pop_front();
    --waiting_;
    const OneLease lease = next->lease;
    if (!submit(source, std::move(next))) let_go(*lease);
  }
}

/// Every owner gets what it may have at the fabrics, in turns where places are short.
void Fetches::submit_all() {
  if (waiting_ == 0) return;
  std::vector<Source*> turns;
  for (auto& [lender, source] : sources_) {
    if (!source.queue.empty()) turns.push_back(&source);
  }
  std::sort(turns.begin(), turns.end(), [](const Source* one, const Source* other) {
    return one->last_ticket < other->last_ticket;
  });
  for (Source* const source : turns) submit_some(*source);
}

/// Takes those out that no claim waits for.
void Fetches::forget_unwanted(std::vector<Block>& blocks) {
  const std::size_t count = blocks.size();
  std::erase_if(blocks, [this](const Block& block) {
    if (service_.is_awaited(block.frame)) return false;
    settle(block.frame);
    return true;
  });
  stats_.unwanted += count - blocks.size();
}

/// Gives a batch to the fabric. False when it is over already; its lease is the caller's to tell.
bool Fetches::submit(Source& source, std::unique_ptr<Batch> batch) {
  forget_unwanted(batch->blocks);
  if (batch->blocks.empty()) return false;
  const Plan& plan = *batch->plan;
  Lease& lease = *batch->lease;
  const TimePoint now = clock_.now();
  Fabric::Batch wanted{
      .ticket = ++last_ticket_,
      .peer = lease.route.peer,
      .priority = Fabric::Priority::kForeground,
      .deadline = std::min(plan.deadline, now + (lease.end - boot_.now()) - kLeaseMargin),
      .chunks = {}};
  const std::size_t shards = plan.shards();
  wanted.chunks.reserve(batch->blocks.size() * shards);
  for (const Block& block : batch->blocks) {
    for (std::size_t shard = 0; shard < shards; ++shard) {
      wanted.chunks.push_back({.remote_region = lease.route.pool,
                               .remote_offset = lease.pages[block.lent * shards + shard] *
                                                std::uint64_t{kSlotAlignment},
                               .local_region = lanes_.at(lease.route.lane).pool,
                               .local_offset = block.offsets[shard],
                               .size_bytes = plan.wants.page_bytes[shard]});
    }
  }
  const bool is_late = wanted.deadline <= now;
  const auto accepted = is_late ? Result<void>(fail(Errc::kTimeout, "no time is left"))
                                : lanes_.at(lease.route.lane).fabric->read(std::move(wanted));
  if (!accepted) {
    kLog.debug("blocks are not read peer={} blocks={} error=\"{}\"", lease.peer->address(),
               batch->blocks.size(), to_string(accepted.error()));
    drop(batch->blocks);
    return false;
  }
  batch->since = now;
  source.last_ticket = last_ticket_;
  source.rate->read_began(last_ticket_, batch->queued->bytes(), now);
  batches_.emplace(last_ticket_, std::move(batch));
  return true;
}

void Fetches::completed(const Fabric::Completion& completion) {
  const auto found = batches_.find(completion.ticket);
  PEGA_ASSERT(found != batches_.end(), "the fabric completed batch {} that nobody asked for",
              completion.ticket);
  Batch& batch = *found->second;
  if (batch.is_answered) {
    for (const Block& block : batch.blocks) settle(block.frame);
  } else {
    batch.is_answered = true;
    cluster::SourceRate& rate = *sources_.at(batch.lease->peer).rate;
    rate.read_ended(completion.ticket);
    stats_.duration.record(clock_.now() - batch.since);
    Plan& plan = *batch.plan;
    Lease& lease = *batch.lease;
    const std::size_t shards = plan.shards();
    PEGA_ASSERT(completion.chunks.size() == batch.blocks.size() * shards,
                "{} chunks were answered of {}", completion.chunks.size(),
                batch.blocks.size() * shards);
    // After the last byte: only then what was read is what was lent.
    const bool in_time = boot_.now() < lease.end;
    std::uint64_t arrived = 0;
    std::vector<Block> failed;
    std::optional<Errc> why;
    for (std::size_t i = 0; i < batch.blocks.size(); ++i) {
      Block& block = batch.blocks[i];
      const auto chunks = std::span(completion.chunks).subspan(i * shards, shards);
      const auto bad = std::find_if(chunks.begin(), chunks.end(),
                                    [](const auto& chunk) { return chunk.has_value(); });
      if (bad == chunks.end() && in_time) {
        arrived += plan.wants.block_bytes();
        lease.whole.push_back(std::move(block));
        continue;
      }
      if (bad == chunks.end()) {
        ++stats_.outlived;
      } else {
        why = *bad;
        if (**bad == Errc::kCorrupt) ++stats_.corrupt;
      }
      failed.push_back(std::move(block));
    }
    if (arrived != 0) rate.arrived(arrived, batch.since, clock_.now());
    batch.queued.reset();
    if (!failed.empty()) {
      kLog.warn("blocks did not come peer={} blocks={} of={} error=\"{}: {}\"",
                lease.peer->address(), failed.size(), batch.blocks.size(),
                why ? to_string(*why) : "the lease had ended", completion.detail);
    }
    // The way to it is broken, or it is another one by now: nobody else should wait for that. A
    // lane that was told nonsense gives the peer up, and is of no use until it is greeted anew.
    const bool route_broke = why == Errc::kPeerLost || why == Errc::kCorrupt;
    if (route_broke) lease.peer->route_lost(lease.life, lease.route, completion.detail);
    if (why == Errc::kGone && in_time) lease.peer->lost(lease.life, completion.detail);
    const bool has_other_route =
        route_broke && lease.peer->is_ready() && lease.peer->route() != lease.route;
    if (!failed.empty() && !has_other_route) plan.note_failed(lease.peer);
    batch.blocks = std::move(failed);
    confirm(batch.plan, batch.lease);
    if (!completion.quiesced) {
      for (const Block& block : batch.blocks) {
        coming_.erase(block.frame);
        service_.give_up(block.frame);
      }
      stats_.given_up += batch.blocks.size();
      stats_.unquiesced += batch.blocks.size();
    } else if (!batch.blocks.empty()) {
      retry(batch.plan, std::move(batch.blocks));
    }
  }
  if (completion.quiesced) {
    const OneLease lease = batch.lease;
    batches_.erase(found);
    let_go(*lease);
  }
  submit_all();
  progressed();
  background_.poke();
}

// ---- the seal

void Fetches::confirm(const OnePlan& plan, const OneLease& lease) {
  if (lease->is_confirming || lease->whole.empty()) return;
  auto blocks = std::exchange(lease->whole, {});
  if (options_.mistakes.skips_confirmation) return seal_some(*plan, *lease, blocks);
  lease->is_confirming = true;
  ++lease->users;
  ++confirming_;
  const std::shared_ptr<cluster::SourceRate> rate = sources_.at(lease->peer).rate;
  const std::uint64_t question = rate->confirm_began(clock_.now());
  const bool may_ask = lease->peer->is_ready() && lease->peer->can_release(lease->life);
  const Duration patience = std::max(plan->deadline - clock_.now(), kConfirmPatience);
  auto asked = may_ask ? lease->peer->confirm(lease->number, patience)
                       : kj::Promise<Result<bool>>(Result<bool>(
                             fail(Errc::kPeerLost, "the peer has gone that granted the lease")));
  tasks_.add(asked
                 .then([this, plan, lease, rate, question, blocks = std::move(blocks)](
                           Result<bool>&& held) mutable -> kj::Promise<void> {
                   rate->confirm_ended(question);
                   if (held && *held) return seal(plan, lease, std::move(blocks));
                   kLog.warn("blocks are not confirmed peer={} blocks={} error=\"{}\"",
                             lease->peer->address(), blocks.size(),
                             held ? "the lease had ended there" : to_string(held.error()));
                   stats_.unconfirmed += blocks.size();
                   plan->note_failed(lease->peer);
                   retry(plan, std::move(blocks));
                   return kj::READY_NOW;
                 })
                 .then([this, plan, lease]() {
                   lease->is_confirming = false;
                   --confirming_;
                   confirm(plan, lease);
                   let_go(*lease);
                   progressed();
                   background_.poke();
                 }));
}

kj::Promise<void> Fetches::seal(OnePlan plan, OneLease lease, std::vector<Block> blocks) {
  const std::size_t now = std::min(blocks.size(), kMaxBatchBlocks);
  seal_some(*plan, *lease, std::span(blocks).first(now));
  if (now == blocks.size()) return kj::READY_NOW;
  progressed();
  blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(now));
  return next_turn(timer_).then([this, plan = std::move(plan), lease = std::move(lease),
                                 blocks = std::move(blocks)]() mutable {
    return seal(std::move(plan), std::move(lease), std::move(blocks));
  });
}

void Fetches::seal_some(const Plan& plan, const Lease& lease, std::span<const Block> blocks) {
  const std::size_t shards = plan.shards();
  const std::span<const std::uint64_t> checksums(lease.checksums);
  for (const Block& block : blocks) {
    coming_.erase(block.frame);
    service_.fetched(
        block.frame, static_cast<std::uint32_t>(shards),
        checksums.empty() ? checksums : checksums.subspan(block.lent * shards, shards));
    ++stats_.blocks;
    stats_.bytes += plan.wants.block_bytes();
    stats_.lane_bytes.at(lease.route.lane) += plan.wants.block_bytes();
  }
}

void Fetches::retry(const OnePlan& plan, std::vector<Block>&& blocks) {
  forget_unwanted(blocks);
  if (blocks.empty()) return;
  if (clock_.now() >= plan->deadline || plan->failed.size() >= kMostOwners || !peers_.has_ready()) {
    return drop(blocks);
  }
  std::vector<BlockKey> keys;
  for (const Block& block : blocks) keys.push_back(plan->keys[block.place]);
  auto kept = std::make_shared<std::vector<Block>>(std::move(blocks));
  auto owners = peers_.owners(plan->wants.space, keys);
  tasks_.add(owners
                 .then([this, plan, keys = std::move(keys)](
                           std::vector<cluster::Lenders::Owner>&& found) mutable {
                   return take_lease(plan, std::move(keys), std::move(found));
                 })
                 .then([this, plan, kept](OneLease&& lease) {
                   const std::size_t lent = lease == nullptr ? 0 : lease->blocks;
                   std::vector<Block> again;
                   std::vector<Block> lost;
                   for (std::size_t i = 0; i < kept->size(); ++i) {
                     (*kept)[i].lent = i;
                     (i < lent ? again : lost).push_back(std::move((*kept)[i]));
                   }
                   stats_.retried += again.size();
                   if (!lost.empty()) drop(lost);
                   if (!again.empty()) read(plan, lease, std::move(again));
                   if (lease != nullptr) let_go(*lease);
                   progressed();  // Loads that wait for them are judged by the other owner now.
                 }));
}

void Fetches::drop(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) settle(block.frame);
  stats_.given_up += blocks.size();
  progressed();
  background_.poke();
}

/// Frees the frame: no read writes to it, and its block does not arrive.
void Fetches::settle(engine::FrameIndex frame) {
  coming_.erase(frame);
  service_.quiesce_fetch(frame);
}

void Fetches::let_go(Lease& lease) {
  if (--lease.users != 0) return;
  if (lease.peer->can_release(lease.life)) lease.peer->release(lease.number);
}

void Fetches::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a fetch failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
