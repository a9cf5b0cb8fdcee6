#include "server/fetches/pool_reads.h"

#include <algorithm>

#include "base/log.h"
#include "capnp/wire/codec.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"fetch"};

/// Limit of the names of fabrics; beyond it they are given anew.
constexpr std::size_t kMostNames = 1024;

}  // namespace

// ---- claims

PoolReads::Choice PoolReads::choose(const Id128& scheduler, engine::SpaceId generation,
                                    std::span<const BlockKey> keys,
                                    const cluster::Source::Located& located, std::size_t wanted) {
  const std::span<const BlockKey> asked = keys.first(std::min(wanted, keys.size()));
  const Choice into_pool{.past_pool = false, .blocks = wanted};
  if (use_ == Use::kOff || claims_.size() >= kMostClaims) return into_pool;
  const CacheService::PoolAccess access = service_.pool_access(scheduler);
  if (access.backend.empty()) return into_pool;
  if (use_ == Use::kForce) return {.past_pool = true, .blocks = wanted};
  // A part of what was located is a probe, which measures the owner's rate.
  const bool is_probe = !located.is_known() || wanted < located.blocks;
  if (is_probe || access.is_slow || access.piece_bytes < kLeastPiece) return into_pool;
  const std::size_t again = recent_.leading(generation, asked, true);
  if (again != 0) return {.past_pool = false, .blocks = again};
  return {.past_pool = true, .blocks = recent_.leading(generation, asked, false)};
}

std::optional<cluster::Source::InPool> PoolReads::place_of(const Part& part) const {
  return source_->in_pool(part.lease, service_.pool_access(part.scheduler).backend);
}

bool PoolReads::can_read(const Part& part, const std::shared_ptr<cluster::SourceRate>& rate) const {
  const auto place = place_of(part);
  return place && place->rate == rate &&
         place->pages.size() == part.lease->blocks * part.request->shards() &&
         !is_paused(part.scheduler, place->node);
}

bool PoolReads::add(const Part& part) {
  const auto place = place_of(part);
  if (!place) return false;
  recent_.note(part.generation,
               std::span(part.request->keys).subspan(part.first, part.lease->blocks));
  const std::uint64_t bytes = part.lease->blocks * part.request->block_bytes();
  auto leased = std::make_shared<Leased>(*source_, part, place->rate);
  leased->expected = std::make_unique<cluster::SourceRate::Reserved>(place->rate, bytes);
  leased->expected_until = clock_.now() + part.expected;
  claims_.emplace(part.token, std::move(leased));
  return true;
}

void PoolReads::forget_expected() {
  const TimePoint now = clock_.now();
  for (auto& [token, leased] : claims_) {
    if (leased->expected && now >= leased->expected_until) leased->expected.reset();
  }
}

std::optional<std::size_t> PoolReads::begin_of(const Id128& token) const {
  const auto found = claims_.find(token);
  if (found == claims_.end()) return std::nullopt;
  return found->second->part.first;
}

std::size_t PoolReads::end_of(const Id128& token) const {
  const Leased& leased = *claims_.at(token);
  return leased.part.first + leased.blocks();
}

const cluster::Source::SharedRequest& PoolReads::request_of(const Id128& token) const {
  return claims_.at(token)->part.request;
}

void PoolReads::ended(const Id128& token) { claims_.erase(token); }

void PoolReads::skip(const Id128& token, std::size_t first) {
  const TimePoint now = clock_.now();
  std::erase_if(paused_, [&](const auto& each) { return each.second <= now; });
  const auto found = claims_.find(token);
  if (found == claims_.end()) return;
  const Leased& leased = *found->second;
  skipped_ += end_of(token) - first;
  if (leased.was_unconfirmed) return;
  const auto place = place_of(leased.part);
  if (place) paused_[{leased.part.scheduler, place->node}] = now + kPause;
}

bool PoolReads::is_paused(const Id128& scheduler, const Id128& node) const {
  const auto found = paused_.find({scheduler, node});
  return found != paused_.end() && clock_.now() < found->second;
}

// ---- workers

std::uint64_t PoolReads::name_of(const Id128& fabric) {
  if (names_.size() >= kMostNames && !names_.contains(fabric)) names_.clear();
  const auto [name, is_new] = names_.try_emplace(fabric, last_name_ + 1);
  if (is_new) ++last_name_;
  return name->second;
}

