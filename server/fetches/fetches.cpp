#include "server/fetches/fetches.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/rpc_error.h"
#include "server/fetches/fetches_impl.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"fetch"};

/// Blocks that are sealed in one event-loop iteration.
constexpr std::size_t kSealedTogether = 64;

static_assert(std::is_same_v<decltype(cluster::Source::Block::frame), engine::FrameIndex>);

}  // namespace

Fetches::Fetches(CacheService& service, cluster::Source* source, Background& background,
                 kj::Timer& timer, const Clock& clock, const Options& options)
    : service_(service),
      source_(source),
      background_(background),
      timer_(timer),
      clock_(clock),
      options_(options),
      progress_made_(nullptr),
      pools_(service, source, clock, options.direct_pool),
      tasks_(*this) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  progress_ = kj::mv(pair.fulfiller);
  progress_made_ = pair.promise.fork();
  if (source_ != nullptr) source_->deliver_to(*this);
}

Fetches::~Fetches() noexcept(false) = default;

// ---- lookups and claims

kj::Maybe<kj::Promise<std::size_t>> Fetches::reach(const Id128& connection,
                                                   std::span<const BlockKey> keys,
                                                   const Hints& hints) {
  if (source_ == nullptr || keys.empty() || !source_->is_ready()) return nullptr;
  const auto wants = service_.wants(connection);
  if (!wants) return nullptr;
  ++stats_.lookups;
  return locate(wants->space, keys, hints).then([](cluster::Source::Located&& located) {
    return located.blocks;
  });
}

/// Asks the named nodes first, and all of them only if those have nothing.
kj::Promise<cluster::Source::Located> Fetches::locate(const Bytes32& space,
                                                      std::span<const BlockKey> keys,
                                                      const Hints& hints) {
  if (hints.no_nodes) {
    const Id128 none{};  // Disks of this node are asked all the same.
    return source_->locate_at({&none, 1}, space, keys);
  }
  if (hints.nodes.empty()) return source_->locate(space, keys);
  ++stats_.hinted;
  return source_->locate_at(hints.nodes, space, keys)
      .then([this, space, keys = std::vector<BlockKey>(keys.begin(), keys.end())](
                cluster::Source::Located&& found) -> kj::Promise<cluster::Source::Located> {
        if (found.blocks != 0) return kj::mv(found);
        ++stats_.wrong_hints;
        return source_->locate(space, keys);
      });
}

kj::Maybe<kj::Promise<Fetches::Extension>> Fetches::extend(
    const Id128& connection, const Id128& token, std::span<const BlockKey> keys, std::size_t ready,
    const cluster::ComputeTime& compute, const Hints& hints) {
  if (source_ == nullptr || ready >= keys.size() || token.is_none()) return nullptr;
  if (!check_unused(token)) return nullptr;
  auto wants = service_.wants(connection);
  if (!wants) return nullptr;
  auto plan = std::make_shared<Plan>();
  plan->space = wants->space;
  plan->page_bytes = std::move(wants->page_bytes);
  plan->keys.assign(keys.begin(), keys.end());
  plan->deadline = clock_.now() + options_.deadline;
  plan->connection = connection;
  plan->token = token;
  plan->generation = wants->generation;
  plan->ready = ready;
  plan->claimed = ready;
  plan->compute = compute;
  plan->hints = hints;
  extending_.insert(token);
  // First the blocks that are in flight for other claims.
  return take_frames(plan, nullptr, 0)
      .then([this, plan]() -> kj::Promise<void> {
        note_joined(*plan);
        if (plan->claimed == plan->keys.size() || !source_->is_ready()) return kj::READY_NOW;
        ++stats_.claims;
        const std::size_t before = plan->claimed;
        return query_source(plan).then([this, plan, before]() {
          if (plan->claimed != before) ++stats_.claims_coming;
        });
      })
      .then([this, plan, ready]() {
        add_pending(*plan);
        extending_.erase(plan->token);
        return Extension{.blocks = plan->claimed - ready, .arrival = plan->arrival};
      });
}

