#pragma once
/// \file
/// Calls of workers that read blocks out of the memory of other workers.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kj/async-io.h>
#include <kj/timer.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "capnp/cache.capnp.h"
#include "capnp/wire/codec.h"
#include "server/cache/cache_service.h"
#include "server/direct/far_reads.h"
#include "server/direct/offers.h"

namespace pegaflow::cluster {
class Peers;
}

namespace pegaflow::server {

class Fetches;

/// Answers openNext, awaitReads and awaitReader: finds blocks in the pool or in the memory of
/// another worker, and waits for them. If the call names another node, its pool and its workers
/// count, too. Thread-bound: the RPC thread.
class DirectReads final : private kj::TaskSet::ErrorHandler {
 public:
  /// The longest wait for the readers of a job that has ended.
  static constexpr std::chrono::seconds kReadPatience{2};
  /// The longest wait of an openNext, whatever its caller requests.
  static constexpr std::chrono::seconds kLongestWait{10};
  /// Limit of openNext calls of one connection that wait.
  static constexpr std::size_t kMostWaits = 1024;
  /// A call that waits looks again after this time at the latest: not every block that becomes
  /// findable, and no room for its pin, is announced.
  static constexpr std::chrono::milliseconds kRetry{250};
  /// The least time between two looks of all calls that wait, so that many of them do not cost the
  /// others' calls more than that.
  static constexpr std::chrono::milliseconds kBetweenLooks{1};

  /// The deadline of a fetch from another node's pool. The worker gets the blocks that the server
  /// has received by then.
  static constexpr std::chrono::milliseconds kFetchTime{250};

  /// All outlive it.
  DirectReads(CacheService& service, kj::Timer& timer, const Clock& clock);
  ~DirectReads() noexcept(false);
  /// This server, of that incarnation, has other nodes. Before the first call of a worker. They
  /// outlive the last call of a worker.
  void use_nodes(const Id128& server, cluster::Peers& peers, Fetches& fetches);

  [[nodiscard]] const Offers& offers() const noexcept { return offers_; }
  [[nodiscard]] DirectStats stats() const;

  /// Descriptors of a worker, which stay its caller's.
  struct Descriptors {
    int guards = -1;    ///< A sealed memfd.
    int process = -1;   ///< Its pidfd.
    int exported = -1;  ///< The socket of memory with ranges; -1: none.
  };
  /// A worker has registered its memory. Duplicates the descriptors. A repeated registration
  /// changes nothing. Errors: kInvalidArgument for guards that are not sealed memory of the stated
  /// size, and for ranges with other descriptors; those of Allocations::take(); kIo.
  Result<void> joined(const Id128& connection, std::uint32_t shard, const OfferedMemory& memory,
                      const Descriptors& descriptors);
  /// Its connection has ended, or it said goodbye.
  void left(const Id128& connection);

  /// The slots of a reserve that has succeeded: slots other than skipped ones are offered
  /// under the call's guard, if it has one. Errors: those of Offers::offer().
  Result<void> reserved(const Id128& connection, wire::Session::ReserveParams::Reader params,
                        std::span<const BlockKey> keys, std::span<const std::uint32_t> slots);
  /// The content of the job's pending blocks is final.
  void ready(const Id128& connection, const JobId& job);
  /// The caller's part of the job has ended. If it is sealed, its guard stays open until
  /// await_reads() is answered.
  void job_ended(const Id128& connection, const JobId& job);
  /// Blocks may have become findable.
  void changed();

  /// How many leading blocks of `beyond`, behind the sealed ones of a lookup, its engine could read
  /// directly from workers of this node.
  [[nodiscard]] std::size_t offered(const Id128& connection, std::span<const BlockKey> beyond);
  /// The same of another node, with those in its pool. Returns no promise if `node` is no other one
  /// that the engine can read from.
  kj::Maybe<kj::Promise<std::size_t>> offered_at(const Id128& node, const Id128& connection,
                                                 std::span<const BlockKey> beyond) const;
  /// Whether the caller's engine can read the memory of workers of that other node.
  [[nodiscard]] bool may_read_from(const Id128& node, const Id128& connection) const {
    return far_ && far_->may_read(connection, node);
  }

  using OpenNext =
      capnp::CallContext<wire::Session::OpenNextParams, wire::Session::OpenNextResults>;
  kj::Promise<Result<void>> open_next(const Id128& connection, OpenNext call);
  /// The worker has ended its reads under this pin, or does not want them any longer.
  void released(const Id128& connection, engine::PinId pin);
  kj::Promise<Result<void>> await_reads(const Id128& connection, const JobId& job);

