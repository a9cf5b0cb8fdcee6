#include "server/prefetch/prefetches.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/background.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"prefetch"};

/// The part of all prefetched bytes that one tenant may have: 1 / this.
constexpr std::uint64_t kTenantPart = 4;

}  // namespace

struct Prefetches::One {
  std::string id;
  std::string tenant;
  Id128 token;  ///< Names its claim.
  std::uint64_t bytes = 0;
  std::size_t claimed = 0;
  std::size_t arrived = 0;
  TimePoint deadline{};
};

Prefetches::Prefetches(CacheService& service, Fetches& fetches, Background& background,
                       kj::Timer& timer, const Clock& clock, const Options& options)
    : service_(service),
      fetches_(fetches),
      background_(background),
      timer_(timer),
      clock_(clock),
      options_(options),
      tasks_(*this) {}

Prefetches::~Prefetches() noexcept(false) = default;

PrefetchStats Prefetches::stats() const {
  PrefetchStats stats = counted_;
  stats.running = running_.size();
  stats.bytes = bytes_;
  return stats;
}

bool Prefetches::is_live(const One& one) const {
  const auto found = running_.find(one.id);
  return found != running_.end() && found->second->token == one.token;
}

std::uint64_t Prefetches::fit(const CacheService::Wants& wants, Wanted& wanted) const {
  const std::uint64_t frame =
      std::max<std::uint64_t>(1, service_.store().frame_bytes(wants.generation));
  std::uint64_t room = options_.most_bytes - std::min(options_.most_bytes, bytes_);
  if (!wanted.tenant.empty()) {
    const auto had = bytes_of_.find(wanted.tenant);
    const std::uint64_t used = had == bytes_of_.end() ? 0 : had->second;
    const std::uint64_t most = options_.most_bytes / kTenantPart;
    room = std::min(room, most - std::min(most, used));
  }
  const std::vector<bool> present = service_.present_each(wants.space, wanted.keys);
  std::uint64_t bytes = 0;
  std::size_t kept = 0;
  while (kept < present.size() && (present[kept] || bytes + frame <= room)) {
    if (!present[kept++]) bytes += frame;
  }
  wanted.keys.resize(kept);
  return bytes;
}

void Prefetches::start(const CacheService::Wants& wants, Wanted wanted) {
  if (running_.contains(wanted.id)) return;
  const bool has_place = running_.size() < options_.most && fetches_.has_source();
  const std::uint64_t bytes = has_place ? fit(wants, wanted) : 0;
  if (!has_place || wanted.keys.empty()) {
    ++counted_.rejected;
    return;
  }
  if (bytes == 0) {  // All of them are here.
    ++counted_.finished;
    counted_.blocks += wanted.keys.size();
    return;
  }
  auto one = std::make_shared<One>();
  one->id = wanted.id;
  one->tenant = wanted.tenant;
  one->token = Id128::random();
  one->bytes = bytes;
  one->deadline = clock_.now() + options_.deadline;
  bytes_ += bytes;
  if (!one->tenant.empty()) bytes_of_[one->tenant] += bytes;
  running_.emplace(one->id, one);
  tasks_.add(fetches_
                 .prefetch(wants, one->token, std::move(wanted.keys),
                           {.nodes = std::move(wanted.nodes)}, options_.deadline)
                 .then([this, one](std::size_t claimed) -> kj::Promise<void> {
                   one->claimed = claimed;
                   // Cancelled meanwhile: the claim may have been made after that.
                   if (!is_live(*one)) service_.end_staging(one->token);
                   return wait(one);
                 }));
}

/// Waits for the blocks, in their order: each call visits those that have arrived since.
kj::Promise<void> Prefetches::wait(const Shared& one) {
  if (!is_live(*one)) return kj::READY_NOW;
  while (one->arrived < one->claimed) {
    const auto more = service_.arrived(
        one->token, one->arrived, std::min(one->claimed - one->arrived, CacheService::kClaimSlice));
    if (!more) {
      // A reset, a block that could not be read, or a claim that was revoked.
      kLog.debug("a prefetch ends id={} error=\"{}\"", one->id, to_string(more.error()));
      end(one, counted_.ended);
      return kj::READY_NOW;
    }
    if (*more == 0) break;
    one->arrived += *more;
  }
  if (one->arrived == one->claimed) {
    counted_.blocks += one->claimed;
    end(one, counted_.finished);
    return kj::READY_NOW;
  }
  const TimePoint now = clock_.now();
  if (now >= one->deadline) {
    end(one, counted_.ended);
    return kj::READY_NOW;
  }
  return fetches_.progress()
      .exclusiveJoin(timer_.afterDelay(to_kj(one->deadline - now)))
      .then([this, one]() { return wait(one); });
}

void Prefetches::cancel(const std::string& id) {
  const auto found = running_.find(id);
  if (found == running_.end()) return;
  const Shared one = found->second;
  end(one, counted_.cancelled);
}

void Prefetches::end(const Shared& one, std::uint64_t& counter) {
  ++counter;
  running_.erase(one->id);
  bytes_ -= one->bytes;
  if (const auto tenant = bytes_of_.find(one->tenant); tenant != bytes_of_.end()) {
    tenant->second -= one->bytes;
    if (tenant->second == 0) bytes_of_.erase(tenant);
  }
  fetches_.ended(one->token);
  service_.end_staging(one->token);
  background_.poke();
}

void Prefetches::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a prefetch failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