/// Blocks that are in flight for another claim arrive when that claim's do.
void Fetches::note_joined(Plan& plan) const {
  if (plan.claimed == plan.ready) return;
  const Coming* const last = coming(plan.token, plan.claimed - 1);
  if (last == nullptr) return;
  plan.arrival.last = last->rate->until(last->end);
  plan.arrival.first = plan.arrival.last;
}

/// Returns the number of the owner's blocks to fetch rather than compute: all of them, none, or
/// those of a probe. Time and bytes are proportional to blocks, so a part is never better than all.
std::size_t Fetches::worth_fetching(Plan& plan, const cluster::Source::Located& located) {
  const cluster::ComputeTime& compute = plan.compute;
  const std::size_t before = plan.claimed - plan.ready;
  const TimePoint now = clock_.now();
  const std::uint64_t block = std::max<std::uint64_t>(1, plan.block_bytes());
  cluster::Arrival arrival =
      located.predict(located.blocks * block, located.on_disks.blocks * block);
  arrival.last = std::max(arrival.last, plan.arrival.last);
  if (before != 0) arrival.first = plan.arrival.first;
  std::size_t blocks = located.blocks;
  if (compute.is_known() && now >= located.stuck_at()) {
    stats_.declined += located.blocks;
    return 0;
  }
  if (compute.is_known() && (!located.is_known() || arrival.last > compute.of(before + blocks))) {
    // One probe at a time: bytes that are queued will measure the rate soon.
    if (located.is_fresh(now) || located.queued_bytes() != 0 || before != 0) {
      stats_.declined += located.blocks;
      return 0;
    }
    blocks = std::min<std::size_t>(blocks, std::max<std::size_t>(1, located.batch_bytes / block));
    stats_.declined += located.blocks - blocks;
    arrival = {.first = compute.of(blocks), .last = compute.of(blocks)};
  }
  plan.arrival = arrival;
  plan.reserved = std::make_unique<cluster::SourceRate::Reserved>(located.rate, blocks * block);
  return blocks;
}

/// Returns the number of the owner's blocks to lease, and sets how they are read.
std::size_t Fetches::choose(Plan& plan, const cluster::Source::Located& located) {
  plan.past_pool = false;
  pools_.forget_expected();
  const std::size_t worth = worth_fetching(plan, located);
  if (worth == 0 || plan.prefetched || plan.through_pool) return worth;
  const auto choice = pools_.choose(plan.connection, plan.generation,
                                    std::span(plan.keys).subspan(plan.claimed), located, worth);
  plan.past_pool = choice.past_pool;
  plan.wanted = choice.blocks;
  plan.rate = located.rate;
  return choice.blocks;
}

/// Has the leased blocks read, by the workers or into the pool.
kj::Promise<void> Fetches::use(const OnePlan& plan, const SharedLease& lease) {
  if (set_aside(plan, lease)) return kj::READY_NOW;
  return take_frames(plan, lease, plan->claimed).then([this, lease]() { source_->end(lease); });
}

/// Makes the leased blocks the pending part if the workers can read them and nothing here follows.
bool Fetches::set_aside(const OnePlan& plan, const SharedLease& lease) {
  const bool is_whole = lease->blocks == plan->wanted && extending_.contains(plan->token);
  if (!plan->past_pool || !is_whole) return false;
  const std::size_t end = plan->claimed + lease->blocks;
  // Blocks behind them that are here would not belong to the claim.
  const bool ends_here =
      end == plan->keys.size() || service_.present(plan->space, {&plan->keys[end], 1}) == 0;
  PoolReads::Part part{.token = plan->token,
                       .scheduler = plan->connection,
                       .generation = plan->generation,
                       .first = plan->claimed,
                       .request = plan,
                       .lease = lease,
                       .expected = plan->arrival.last};
  if (!ends_here || !pools_.can_read(part, plan->rate)) return false;
  plan->claimed = end;
  plan->pending = std::move(part);
  return true;
}

