#pragma once
/// \file
/// The SSD tier of a server, assembled.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include <kj/async-io.h>

#include "base/clock.h"
#include "server/cache/cache_service.h"
#include "server/ssd/ssd_disks.h"
#include "server/ssd/ssd_report.h"
#include "server/ssd/ssd_source.h"
#include "server/ssd/ssd_writer.h"

namespace pegaflow::server {

/// Disks, the source that reads from them and the writer. Passes the epochs that the disks have
/// recorded to the service, finds the blocks of earlier processes, and records resets.
/// Thread-bound: the RPC thread.
class SsdTier final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::uint64_t write_budget = 0;  ///< Bytes a day; 0: no limit.
    std::uint64_t write_ahead = 0;   ///< See SsdWriter.
    /// Blocks of earlier processes are not served until confirm_epochs(): other nodes may have
    /// reset their namespaces meanwhile.
    bool waits_for_nodes = false;
  };

  /// Starts the scan. All references outlive it. `pool` is the memory of the service's blocks.
  /// `changed` is called at most a second after the state of a disk has changed, and each second
  /// while one is scanned.
  SsdTier(std::unique_ptr<SsdDisks> disks, CacheService& service, std::span<std::byte> pool,
          kj::Timer& timer, const Clock& clock, const Options& options,
          std::function<void()> changed);
  ~SsdTier() noexcept(false);
  SsdTier(const SsdTier&) = delete;
  SsdTier& operator=(const SsdTier&) = delete;

  [[nodiscard]] SsdSource& source() noexcept { return source_; }
  [[nodiscard]] Mailbox<SsdNews>& completions() noexcept { return disks_->completions(); }
  void read_completions();

  /// Epochs were exchanged with all other nodes: blocks of earlier processes are served.
  void confirm_epochs();
  [[nodiscard]] bool waits_for_nodes() const noexcept { return waits_for_nodes_; }
  /// Records the epochs that are newer than those on the disks. Resolves to true when they are
  /// durable: no block from before a reset is found after a power cut. False: a disk could not
  /// record one, was left, and its file has to be removed.
  kj::Promise<bool> record_epochs();
  /// No block that is on the disks now is found again. `done` receives the number of blocks, and
  /// whether every disk has recorded that durably.
  void drop_all(std::function<void(std::uint64_t, bool)> done);
  /// Writes what is in the pool, for at most `patience`, then the tables, and flushes.
  kj::Promise<void> drain(Duration patience);

  /// Ends all I/O. To be called while what receives the blocks of source() exists.
  void close() { disks_->close(); }

  [[nodiscard]] SsdReport report() const;

 private:
  kj::Promise<void> tick();
  void taskFailed(kj::Exception&& exception) override;

  std::unique_ptr<SsdDisks> disks_;
  CacheService& service_;
  kj::Timer& timer_;
  const Clock& clock_;
  bool waits_for_nodes_;
  std::function<void()> changed_;
  std::vector<SsdDisk::State> reported_;  ///< By disk.
  SsdSource source_;
  SsdWriter writer_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