Result<std::optional<PoolReads::Opened>> PoolReads::open(const Id128& connection,
                                                         const Id128& token, std::size_t first,
                                                         std::size_t count, engine::PinId pin,
                                                         std::span<const std::uint64_t> known) {
  PEGA_TRY_LET(const auto reader, service_.pool_reader(connection));
  const std::shared_ptr<Leased>& leased = claims_.at(token);
  if (first < leased->part.first || first >= end_of(token) || count == 0) {
    return fail(Errc::kInvalidArgument, "open: {} blocks from place {} on, which the claim lacks",
                count, first);
  }
  const Part& part = leased->part;
  const std::size_t shards = part.request->shards();
  if (reader.generation != part.generation || reader.shard >= shards) {
    return fail(Errc::kInvalidArgument,
                "the claim is on blocks of another namespace or generation");
  }
  const auto place = place_of(part);
  if (!place) return std::optional<Opened>();
  const std::size_t at = first - part.first;
  const std::uint64_t fit = kReadBytes / std::max<std::uint64_t>(1, reader.page_bytes);
  const std::size_t blocks =
      std::min({count, leased->blocks() - at, std::max<std::size_t>(1, fit)});
  if (reads_.size() >= kMostReads) {
    return fail(Errc::kBusy, "{} reads of other nodes' pools are in flight", reads_.size());
  }
  const auto [read, is_new] = reads_.try_emplace({connection, pin}, Read{leased, blocks, {}});
  if (!is_new) {
    return fail(Errc::kInvalidArgument, "pin {} is in use", static_cast<std::uint64_t>(pin));
  }
  leased->expected.reset();
  read->second.queued =
      std::make_shared<cluster::SourceRate::Reserved>(leased->rate, blocks * reader.page_bytes);
  Opened opened{.pages = {}, .source = name_of(place->fabric->incarnation)};
  opened.pages.reserve(blocks);
  for (std::size_t i = at; i < at + blocks; ++i) {
    opened.pages.push_back(place->pages[i * shards + reader.shard]);
  }
  if (std::ranges::find(known, opened.source) == known.end()) {
    opened.fabric = *place->fabric;
    // Only the pool, which is the first: the rest is for tests between servers.
    opened.fabric->regions.resize(1);
  }
  return std::optional(std::move(opened));
}

kj::Promise<Result<bool>> PoolReads::confirm(const Id128& connection, engine::PinId pin) {
  const auto found = reads_.find({connection, pin});
  if (found == reads_.end()) {
    return Result<bool>(fail(Errc::kInvalidArgument, "pin {} has no blocks of another node's pool",
                             static_cast<std::uint64_t>(pin)));
  }
  found->second.queued.reset();  // The bytes have arrived, or never will.
  return source_->confirm_reads(found->second.leased->part.lease, kLongestConfirm)
      .then([this, connection, read = found->second](bool held) {
        return Result<bool>(note_confirmed(connection, read, held));
      });
}

bool PoolReads::note_confirmed(const Id128& connection, const Read& read, bool held) {
  const auto reader = service_.pool_reader(connection);
  if (held && reader && reader->generation == read.leased->part.generation) {
    blocks_ += read.blocks;
    bytes_ += read.blocks * reader->page_bytes;
    service_.note_pool_read(connection, read.blocks);
    return true;
  }
  unconfirmed_ += read.blocks;
  read.leased->was_unconfirmed = true;
  kLog.warn("blocks in the pool of another node are not confirmed blocks={} error=\"{}\"",
            read.blocks,
            held ? "the namespace was reset, or the engine has left" : "the lease had ended");
  return false;
}

void PoolReads::released(const Id128& connection, engine::PinId pin) {
  reads_.erase({connection, pin});
}

std::vector<Id128> PoolReads::left(const Id128& connection) {
  std::erase_if(reads_, [&](const auto& each) { return each.first.first == connection; });
  std::erase_if(paused_, [&](const auto& each) { return each.first.first == connection; });
  std::vector<Id128> tokens;
  for (const auto& [token, leased] : claims_) {
    if (leased->part.scheduler == connection) tokens.push_back(token);
  }
  return tokens;
}

void PoolReads::count(FetchStats& stats) const {
  stats.pool_claims = claims_.size();
  stats.pool_reads = reads_.size();
  stats.pool_blocks = blocks_;
  stats.pool_bytes = bytes_;
  stats.pool_unconfirmed = unconfirmed_;
  stats.pool_through_local = skipped_;
}

}  // namespace pegaflow::server
