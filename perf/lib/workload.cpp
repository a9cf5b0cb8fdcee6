#include "perf/lib/workload.h"

#include <algorithm>

namespace pegaflow::perf {

std::uint64_t pool_bytes_for(std::uint64_t blocks) {
  constexpr std::uint64_t kUnit = std::uint64_t{64} << 20;
  const std::uint64_t bytes = blocks * kSmallPageBytes;
  return std::max(kUnit, (bytes + bytes / 32 + kUnit - 1) / kUnit * kUnit);
}

Result<void> fill(harness::WireClient& client, const KeySource& keys, std::uint64_t blocks,
                  std::uint64_t& next_job) {
  for (std::uint64_t first = 0; first < blocks; first += kJobBlocks) {
    const std::size_t count = std::min<std::uint64_t>(kJobBlocks, blocks - first);
    const std::uint64_t job = next_job++;
    PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
                 client.reserve(client.job(job), keys.range(first, count)));
    const auto skipped = std::count(slots.begin(), slots.end(), harness::WireClient::kNoFrame);
    if (slots.size() != count || skipped != 0) {
      return fail(Errc::kOutOfCapacity, "{2} of blocks {0} to {1} got no slot", first,
                  first + count, skipped);
    }
    PEGA_TRY(client.publish(client.job(job)));
  }
  return {};
}

Result<std::uint32_t> lookup(harness::WireClient& client, std::span<const BlockKey> keys) {
  PEGA_TRY_LET(const harness::WireClient::Found found, client.lookup(keys));
  if (!found.complete) return fail(Errc::kRefused, "the instance is not complete");
  return found.blocks;
}

}  // namespace pegaflow::perf
