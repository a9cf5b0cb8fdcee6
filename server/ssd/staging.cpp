#include "server/ssd/staging.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/peer_codec.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/background.h"
#include "server/fetches/fetches.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"ssd"};

OnDisks with_rate(std::size_t blocks, const cluster::SourceRate& rate) {
  return {.blocks = blocks,
          .bytes_per_second = static_cast<std::uint64_t>(rate.bytes_per_second()),
          .queued_bytes = rate.queued_bytes()};
}

}  // namespace

struct Staging::One {
  std::uint64_t number = 0;
  Id128 peer;
  Id128 token;  ///< Names its claim.
  CacheService::Wants wants;
  cluster::Source::SharedRequest request;
  std::shared_ptr<cluster::SourceRate> rate;  ///< The disks'.
  std::uint64_t bytes = 0;                    ///< Its part of `bytes_`.
  std::size_t claimed = 0;
  std::size_t next = 0;  ///< Blocks that were lent.
  TimePoint asked_at{};
  bool is_waited_for = false;  ///< await_next() waits.
};

Staging::Staging(CacheService& service, cluster::Source& disks, Fetches& fetches,
                 Background& background, kj::Timer& timer, const Clock& clock,
                 const Options& options)
    : service_(service),
      disks_(disks),
      fetches_(fetches),
      background_(background),
      timer_(timer),
      clock_(clock),
      options_(options),
      tasks_(*this) {}

Staging::~Staging() noexcept(false) = default;

bool Staging::is_live(const One& one) const { return stagings_.contains(one.number); }

// ---- finding

/// A disk that does not respond offers nothing.
bool Staging::may_read(const cluster::Source::Located& located) const {
  return located.blocks != 0 && clock_.now() < located.rate->stuck_at();
}

kj::Promise<cluster::Lender::Prefix> Staging::locate(const Bytes32& space,
                                                     std::span<const BlockKey> keys) {
  using Prefix = cluster::Lender::Prefix;
  const std::size_t in_pool = service_.present(space, keys);
  if (in_pool == keys.size() || !disks_.is_ready()) return Prefix{.blocks = in_pool};
  const auto behind = keys.subspan(in_pool);
  return disks_.locate(space, behind)
      .then([this, space, in_pool, behind = std::vector<BlockKey>(behind.begin(), behind.end())](
                cluster::Source::Located&& located) -> Prefix {
        if (!may_read(located)) return {.blocks = in_pool};
        const auto here = service_.present_each(space, std::span(behind).first(located.blocks));
        const auto too = static_cast<std::size_t>(std::count(here.begin(), here.end(), true));
        return {.blocks = in_pool + located.blocks,
                .on_disks = with_rate(located.blocks - too, *located.rate)};
      });
}

kj::Promise<cluster::Lender::Present> Staging::locate_each(const Bytes32& space,
                                                           std::span<const BlockKey> keys) {
  using Present = cluster::Lender::Present;
  Present found{.has = service_.present_each(space, keys)};
  if (!disks_.is_ready()) return kj::mv(found);
  return disks_.locate_each(space, keys)
      .then([this, found = std::move(found)](
                std::vector<cluster::Source::Holding>&& holdings) mutable -> Present {
        std::size_t more = 0;
        for (const cluster::Source::Holding& each : holdings) {
          if (!may_read(each.located(1))) continue;
          for (std::size_t i = 0; i < found.has.size(); ++i) {
            if (found.has[i] || !each.has[i]) continue;
            found.has[i] = true;
            ++more;
          }
          found.on_disks = with_rate(more, *each.rate);
        }
        return std::move(found);
      });
}

// ---- reading

kj::Promise<Staging::Pending> Staging::begin(const Id128& peer, const Bytes32& space,
                                             std::span<const BlockKey> keys) {
  auto wants = service_.wants_by_name(space);
  if (!wants || keys.empty() || !disks_.is_ready() || stagings_.size() >= options_.most) {
    return Pending{};
  }
  auto one = std::make_shared<One>();
  one->number = ++last_number_;
  one->peer = peer;
  one->token = Id128::random();
  one->wants = std::move(*wants);
  one->asked_at = clock_.now();
  one->request = std::make_shared<cluster::Source::Request>();
  one->request->space = space;
  one->request->page_bytes = one->wants.page_bytes;
  one->request->keys.assign(keys.begin(), keys.end());
  one->request->deadline = one->asked_at + options_.deadline;
  one->request->is_for_node = true;
  stagings_.emplace(one->number, one);
  tasks_.add(watch(one));
  return disks_.locate(space, one->request->keys)
      .then([this, one](cluster::Source::Located&& located) -> kj::Promise<Pending> {
        if (!may_read(located)) {
          end(one);
          return Pending{};
        }
        one->rate = located.rate;
        const std::uint64_t queued = one->rate->queued_bytes();
        return lease(one, std::move(located)).then([this, one, queued]() -> Pending {
          if (one->claimed == 0) end(one);
          if (!is_live(*one)) return {};
          return {.number = one->number, .blocks = report(*one, queued)};
        });
      });
}

