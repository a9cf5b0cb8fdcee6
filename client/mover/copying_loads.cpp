#include "client/mover/copying_loads.h"

#include <algorithm>
#include <utility>

namespace pegaflow {

void CopyingLoads::add(std::uint64_t ticket, std::vector<std::uint64_t> batches,
                       const FollowedLoad& report, TimePoint accepted) {
  const std::lock_guard lock(mutex_);
  loads_.push_back({ticket, std::move(batches), report, accepted});
}

bool CopyingLoads::leave(std::uint64_t ticket, std::uint64_t batch, bool whole) {
  const std::lock_guard lock(mutex_);
  const auto load = std::find_if(loads_.begin(), loads_.end(),
                                 [&](const Load& one) { return one.ticket == ticket; });
  if (load == loads_.end()) return false;
  const bool followed = load->followed;
  load->failed = load->failed || !whole;
  std::erase(load->batches, batch);
  if (load->batches.empty()) loads_.erase(load);
  return followed;
}

void CopyingLoads::remove(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  std::erase_if(loads_, [&](const Load& one) { return one.ticket == ticket; });
}

std::vector<FollowedLoad> CopyingLoads::follow(Device& device, Device::Queue queue, Duration within,
                                               TimePoint now) {
  std::vector<FollowedLoad> followed;
  const std::lock_guard lock(mutex_);
  for (Load& load : loads_) {
    if (load.followed || load.failed) continue;
    // The last batch first: unless the device is that far, the queue need not wait for the others.
    // A broken device reports it in the completion.
    load.followed =
        std::all_of(load.batches.rbegin(), load.batches.rend(), [&](std::uint64_t batch) {
          return device.complete_early(batch, queue, within).value_or(false);
        });
    if (!load.followed) continue;
    load.report.took = now - load.accepted;
    followed.push_back(load.report);
  }
  return followed;
}

}  // namespace pegaflow