  using AwaitReader =
      capnp::CallContext<wire::Session::AwaitReaderParams, wire::Session::AwaitReaderResults>;
  /// Errors: kInvalidArgument for a worker whose memory needs no consent, kTimeout after
  /// kLongestWait, kCancelled when a later call has come, kGone when the worker has left.
  kj::Promise<Result<void>> await_reader(const Id128& connection, AwaitReader call);

  // ---- for workers of other nodes; see PeerOffers

  /// As Offers.
  std::optional<Offers::Found> begin_read(const Id128& connection, const Offers::Reader& reader,
                                          engine::SpaceId space, std::span<const BlockKey> keys,
                                          std::uint64_t read) {
    return offers_.begin_read(connection, reader, space, keys, read);
  }
  void end_read(const Id128& connection, std::uint64_t read);
  /// Resolves when blocks may have become findable.
  kj::Promise<void> next_change();

 private:
  struct Opening;
  struct Claim;
  using OneOpening = std::shared_ptr<Opening>;
  using Pin = std::pair<Id128, std::uint64_t>;

  kj::Promise<Result<void>> try_open(const OneOpening& opening);
  Result<kj::Promise<void>> begin_wait(const OneOpening& opening);
  void end_wait(const Opening& opening);
  /// Behind the end of a call: its worker keeps its place at other memory only if another one
  /// waits.
  void leave_queues(const Opening& opening);
  /// Whether it was answered.
  Result<bool> open_in_pool(Opening& opening);
  bool open_in_memory(Opening& opening);
  /// The descriptors of a source for one reader; null: it has none. Errors: the kernel's.
  Result<std::shared_ptr<const UniqueFd>> box_of(const Offers::Source& source);
  /// The readers of the job are to keep others from their turns no longer.
  void end_turns(const Id128& connection, const JobId& job);
  /// Whether another node's answer was passed on. Otherwise that node is asked, if it is not.
  bool open_far(const OneOpening& opening);
  bool pass_on(Opening& opening, PeerPiece& piece);
  void ask_far(Opening& opening);
  /// The caller has its answer, or wants none.
  void end_far(Opening& opening);
  /// Fetches blocks from another node's pool. The worker gets those that the server has received at
  /// the deadline, kFetchTime.
  kj::Promise<Result<void>> fetch(const OneOpening& opening, kj::Promise<void>&& cancelled);
  bool open_claimed(Opening& opening, const Claim& claim);
  kj::Promise<void> await_arrival(const std::shared_ptr<const Claim>& claim);
  void taskFailed(kj::Exception&& exception) override;
  static void answer_blocks(Opening& opening, std::span<const std::uint32_t> blocks,
                            std::span<const PeerPiece::Guard> guards, SourceId source);
  /// Whether the caller has the memory of that source.
  [[nodiscard]] static bool knows(const Opening& opening, SourceId source);
  void answer_slots(Opening& opening, const CacheService::Opened& opened);
  /// Names the sources that the caller knows and that have left.
  void write_gone(Opening& opening);
  kj::Promise<Result<void>> wait_for_readers(const Id128& connection, const JobId& job,
                                             TimePoint deadline);
  kj::Promise<Result<void>> wait_for_reader(SourceId source, std::uint64_t wait, AwaitReader call,
                                            TimePoint deadline);
  /// Wakes the sources that wait for a reader if there may be one. Returns whether it did.
  bool look_for_readers();
  /// The same where a turn may have ended: its next reader may begin.
  void pass_turns();

  CacheService& service_;
  kj::Timer& timer_;
  const Clock& clock_;
  const std::shared_ptr<AllocationCloser> closer_;
  Offers offers_;
  std::map<Pin, OneOpening> waiting_;
  std::unordered_map<Id128, std::size_t> waits_of_;  ///< By connection.
  std::size_t watchers_ = 0;                         ///< Promises of next_change().
  Id128 server_{};
  Fetches* fetches_ = nullptr;     ///< Null: no other nodes.
  std::optional<FarReads> far_{};  ///< The same.
  bool is_look_due_ = false;
  TimePoint last_look_{};
  kj::Promise<void> look_ = nullptr;
  kj::Own<kj::PromiseFulfiller<void>> change_;
  kj::ForkedPromise<void> changed_;
  kj::Own<kj::PromiseFulfiller<void>> read_end_;
  kj::ForkedPromise<void> read_ended_;
  kj::Own<kj::PromiseFulfiller<void>> turn_;
  kj::ForkedPromise<void> turns_;
  bool is_box_refused_ = false;  ///< It was logged, and no box was packed since.
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
