#include "perf/placement/sim_node.h"

#include <algorithm>
#include <span>

namespace pegaflow::perf {

SimNode::SimNode(std::uint32_t number, const SimHardware& hardware)
    : number_(number),
      hardware_(hardware),
      gpu_(hardware.gpu_blocks),
      pool_(hardware.pool_blocks) {}

std::size_t SimNode::gpu_prefix(const PlaceRequest& request) const {
  return gpu_.prefix(request.chain);
}

std::size_t SimNode::local_prefix(const PlaceRequest& request) const {
  std::size_t found = 0;
  while (found < request.chain.size() &&
         (gpu_.has(request.chain[found]) || pool_.has(request.chain[found]))) {
    ++found;
  }
  return found;
}

std::size_t SimNode::pool_prefix(const PlaceRequest& request, double now) const {
  return pool_.complete_prefix(request.chain, now);
}

bool SimNode::pull_pays(const PlaceRequest& request, const SimNode& source, double now) const {
  const std::size_t local = local_prefix(request);
  const std::size_t reach = source.pool_prefix(request, now);
  if (&source == this || reach <= local) return false;
  const double blocks = static_cast<double>(reach - local);
  const double begin = std::max({now, source.sends_until_, receives_until_});
  const double arrives = begin + hardware_.link_latency_seconds +
                         blocks * hardware_.block_bytes() / hardware_.link_bytes_per_second;
  const double saved = blocks * kTraceBlockTokens / hardware_.tokens_per_second;
  return std::max(arrives, free_at_) - std::max(now, free_at_) < saved;
}

Served SimNode::serve(const PlaceRequest& request, SimNode* source, double now,
                      BlockChanges& changes) {
  const std::size_t gpu = gpu_prefix(request);
  const std::size_t local = local_prefix(request);
  std::size_t reach = local;
  double ready = now + static_cast<double>(local - gpu) * hardware_.load_block_seconds;
  double pulled_at = now;
  if (source != nullptr && source != this) {
    reach = std::max(local, source->pool_prefix(request, now));
    if (reach > local) {
      const double begin = std::max({now, source->sends_until_, receives_until_});
      const double bytes = static_cast<double>(reach - local) * hardware_.block_bytes();
      pulled_at = begin + hardware_.link_latency_seconds + bytes / hardware_.link_bytes_per_second;
      source->sends_until_ = receives_until_ = pulled_at;
      ready = std::max(ready, pulled_at);
    }
  }

  Served served{.blocks = static_cast<std::uint32_t>(request.chain.size()),
                .hits = static_cast<std::uint32_t>(reach),
                .gpu = static_cast<std::uint32_t>(gpu),
                .pulled = static_cast<std::uint32_t>(reach - local)};
  const std::uint64_t cached = std::uint64_t{reach} * kTraceBlockTokens;
  served.uncached_tokens =
      cached < request.input_tokens ? request.input_tokens - static_cast<std::uint32_t>(cached) : 1;
  served.prefill = served.uncached_tokens / hardware_.tokens_per_second;
  served.first_token = std::max(free_at_, ready) + served.prefill;
  served.done = served.first_token + request.output_tokens * hardware_.decode_step_seconds;
  free_at_ = served.first_token;
  computed_ += served.prefill;

  changes.node = number_;
  const std::span<const index::Key> chain = request.chain;
  for (const index::Key key : chain) {
    if (!gpu_.has(key)) changes.gpu_stored.push_back(key);
    if (!pool_.has(key)) changes.pool_stored.push_back(key);
  }
  gpu_.use(chain, served.first_token, changes.gpu_erased);
  // What was pulled can be pulled from here once it has arrived; the computed rest later.
  pool_.use(chain.subspan(reach), served.first_token, changes.pool_erased);
  pool_.use(chain.first(reach), pulled_at, changes.pool_erased);
  return served;
}

}  // namespace pegaflow::perf
