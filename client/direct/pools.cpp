#include "client/direct/pools.h"

#include <algorithm>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "transport/pool_peer.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// Above the names of engines at the device; see Sources.
constexpr std::uint64_t kFirstPeer = std::uint64_t{1} << 63;

}  // namespace

std::vector<Pools::Pool>::iterator Pools::find(std::uint64_t pool) {
  return std::ranges::find(pools_, pool, &Pool::name);
}

std::vector<std::uint64_t> Pools::known() {
  std::erase_if(pools_, [this](const Pool& pool) {
    const bool is_over = pool.reads == 0 && pool.paused_until && clock_.now() >= *pool.paused_until;
    if (is_over) device_.remove_peer(pool.peer);
    return is_over;
  });
  std::vector<std::uint64_t> names;
  names.reserve(pools_.size());
  for (const Pool& pool : pools_) names.push_back(pool.name);
  return names;
}

Result<void> Pools::add(std::uint64_t pool, const FabricDescriptor& fabric) {
  if (find(pool) != pools_.end()) return {};
  if (pools_.size() >= kMost) {
    const auto oldest = std::ranges::find(pools_, std::size_t{0}, &Pool::reads);
    if (oldest == pools_.end()) return fail(Errc::kBusy, "{} pools are being read", kMost);
    device_.remove_peer(oldest->peer);
    pools_.erase(oldest);
  }
  PEGA_TRY_LET(const PeerMemory memory, pool_as_peer(layout_, fabric));
  const std::uint64_t peer = kFirstPeer + ++last_peer_;
  PEGA_TRY(device_.add_peer(peer, memory));
  pools_.push_back({.name = pool, .peer = peer, .pages = memory.block_count});
  kLog.info("blocks are read out of the pool of another node pool={} lane={}", pool,
            fabric.backend);
  return {};
}

Result<std::uint64_t> Pools::begin(std::uint64_t pool, std::span<const std::uint32_t> pages) {
  const auto found = find(pool);
  if (found == pools_.end()) return fail(Errc::kGone, "pool {} is not known", pool);
  const auto beyond =
      std::ranges::find_if(pages, [&](std::uint32_t page) { return page >= found->pages; });
  if (beyond != pages.end()) {
    return fail(Errc::kInternal, "page {} of {} of pool {}", *beyond, found->pages, pool);
  }
  if (found->paused_until) return fail(Errc::kRefused, "pool {} could not be read lately", pool);
  ++found->reads;
  const std::uint64_t peer = found->peer;
  std::rotate(found, found + 1, pools_.end());
  return peer;
}

void Pools::end(std::uint64_t pool, const std::optional<Error>& error) {
  const auto found = find(pool);
  PEGA_ASSERT(found != pools_.end() && found->reads != 0, "pool {} is not being read", pool);
  --found->reads;
  if (!error || error->code == Errc::kCancelled) return;
  found->paused_until = clock_.now() + kPause;
  kLog.warn(
      "the pool of another node cannot be read at present, its blocks are fetched through the pool "
      "of this node pool={} error=\"{}\" pause={}",
      pool, to_string(*error), format_duration(kPause));
}

void Pools::clear() {
  for (const Pool& pool : pools_) device_.remove_peer(pool.peer);
  pools_.clear();
}

}  // namespace pegaflow
