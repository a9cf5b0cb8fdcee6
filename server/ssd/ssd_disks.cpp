#include "server/ssd/ssd_disks.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <poll.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"ssd"};

/// Large blocks end one by one, and to wake the RPC thread costs more than to seal one. Loads
/// gather blocks for longer than that: see Fetches::kGatherTime.
constexpr Duration kReportInterval = std::chrono::milliseconds(2);

}  // namespace

Result<std::unique_ptr<SsdDisks>> SsdDisks::open(const Options& options, const Clock& clock) {
  const std::size_t count = options.paths.size();
  const Disk::Limits limits;
  std::unique_ptr<SsdDisks> disks(new SsdDisks(count * limits.requests));
  const std::uint64_t each = options.capacity_bytes / count / Disk::kAlignment * Disk::kAlignment;
  for (std::size_t i = 0; i < count; ++i) {
    DiskOptions of_disk;
    of_disk.path = options.paths[i];
    of_disk.size_bytes = each;
    of_disk.backend = options.backend;
    of_disk.lock_wait = options.lock_wait;
    of_disk.limits = limits;
    of_disk.huge_memory = options.huge_memory;
    of_disk.report_interval = kReportInterval;
    PEGA_TRY_LET(
        auto disk, open_disk(of_disk, [to = disks.get(), i](Disk::Completion&& completion) {
          const bool is_sent =
              to->completions_.try_send(SsdNews{.disk = i, .completion = std::move(completion)});
          PEGA_ASSERT(is_sent, "more completions than requests of disk {}", i);
        }));
    const Disk::Attributes& is = disk->attributes();
    kLog.info("a disk of the cache is open path={} backend={} reason=\"{}\" direct={} new={}",
              is.path, is.backend, is.reason, is.direct, is.is_new);
    disks->paths_.push_back(is.path);
    SsdDisk::Options of_blocks;
    of_blocks.size_bytes = each;
    of_blocks.segment_bytes = options.segment_bytes;
    of_blocks.format = options.format;
    of_blocks.index_bytes = options.index_bytes / count;
    disks->disks_.push_back(std::make_unique<SsdDisk>(std::move(disk), of_blocks, clock));
    PEGA_TRY(disks->disks_.back()->open([to = disks.get()] {
      pollfd news{.fd = to->completions_.fd(), .events = POLLIN, .revents = 0};
      while (::poll(&news, 1, -1) < 0 && errno == EINTR) {
      }
      to->read_completions();
    }));
  }
  return disks;
}

void SsdDisks::close() {
  // Jobs that end look for other disks.
  const std::vector<std::unique_ptr<SsdDisk>> closing = std::exchange(disks_, {});
}

std::size_t SsdDisks::read_completions() {
  return completions_.drain([this](SsdNews&& news) {
    if (news.disk < disks_.size()) disks_[news.disk]->completed(std::move(news.completion));
  });
}

SsdDisk* SsdDisks::having(const engine::ssd::Origin& origin, const BlockKey& key) const {
  for (const auto& disk : disks_) {
    if (disk->has(origin.name, origin.epoch, key)) return disk.get();
  }
  return nullptr;
}

bool SsdDisks::hide(const engine::ssd::Origin& origin, const BlockKey& key) const {
  return std::any_of(disks_.begin(), disks_.end(),
                     [&](const auto& disk) { return disk->hides(origin.name, origin.epoch, key); });
}

SsdDisk* SsdDisks::taking() const {
  SsdDisk* best = nullptr;
  std::pair<std::uint64_t, std::uint64_t> least;
  for (const auto& disk : disks_) {
    if (!disk->takes_blocks()) continue;
    const Disk::Stats stats = disk->disk_stats();
    const std::pair load{stats.writes.bytes_queued + stats.writes.bytes_in_flight,
                         disk->stats().written_bytes};
    if (best != nullptr && load >= least) continue;
    best = disk.get();
    least = load;
  }
  return best;
}

bool SsdDisks::may_read() const {
  return std::any_of(disks_.begin(), disks_.end(), [](const auto& disk) {
    return disk->state() != SsdDisk::State::kLeft && !disk->stats().is_breaker_open;
  });
}

bool SsdDisks::is_scanning() const {
  return std::any_of(disks_.begin(), disks_.end(),
                     [](const auto& disk) { return disk->state() == SsdDisk::State::kScanning; });
}

}  // namespace pegaflow::server