/// Has the pending part, which other blocks follow, read into the pool, and all that follows.
kj::Promise<void> Fetches::read_pending(const OnePlan& plan) {
  const PoolReads::Part part = *std::exchange(plan->pending, std::nullopt);
  plan->through_pool = true;
  plan->claimed = part.first;
  return take_frames(plan, part.lease, part.first).then([this, plan, part]() -> kj::Promise<void> {
    source_->end(part.lease);
    const bool has_room = plan->claimed >= part.first + part.lease->blocks;
    if (!has_room || plan->claimed == plan->keys.size()) return kj::READY_NOW;
    return query_source(plan);
  });
}

/// Nothing follows the pending part: the workers read it.
void Fetches::add_pending(Plan& plan) {
  if (!plan.pending) return;
  const PoolReads::Part part = *std::exchange(plan.pending, std::nullopt);
  const auto wants = service_.wants(plan.connection);  // It may have left meanwhile.
  const bool is_wanted =
      extending_.contains(plan.token) && wants && wants->generation == plan.generation;
  if (is_wanted && pools_.add(part)) return;
  plan.claimed = part.first;
  source_->end(part.lease);
}

Result<void> Fetches::check_unused(const Id128& token) const {
  if (!extending_.contains(token) && !pools_.begin_of(token)) return {};
  return fail(Errc::kInvalidArgument, "the token {} is that of another claim", to_string(token));
}

void Fetches::left(const Id128& connection) {
  for (const Id128& token : pools_.left(connection)) ended(token);
}

void Fetches::ended(const Id128& token) {
  extending_.erase(token);
  pools_.ended(token);
  if (into_pool_.erase(token) != 0) wake_openings();
}

kj::Promise<void> Fetches::query_source(const OnePlan& plan) {
  const std::size_t before = plan->claimed;
  const bool had_pending = plan->pending.has_value();
  const std::span<const BlockKey> wanted = std::span(plan->keys).subspan(before);
  return locate(plan->space, wanted, plan->hints)
      .then([this, plan](cluster::Source::Located&& located) -> kj::Promise<SharedLease> {
        if (located.blocks == 0 || !extending_.contains(plan->token)) return SharedLease();
        // They follow the pending part, which is looked for again.
        if (plan->pending) return read_pending(plan).then([]() { return SharedLease(); });
        const auto first = plan->keys.begin() + static_cast<std::ptrdiff_t>(plan->claimed);
        const auto count = static_cast<std::ptrdiff_t>(choose(*plan, located));
        if (count == 0) return SharedLease();
        return source_->lease(plan, {first, first + count}, std::move(located));
      })
      .then([this, plan](SharedLease&& lease) -> kj::Promise<void> {
        if (lease == nullptr) return kj::READY_NOW;
        return use(plan, lease);
      })
      .then([this, plan, before, had_pending]() -> kj::Promise<void> {
        if (had_pending) return kj::READY_NOW;
        plan->reserved.reset();
        plan->hints.nodes.clear();
        // Another owner may have the next part: a chain is saved where its requests were served.
        const bool goes_on = plan->claimed > before && plan->claimed != plan->keys.size();
        if (!goes_on || ++plan->runs == kMostRuns) return kj::READY_NOW;
        return query_source(plan);
      });
}