/// Leases what the limits allow from the disks, and starts to read it.
kj::Promise<void> Staging::lease(const Shared& one, cluster::Source::Located&& located) {
  const std::uint64_t frame =
      std::max<std::uint64_t>(1, service_.store().frame_bytes(one->wants.generation));
  const std::uint64_t room = (options_.most_bytes - std::min(options_.most_bytes, bytes_)) / frame;
  const std::size_t blocks = std::min<std::uint64_t>(located.blocks, room);
  if (blocks == 0 || !is_live(*one)) return kj::READY_NOW;
  one->bytes = blocks * frame;
  bytes_ += one->bytes;
  one->request->keys.resize(blocks);
  return disks_.lease(one->request, one->request->keys, std::move(located))
      .then([this, one](cluster::Source::SharedLease&& lease) -> kj::Promise<void> {
        if (lease == nullptr) return kj::READY_NOW;
        return take_frames(one, lease).then([this, lease]() { disks_.end(lease); });
      });
}

/// Claims a slice for each event-loop iteration, and has the disks read what is not here.
kj::Promise<void> Staging::take_frames(const Shared& one,
                                       const cluster::Source::SharedLease& lease) {
  if (!is_live(*one)) return kj::READY_NOW;
  const std::size_t first = one->claimed;
  const std::span<const BlockKey> all(one->request->keys);
  const auto keys = all.subspan(first, std::min(CacheService::kSliceBlocks, all.size() - first));
  auto fetch = service_.stage(one->wants, one->token, first, keys);
  background_.poke();
  if (!fetch) {
    kLog.debug("blocks are not staged error=\"{}\"", to_string(fetch.error()));
    return kj::READY_NOW;
  }
  one->claimed += fetch->blocks;
  std::vector<cluster::Source::Block> blocks;
  for (CacheService::Fetched& frame : fetch->frames) {
    fetches_.note_staged(frame.frame);
    blocks.push_back({.place = first + frame.place,
                      .frame = frame.frame,
                      .offsets = std::move(frame.offsets),
                      .leased = first + frame.place});
  }
  if (!blocks.empty()) disks_.read(one->request, lease, std::move(blocks));
  if (fetch->blocks < keys.size() || one->claimed == all.size()) return kj::READY_NOW;
  return next_turn(timer_).then([this, one, lease]() { return take_frames(one, lease); });
}

OnDisks Staging::report(const One& one, std::uint64_t queued_bytes) const {
  OnDisks left = with_rate(one.claimed - one.next, *one.rate);
  left.queued_bytes = queued_bytes;
  return left;
}

// ---- lending

Staging::Shared Staging::find(const Id128& peer, std::uint64_t number) const {
  const auto found = stagings_.find(number);
  return found == stagings_.end() || found->second->peer != peer ? nullptr : found->second;
}

kj::Promise<Staging::Ready> Staging::await_next(const Id128& peer, std::uint64_t number,
                                                Duration patience) {
  const Shared one = find(peer, number);
  if (one == nullptr || one->is_waited_for) return Ready{};
  one->asked_at = clock_.now();
  one->is_waited_for = true;
  return wait(one, one->asked_at + patience).then([this, one](Ready&& ready) {
    one->is_waited_for = false;
    one->asked_at = clock_.now();
    return std::move(ready);
  });
}

kj::Promise<Staging::Ready> Staging::wait(const Shared& one, TimePoint until) {
  if (!is_live(*one)) return Ready{};
  const std::size_t most =
      std::min(one->claimed - one->next, kMaxPagesPerLease / one->wants.page_bytes.size());
  const auto there = service_.arrived(one->token, one->next, most);
  if (!there) {
    // A reset, a block that could not be read, or a claim that was revoked.
    kLog.debug("a staging ends error=\"{}\"", to_string(there.error()));
    end(one);
    return Ready{};
  }
  const TimePoint now = clock_.now();
  const bool is_enough =
      *there == most || *there * one->request->block_bytes() >= kWorthAnAnswer || now >= until;
  if (is_enough) {
    const auto first = one->request->keys.begin() + static_cast<std::ptrdiff_t>(one->next);
    return Ready{.space = one->wants.space,
                 .keys = {first, first + static_cast<std::ptrdiff_t>(*there)}};
  }
  return fetches_.progress()
      .exclusiveJoin(timer_.afterDelay(to_kj(until - now)))
      .then([this, one, until]() { return wait(one, until); });
}

Staging::Pending Staging::lent(const Id128& peer, std::uint64_t number, std::size_t ready,
                               std::size_t count) {
  const Shared one = find(peer, number);
  if (one == nullptr) return {};
  one->next += count;
  // Without room for a loan the blocks need not be kept.
  if (one->next == one->claimed || (ready != 0 && count == 0)) {
    end(one);
    return {};
  }
  return {.number = number, .blocks = report(*one, 0)};
}

// ---- ends

/// Ends it when its peer requests nothing for a time.
kj::Promise<void> Staging::watch(const Shared& one) {
  return timer_.afterDelay(to_kj(options_.idle)).then([this, one]() -> kj::Promise<void> {
    if (!is_live(*one)) return kj::READY_NOW;
    if (one->is_waited_for || clock_.now() - one->asked_at < options_.idle) return watch(one);
    kLog.debug("a staging ends, its peer requests nothing blocks={}", one->claimed - one->next);
    end(one);
    return kj::READY_NOW;
  });
}

void Staging::end(const Shared& one) {
  if (stagings_.erase(one->number) == 0) return;
  bytes_ -= one->bytes;
  service_.end_staging(one->token);
  background_.poke();
}

void Staging::end(const Id128& peer, std::uint64_t number) {
  if (const Shared one = find(peer, number)) end(one);
}

void Staging::peer_left(const Id128& peer) {
  std::vector<Shared> its;
  for (const auto& [number, one] : stagings_) {
    if (one->peer == peer) its.push_back(one);
  }
  for (const Shared& one : its) end(one);
}

void Staging::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a staging failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
