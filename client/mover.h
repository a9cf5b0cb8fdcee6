#pragma once
/// \file
/// The worker's side of an engine: moves blocks between its memory and the pool.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/page_layout.h"
#include "client/link_options.h"
#include "client/load_pace.h"
#include "transport/device.h"

namespace pegaflow {

/// Registers one rank's KV cache with the node's server and runs its save and load jobs.
/// Each accepted job is reported exactly once by take_finished(), successful or not, and only after
/// its last copy has ended: from then on the engine may use the job's blocks again. A load is good
/// only if the connection was still up after its last copy completed.
/// A private thread calls the server; the device copies with threads of its own. After a lost
/// connection no new copy begins, the mover waits for every copy in flight, unmaps the pool and
/// registers again. A broken invariant retires the mover: unfinished jobs are reported as failed
/// once their copies have ended, the cache stays off, and one error line is logged.
///
/// Thread-safe. The device and the engine's memory outlive the mover.
class Mover {
 public:
  /// Which pages get a checksum when they are saved, and whether checksums are compared after a
  /// load. A page that was saved without one is loaded unchecked.
  enum class Verify : std::uint8_t {
    kOff,     ///< No page; not compared.
    kSample,  ///< A random sample; compared.
    kAll,     ///< Every page; compared.
  };

  struct Options {
    LinkOptions link;
    std::uint32_t rank = 0;  ///< Among the instance's tensor x pipeline parallel workers.
    std::uint32_t ranks = 1;
    /// The share of each block that this rank holds. Ranks with the same bytes have the same shard.
    /// Defaults: `rank` and `ranks`.
    std::optional<std::uint32_t> shard{};
    std::optional<std::uint32_t> shards{};
    /// False for all but the lowest of the ranks that hold one shard: they load and do not save.
    /// save() then reports the job as finished at once, with 0 blocks.
    bool saves = true;
    /// The preferred NUMA node of its pages. -1: the NUMA node to whose cores this process is
    /// bound; if it is bound to none, the server chooses.
    int numa_node = -1;
    /// The namespace's canonical list: equal lists share blocks.
    std::vector<std::pair<std::string, std::string>> factors;
    /// A load may take `load_patience` and the time that its bytes, and those queued before it,
    /// need at `load_bytes_per_second`; then the rest of it is abandoned and computed.
    Duration load_patience = std::chrono::milliseconds(250);
    double load_bytes_per_second = 1e9;
    /// The total time that a load may wait for blocks from another node. Then the rest of it is
    /// abandoned and computed.
    Duration coming_patience = std::chrono::seconds(2);
    std::size_t max_jobs = 1024;  ///< In flight or not taken; more is kBusy.
    Verify verify = Verify::kOff;
    /// For kSample: one page in this many gets a checksum, on average; at least 1.
    std::uint32_t sample_one_in = 16;
    /// Describes the device to the server, for /instances and `pegaflow doctor`. Called on the
    /// private thread each time the pool is attached; if empty, the server shows the device as
    /// unknown.
    std::function<DeviceReport()> describe_device{};
  };

  /// Starts the thread; it connects and registers in the background.
  /// Errors: kInvalidArgument for an invalid option, kInternal when no thread can start.
  static Result<std::unique_ptr<Mover>> start(const Options& options, PageLayout layout,
                                              Device& device);

  /// Calls close().
  ~Mover();

  /// Saves `blocks[i]` under `keys[i]` after the engine's work before `after` is done. Skips blocks
  /// that the cache has or has no room for. Job numbers rise within a scheduler.
  /// Errors: kPeerLost when there is no server, kBusy at max_jobs, kInvalidArgument for lists of
  /// different or no length or a block out of range; the job is then not accepted.
  Result<void> save(Id128 scheduler, std::uint64_t job, std::span<const BlockKey> keys,
                    std::span<const std::uint32_t> blocks, Device::Event after);

  /// Loads the claimed blocks `first`, `first` + 1, ... of `token` into `blocks`. Blocks in flight
  /// from another node are copied piece by piece as they arrive. With `computing` the load is cut
  /// when it falls behind computing, or when the other node stops responding: the remaining blocks
  /// then fail with kTimeout. `load` is the caller's name for it, unique among loads in flight.
  /// Errors: as save().
  Result<void> load(std::uint64_t load, const Id128& token, std::size_t first,
                    std::span<const std::uint32_t> blocks,
                    const std::optional<LoadPace::Computing>& computing = std::nullopt);

  /// Cancels a load: no further page is copied. The load is still reported.
  void cancel_load(std::uint64_t load);

  struct Finished {
    enum class Kind : std::uint8_t { kSave, kLoad };
    Kind kind = Kind::kSave;
    std::uint64_t id = 0;     ///< The number of the job, or the load's name.
    std::size_t blocks = 0;   ///< Blocks now sealed, or loaded.
    std::size_t skipped = 0;  ///< Save: blocks that are cached, being saved, or without room.
    std::uint64_t bytes = 0;  ///< Bytes copied.
    Duration took{};          ///< From acceptance to its end.
    Duration copying{};       ///< Load: time on the device, without that of earlier loads.
    std::optional<LoadPace::Cut> cut;          ///< Load: why computing would have been faster.
    std::vector<std::uint32_t> failed_blocks;  ///< Load: blocks whose bytes must not be used.
    std::optional<Error> error;                ///< The reason if not all blocks succeeded.
    /// Load: pages compared with their checksums, and those that differed from the saved page. From
    /// the first such page on the load has failed (kCorrupt), and the server invalidates their
    /// blocks.
    std::size_t verified = 0;
    std::size_t corrupt = 0;
  };

  /// The early completion of a load: the engine need not wait for it.
  struct Followed {
    std::uint64_t load = 0;
    std::size_t blocks = 0;  ///< All blocks of the load.
    std::uint64_t bytes = 0;
    Duration took{};  ///< From acceptance until now.
  };

  /// Completes loads early: returns those whose copies are all queued on the device and are
  /// expected to end `within` this time. Work that the engine queues on `queue` from now on waits
  /// for them there and finds their blocks whole. Each load is returned once here, and reported
  /// once more by take_finished() when it has ended. Its only possible error is then the device's
  /// own, which has broken the engine's context too. Its blocks may be used in the order of `queue`
  /// even if the server is lost meanwhile: pages under a pin stay unchanged until their reader is
  /// gone. Never returns a load on a device that copies synchronously, or whose pages are compared
  /// with checksums.
  std::vector<Followed> follow(Device::Queue queue, Duration within);

  /// Returns the jobs that ended since the last call, each once.
  std::vector<Finished> take_finished();

  /// A descriptor that is readable while take_finished() would return a job; for event loops.
  [[nodiscard]] int finished_fd() const noexcept;

  /// Accepts no new job, waits for the copies in flight, unmaps the pool and sends goodbye.
  /// Idempotent. When it returns, every accepted job can be taken by take_finished().
  void close();

  [[nodiscard]] LinkStatus status() const;
  /// Waits at most `patience` for this state of the link; false after that. For tools and tests: an
  /// engine never waits for the cache.
  bool wait_for(LinkState state, Duration patience) const;
  [[nodiscard]] const PageLayout& layout() const noexcept;

 private:
  class Impl;
  explicit Mover(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