/// Extends the claim by blocks in flight and by those of the lease, a slice for each event-loop
/// iteration, and has the latter read. `lease` covers the keys from `leased_from` on; null: none.
kj::Promise<void> Fetches::take_frames(const OnePlan& plan, const SharedLease& lease,
                                       std::size_t leased_from) {
  // The claim has ended: extending it would make it anew, and no caller would end it.
  if (!extending_.contains(plan->token)) return kj::READY_NOW;
  const std::size_t leased_to = lease == nullptr ? 0 : leased_from + lease->blocks;
  const std::size_t first = plan->claimed;
  const std::size_t fetchable = leased_to > first ? leased_to - first : 0;
  const auto keys =
      std::span(plan->keys)
          .subspan(first, std::min(CacheService::kSliceBlocks, plan->keys.size() - first));
  auto fetch = fetch_slice(*plan, first, keys, fetchable);
  background_.poke();
  if (!fetch) {
    kLog.debug("a claim was not extended error=\"{}\"", to_string(fetch.error()));
    return kj::READY_NOW;
  }
  if (!plan->prefetched) note_joined_staging(plan->token, first, fetch->blocks);
  plan->claimed += fetch->blocks;
  std::vector<Block> blocks;
  blocks.reserve(fetch->frames.size());
  for (CacheService::Fetched& frame : fetch->frames) {
    if (plan->prefetched) note_staged(frame.frame);
    blocks.push_back({.place = first + frame.place,
                      .frame = frame.frame,
                      .offsets = std::move(frame.offsets),
                      .leased = first + frame.place - leased_from});
  }
  if (!blocks.empty()) source_->read(plan, lease, std::move(blocks));
  if (fetch->blocks < keys.size() || plan->claimed == plan->keys.size()) return kj::READY_NOW;
  return next_turn(timer_).then(
      [this, plan, lease, leased_from]() { return take_frames(plan, lease, leased_from); });
}

Result<CacheService::Fetch> Fetches::fetch_slice(const Plan& plan, std::size_t first,
                                                 std::span<const BlockKey> keys,
                                                 std::size_t fetchable) {
  if (plan.prefetched) {
    return service_.prefetch(*plan.prefetched, plan.token, first, keys, fetchable);
  }
  engine::SpaceId generation = plan.generation;
  if (options_.mistakes.forgets_generation) {
    if (const auto now = service_.wants(plan.connection)) generation = now->generation;
  }
  return service_.fetch(plan.connection, generation, plan.token, first, keys, fetchable);
}

kj::Promise<std::size_t> Fetches::prefetch(CacheService::Wants wants, const Id128& token,
                                           std::vector<BlockKey> keys, Hints hints,
                                           Duration deadline) {
  if (source_ == nullptr || keys.empty()) return std::size_t{0};
  auto plan = std::make_shared<Plan>();
  plan->space = wants.space;
  plan->page_bytes = wants.page_bytes;
  plan->keys = std::move(keys);
  plan->deadline = clock_.now() + deadline;
  plan->token = token;
  plan->generation = wants.generation;
  plan->hints = std::move(hints);
  plan->prefetched = std::move(wants);
  extending_.insert(token);
  return join_and_query(plan).then([this, plan]() {
    extending_.erase(plan->token);
    return plan->claimed;
  });
}

/// Extends the claim by blocks in flight, and then by those of the source.
kj::Promise<void> Fetches::join_and_query(const OnePlan& plan) {
  return take_frames(plan, nullptr, 0).then([this, plan]() -> kj::Promise<void> {
    if (plan->claimed == plan->keys.size() || !source_->is_ready()) return kj::READY_NOW;
    return query_source(plan);
  });
}

// ---- results of the source

void Fetches::remove_unwanted(std::vector<Block>& blocks) {
  const std::size_t count = blocks.size();
  std::erase_if(blocks, [this](const Block& block) {
    if (service_.is_awaited(block.frame)) return false;
    quiesce(block.frame);
    return true;
  });
  stats_.unwanted += count - blocks.size();
  if (count != blocks.size()) background_.poke();  // The last frame of a shape may be free now.
}

void Fetches::queued(std::span<const Block> blocks, const cluster::SourceRate& rate,
                     std::uint64_t end) {
  for (const Block& block : blocks) coming_[block.frame] = {.rate = &rate, .end = end};
}

kj::Promise<void> Fetches::arrived(SharedRequest request, SharedLease lease,
                                   std::vector<Block> blocks) {
  const std::size_t now = std::min(blocks.size(), kSealedTogether);
  seal(*request, *lease, std::span(blocks).first(now));
  if (now == blocks.size()) return kj::READY_NOW;
  wake_openings();
  blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(now));
  return next_turn(timer_).then([this, request = std::move(request), lease = std::move(lease),
                                 blocks = std::move(blocks)]() mutable {
    return arrived(std::move(request), std::move(lease), std::move(blocks));
  });
}

