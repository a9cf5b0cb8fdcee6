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
#include "client/kinds.h"
#include "client/link_options.h"
#include "client/load_pace.h"
#include "client/mover_types.h"
#include "transport/device.h"

namespace pegaflow {

class KindTable;

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
  using Verify = PageVerification;
  using Options = MoverOptions;
  using Finished = FinishedJob;
  using Followed = FollowedLoad;

  /// Starts the thread; it connects and registers in the background.
  /// Errors: kInvalidArgument for an invalid option, kInternal when no thread can start, the
  /// kernel's without memory for the guards of a direct group.
  static Result<std::unique_ptr<Mover>> start(const Options& options, PageLayout layout,
                                              Device& device);
  /// The same for blocks that engines of other tensor-parallel sizes share: `options.cells` layouts
  /// of equal size, one for each cell in the order of the shards. A page is the cells' pages one
  /// behind the other. A server without that feature is refused as one without kinds is.
  /// Further errors: kInvalidArgument for another number of layouts, or of different sizes.
  static Result<std::unique_ptr<Mover>> start_cells(const Options& options,
                                                    std::span<const PageLayout> cells,
                                                    Device& device);
  /// The same for a model with several kinds of blocks. A server without that feature is refused:
  /// the link's status names its version, and the cache stays off.
  /// Further errors: kInvalidArgument for no kind or more than kMaxKinds, for kinds without any
  /// member, or for pages of more than 1 GiB. The server refuses invalid rules.
  static Result<std::unique_ptr<Mover>> start(const Options& options, const MoverKinds& kinds,
                                              Device& device);

  /// Calls close().
  ~Mover();

  /// Saves blocks of one kind under `keys` after the engine's work before `after` is done. `blocks`
  /// has those of all members for the first key, then those for the next one. Skips blocks that the
  /// cache has or has no room for. Job numbers rise within a scheduler, over all kinds. If this
  /// rank has no layer of the kind, the job is reported at once, with all keys skipped. Errors:
  /// kPeerLost when there is no server, kBusy at max_jobs, kInvalidArgument for an unknown kind, no
  /// key, a number of blocks other than keys x members, a block out of range, or a number of depths
  /// other than none or one for each key; the job is then not accepted.
  ///
  /// `depths` say how far behind the start of their prompts the blocks lie, as in the wire's
  /// `reserve`; none: unknown. `may_refuse`: the server may skip blocks to keep others instead.
  /// `computed`: an event before `after` from which on the blocks have their final content, so that
  /// other engines may read them; none: `after`. The copies wait for `after`, because they would
  /// slow the engine's work until then.
  Result<void> save(Id128 scheduler, std::uint64_t job, std::size_t kind,
                    std::span<const BlockKey> keys, std::span<const std::uint32_t> blocks,
                    Device::Event after, std::span<const std::uint8_t> depths = {},
                    bool may_refuse = false, std::optional<Device::Event> computed = std::nullopt);
  /// The same for kind 0.
  Result<void> save(Id128 scheduler, std::uint64_t job, std::span<const BlockKey> keys,
                    std::span<const std::uint32_t> blocks, Device::Event after) {
    return save(scheduler, job, 0, keys, blocks, after);
  }

  /// Loads the claimed blocks `first`, `first` + 1, ... of `token` into `blocks`, for one kind of
  /// full attention. Blocks in flight from another node are copied piece by piece as they arrive.
  /// With `computing` the load is cut when it falls behind computing, or when the other node stops
  /// responding: the remaining blocks then fail with kTimeout. `load` is the caller's name for it,
  /// unique among loads in flight.
  /// Errors: as save().
  Result<void> load(std::uint64_t load, const Id128& token, std::size_t first,
                    std::span<const std::uint32_t> blocks,
                    const std::optional<LoadPace::Computing>& computing = std::nullopt);

  /// Loads blocks of several kinds: each range is a part of the range of its kind in `claimed`, the
  /// answer to the claim. Each kind has at most one range. The load is reported once, when no copy
  /// of any kind is in flight; after the first block that fails the other kinds are given up, and
  /// the report has the failed blocks of all. `computing` has no effect unless there is one range,
  /// of a prefix. What this rank has no layer of counts as loaded.
  /// Errors: as save(); kInvalidArgument too for blocks that are not claimed, and for a second
  /// range of one kind.
  Result<void> load(std::uint64_t load, const Id128& token, std::span<const LoadRange> ranges,
                    std::span<const KindRange> claimed,
                    const std::optional<LoadPace::Computing>& computing = std::nullopt);

  /// Loads blocks by their keys, those of a part of a prompt in its order, without a claim: those
  /// that are in the pool, and blocks that another engine of the direct group is saving, as soon as
  /// that has computed them. `patience`: the longest wait, from now on, for blocks that neither
  /// has; the rest has failed then, with kTimeout. What the other engine may have overwritten
  /// before it was read does not count, and is loaded once it is saved. follow() never returns such
  /// a load. `node`: the incarnation of the server of the other engine, if that may be another one:
  /// its blocks are then read over the network, or through the pools of both nodes.
  /// Errors: as save(); kRefused without a direct group, or with a server that lacks the feature;
  /// kInvalidArgument too for a negative patience.
  Result<void> load_following(std::uint64_t load, std::span<const BlockKey> keys,
                              std::span<const std::uint32_t> blocks, Duration patience,
                              const Id128& node = {});

  /// Cancels a load: no further page is copied. The load is still reported.
  void cancel_load(std::uint64_t load);

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
  /// The bytes of this rank's page of each kind; 0: it has no layer of it.
  [[nodiscard]] std::vector<std::uint64_t> page_bytes() const;

 private:
  class Impl;
  static Result<std::unique_ptr<Mover>> start(const Options& options, KindTable kinds,
                                              Device& device);
  explicit Mover(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
