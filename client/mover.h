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
///
/// Each accepted job is reported exactly once by take_finished(), good or not, and only after its
/// last copy has ended: from then on the engine may use the job's blocks again. A load is good only
/// if the connection was still up after its last copy completed.
///
/// A private thread talks to the server; the device copies on its own. After a lost connection no
/// new copy begins, every copy under way is waited for, the pool is unmapped, and the mover
/// registers again by itself. A broken invariant of ours retires the mover: loads that are not
/// finished are reported failed once their copies ended, the cache stays off, one error line.
///
/// Thread-safe. The device and the engine's memory outlive the mover.
class Mover {
 public:
  /// Which pages get a checksum when they are saved, and whether the checksums of others are looked
  /// at after a load. A page that was saved without one is loaded as it is.
  enum class Verify : std::uint8_t {
    kOff,     ///< None, and no.
    kSample,  ///< Some, by chance, and yes.
    kAll,     ///< Each, and yes.
  };

  struct Options {
    LinkOptions link;
    std::uint32_t rank = 0;  ///< Of the instance's tensor x pipeline parallel workers.
    std::uint32_t ranks = 1;
    /// Which share of each block this rank holds. Ranks that hold the same bytes name one shard.
    /// Without a value: its rank, of `ranks`.
    std::optional<std::uint32_t> shard{};
    std::optional<std::uint32_t> shards{};
    /// False for each but the lowest of the ranks that hold one shard: it loads and does not save.
    /// save() then reports the job finished at once, with 0 blocks.
    bool saves = true;
    /// Where its pages should lie. -1: on the node whose cores this process is kept to; where it
    /// is kept to none, the server chooses.
    int numa_node = -1;
    /// The namespace's canonical list: equal lists share blocks.
    std::vector<std::pair<std::string, std::string>> factors;
    /// A load may take `load_patience` and the time its bytes, and those queued before it, need at
    /// `load_bytes_per_second`; then the rest of it is given up and computed.
    Duration load_patience = std::chrono::milliseconds(250);
    double load_bytes_per_second = 1e9;
    /// How long a load may wait for blocks that come from another node, all in all. Then the rest
    /// of it is given up and computed.
    Duration coming_patience = std::chrono::seconds(2);
    std::size_t max_jobs = 1024;  ///< Under way at once; more is kBusy.
    Verify verify = Verify::kOff;
    std::uint32_t sample_one_in = 16;  ///< Of kSample: pages a checksum, on average; at least 1.
    /// Describes the device to the server, for /instances and doctor. Called on the private thread
    /// each time the pool was attached; if empty, the server shows the device as unknown.
    std::function<DeviceReport()> describe_device{};
  };

  /// Starts the thread; it connects and registers in the background.
  /// Errors: kInvalidArgument for an option without sense, kInternal when no thread can start.
  static Result<std::unique_ptr<Mover>> start(const Options& options, PageLayout layout,
                                              Device& device);

  /// close(), if nobody called it.
  ~Mover();

  /// Saves `blocks[i]` under `keys[i]`, once the engine's work before `after` is done. Blocks that
  /// the cache has, or has no room for, are skipped. The job's number rises within its scheduler.
  /// Errors: kPeerLost when there is no server, kBusy at max_jobs, kInvalidArgument for lists of
  /// different or no length or a block out of range; the job is then not accepted.
  Result<void> save(Id128 scheduler, std::uint64_t job, std::span<const BlockKey> keys,
                    std::span<const std::uint32_t> blocks, Device::Event after);

  /// Loads the claimed blocks `first`, `first` + 1, ... of `token` into `blocks`. What is still
  /// in flight from another node is copied piece by piece as it arrives. With `computing` the load
  /// is cut where it falls behind that, or where the other node stops answering: the blocks that
  /// are not loaded then have failed with kTimeout. Errors: as save(). `load` is the caller's name
  /// for it, unique among loads in flight.
  Result<void> load(std::uint64_t load, const Id128& token, std::size_t first,
                    std::span<const std::uint32_t> blocks,
                    const std::optional<LoadPace::Computing>& computing = std::nullopt);

  /// The load is of no more use: no further page is copied. It is still reported.
  void cancel_load(std::uint64_t load);

  struct Finished {
    enum class Kind : std::uint8_t { kSave, kLoad };
    Kind kind = Kind::kSave;
    std::uint64_t id = 0;     ///< The job's number, or the load.
    std::size_t blocks = 0;   ///< Blocks now sealed, or loaded.
    std::size_t skipped = 0;  ///< Of a save: there already, being saved, or no room.
    std::uint64_t bytes = 0;  ///< Copied.
    Duration took{};          ///< From acceptance to its end.
    Duration copying{};       ///< Of a load: what the device took for it, behind earlier ones.
    std::optional<LoadPace::Cut> cut;          ///< Of a load that computing would have overtaken.
    std::vector<std::uint32_t> failed_blocks;  ///< Of a load: their bytes are not to be used.
    std::optional<Error> error;                ///< Why not all of it.
    /// Of a load: pages that were compared with their checksums, and those of them that were not
    /// what was saved. From the first such page on the load has failed (kCorrupt), and the server
    /// forgets their blocks.
    std::size_t verified = 0;
    std::size_t corrupt = 0;
  };

  /// A load that the engine need not wait for any more.
  struct Followed {
    std::uint64_t load = 0;
    std::size_t blocks = 0;  ///< All of it.
    std::uint64_t bytes = 0;
    Duration took{};  ///< From acceptance until now.
  };

  /// Loads whose copies are all queued on the device and will have ended `within` so long: what the
  /// engine queues on `queue` from now on waits for them there, and finds their blocks whole. Each
  /// is told once here, and once more by take_finished() when it has ended. It has no error then
  /// but the device's own, which has broken the engine's context too; and its blocks may be used in
  /// the order of `queue` even if the server is lost meanwhile: whatever becomes of a server, pages
  /// under a pin stay as they are until their reader is gone.
  /// None with a device that copies at once, and for pages that are to be compared with checksums.
  std::vector<Followed> follow(Device::Queue queue, Duration within);

  /// Everything that ended since the last call. Each once.
  std::vector<Finished> take_finished();

  /// A descriptor that is readable while take_finished() has something; for tests and other loops.
  [[nodiscard]] int finished_fd() const noexcept;

  /// Ends in order: no new job, copies under way waited for, pool unmapped, goodbye said.
  /// Idempotent. Everything accepted has been reported to take_finished() when it returns.
  void close();

  [[nodiscard]] LinkStatus status() const;
  /// Waits at most `patience` until the link stands so; false if it does not. For tools and tests:
  /// an engine never waits for us.
  bool wait_for(LinkState state, Duration patience) const;
  [[nodiscard]] const PageLayout& layout() const noexcept;

 private:
  class Impl;
  explicit Mover(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