void Fetches::seal(const cluster::Source::Request& request, const cluster::Source::Lease& lease,
                   std::span<const Block> blocks) {
  const std::size_t shards = request.shards();
  const std::span<const std::uint64_t> checksums(lease.checksums);
  for (const Block& block : blocks) {
    coming_.erase(block.frame);
    const auto of_block =
        checksums.empty() ? checksums : checksums.subspan(block.leased * shards, shards);
    const bool was_staged = staged_.erase(block.frame) != 0;
    if (block.proven && was_staged) {
      service_.staged(block.frame, static_cast<std::uint32_t>(shards), of_block, *block.proven);
      ++stats_.staged_blocks;
    } else if (block.proven) {
      service_.restored(block.frame, static_cast<std::uint32_t>(shards), of_block, *block.proven);
      ++stats_.restored_blocks;
    } else {
      service_.fetched(block.frame, static_cast<std::uint32_t>(shards), of_block);
      ++stats_.blocks;
      stats_.bytes += request.block_bytes();
    }
  }
}

void Fetches::failed(const SharedRequest& request, std::vector<Block>&& blocks) {
  remove_unwanted(blocks);
  if (blocks.empty()) return;
  const bool may_retry = !request->is_for_node && clock_.now() < request->deadline &&
                         request->failed.size() < cluster::Source::kMostOwners &&
                         source_->is_ready();
  if (!may_retry) return rejected(blocks);
  retry(request, std::move(blocks));
}

/// Requests the blocks from another owner.
void Fetches::retry(const SharedRequest& request, std::vector<Block>&& blocks) {
  std::vector<BlockKey> keys;
  for (const Block& block : blocks) keys.push_back(request->keys[block.place]);
  auto kept = std::make_shared<std::vector<Block>>(std::move(blocks));
  auto located = source_->locate(request->space, keys);
  tasks_.add(
      located
          .then([this, request, keys = std::move(keys)](cluster::Source::Located&& found) mutable {
            return source_->lease(request, std::move(keys), std::move(found));
          })
          .then([this, request, kept](SharedLease&& lease) {
            const std::size_t leased = lease == nullptr ? 0 : lease->blocks;
            std::vector<Block> again;
            std::vector<Block> lost;
            for (std::size_t i = 0; i < kept->size(); ++i) {
              (*kept)[i].leased = i;
              (i < leased ? again : lost).push_back(std::move((*kept)[i]));
            }
            stats_.retried += again.size();
            if (!lost.empty()) rejected(lost);
            if (!again.empty()) source_->read(request, lease, std::move(again));
            if (lease != nullptr) source_->end(lease);
            wake_openings();  // Loads that wait for them are judged by the other owner now.
          }));
}

void Fetches::rejected(std::span<const Block> blocks) {
  for (const Block& block : blocks) quiesce(block.frame);
  stats_.given_up += blocks.size();
  progressed();
}

void Fetches::given_up(std::span<const Block> blocks) {
  for (const Block& block : blocks) {
    coming_.erase(block.frame);
    service_.give_up(block.frame);
  }
  stats_.given_up += blocks.size();
  stats_.unquiesced += blocks.size();
}

void Fetches::quiesced(std::span<const Block> blocks) {
  for (const Block& block : blocks) quiesce(block.frame);
}

/// Frees the frame: no read writes to it, and its block does not arrive.
void Fetches::quiesce(engine::FrameIndex frame) {
  coming_.erase(frame);
  staged_.erase(frame);
  service_.quiesce_fetch(frame);
}

/// A claim of an engine of this node has these blocks: those that are in flight for other nodes are
/// sealed as its own.
void Fetches::note_joined_staging(const Id128& token, std::size_t first, std::size_t count) {
  if (staged_.empty()) return;
  for (std::size_t place = first; place < first + count; ++place) {
    if (const auto frame = service_.claimed_frame(token, place)) staged_.erase(*frame);
  }
}

void Fetches::progressed() {
  wake_openings();
  background_.poke();
}

void Fetches::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a fetch failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
