#include "cluster/source.h"

namespace pegaflow::cluster {

bool Source::Located::is_known() const {
  return rate->is_known() && (on_disks.blocks == 0 || on_disks.bytes_per_second != 0);
}

bool Source::Located::is_fresh(TimePoint now) const {
  return rate->is_fresh(now) && (on_disks.blocks == 0 || disks->is_fresh(now));
}

std::uint64_t Source::Located::queued_bytes() const {
  return rate->queued_bytes() + (on_disks.blocks == 0 ? 0 : disks->queued_bytes());
}

TimePoint Source::Located::stuck_at() const {
  return on_disks.blocks == 0 ? rate->stuck_at() : std::min(rate->stuck_at(), disks->stuck_at());
}

Arrival Source::Located::predict(std::uint64_t bytes, std::uint64_t disk_bytes) const {
  if (!is_known()) return {};
  const Arrival lane = rate->predict(bytes, batch_bytes);
  if (disk_bytes == 0) return lane;
  const auto from_disks = [this](std::uint64_t first) {
    return std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(static_cast<double>(on_disks.queued_bytes + first) /
                                      static_cast<double>(on_disks.bytes_per_second)));
  };
  const std::uint64_t batch = std::min(disk_bytes, batch_bytes);
  const Duration batch_over_lane = rate->predict(batch, batch).first;
  return {.first = from_disks(batch) + lane.first,
          .last = std::max(lane.last, from_disks(disk_bytes) + batch_over_lane)};
}

}  // namespace pegaflow::cluster
