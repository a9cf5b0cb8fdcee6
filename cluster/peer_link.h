#pragma once
/// \file
/// The link to one other node: dials, greets and reconnects.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "capnp/wire/peer_direct.h"
#include "cluster/lanes.h"
#include "cluster/lender.h"
#include "cluster/open_questions.h"
#include "cluster/peer_proof.h"
#include "cluster/peer_stats.h"
#include "transport/fabric.h"

namespace pegaflow::cluster {

/// The description of this node for every node that it dials, or that dials it.
struct OwnNode {
  Id128 node;            ///< Its incarnation, the same as clients receive.
  std::string build;     ///< Program and version, for logs.
  PeerSecrets secrets;   ///< Replaced when the file changes.
  std::string listen{};  ///< HOST:PORT of --peer-listen; empty: none.
};

/// Keeps one configured address connected and sends requests to it.
///
/// A link is *ready* from the moment that both sides have authenticated and the fabric has the
/// description of the peer's present life, until the control connection or the lane is lost. Then
/// the address is dialed again, after a pause that doubles while it fails. Requests of one life are
/// never carried to the next: see life().
///
/// A peer that misses a deadline receives no further requests until it answers, so that a peer that
/// hangs costs one round of requests. It is lost after three deadlines of silence, at least
/// `least_silence`: longer than a retransmission of TCP or a moment without a processor. Its lanes
/// stay open then. They detect a lost peer by themselves, and stay in use in the next life if the
/// same process answers the next greeting; leases are released in the next life as well.
///
/// Blocks are read over a lane that both ends have open. Where they have sockets and RDMA, the link
/// is ready with sockets, tries RDMA meanwhile, and uses it for all later leases once it works.
/// When RDMA breaks, the link falls back to sockets, and tries again after a pause that doubles.
/// Where RDMA is the only lane, as with --require-rdma, a link is ready once RDMA works.
///
/// A node that dials its own address detects it and sends no requests, so every node can use the
/// same list of addresses. It still dials the address again, since the name may later belong to
/// another node. Thread-bound: the RPC thread.
class PeerLink final : public Lender {
 public:
  struct Options {
    std::string address;  ///< HOST:PORT of its --peer-listen.
    Duration greet_deadline = std::chrono::seconds(1);
    Duration call_deadline = std::chrono::milliseconds(15);
    Duration first_pause = std::chrono::milliseconds(100);
    Duration longest_pause = std::chrono::seconds(5);
    Duration trial_deadline = std::chrono::seconds(6);     ///< To connect a lane and read a page.
    Duration first_trial_pause = std::chrono::seconds(1);  ///< After a lane broke.
    Duration longest_trial_pause = std::chrono::minutes(1);
    Duration least_silence = std::chrono::milliseconds(500);
    std::uint16_t maximum_version = kPeerWireMaximum;  ///< Lower in tests of older nodes.
    bool is_parked = false;                            ///< Nothing is dialed before dial().
  };
  using State = PeerState;
  using Stats = PeerStats;

  /// All outlive it. `changed` is called when the state has.
  PeerLink(kj::AsyncIoContext& io, const OwnNode& own, Epochs& epochs, Options options,
           Lanes& lanes, std::function<void()> changed);
  ~PeerLink() noexcept(false) override;
  PeerLink(const PeerLink&) = delete;
  PeerLink& operator=(const PeerLink&) = delete;

  /// Dials for as long as the link lives. Call it once.
  kj::Promise<void> run();

  /// Dials that address from now on. Only while it is resting: nothing of a former address is left
  /// then but its leases, which have ended with their life.
  void dial(std::string address);
  /// Ends the connection and dials no longer; it is resting soon.
  void park();
  /// Parked, with no attempt in progress.
  [[nodiscard]] bool is_resting() const noexcept { return options_.is_parked && is_pausing_; }

  [[nodiscard]] bool is_ready() const noexcept override { return stats_.state == State::kReady; }
  /// The number of the present greeting: another number is another life of the peer or of the
  /// connection to it.
  [[nodiscard]] std::uint64_t life() const noexcept override { return stats_.greetings; }
  [[nodiscard]] const std::string& address() const noexcept override { return options_.address; }
  [[nodiscard]] bool is_this_node() const noexcept override { return stats_.state == State::kSelf; }
  [[nodiscard]] Id128 node() const noexcept override { return stats_.node; }
  /// Whether the first attempt to connect is over, successful or not.
  [[nodiscard]] bool was_tried() const noexcept {
    return is_ready() || is_this_node() || stats_.greetings + stats_.failures != 0;
  }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] const Route& route() const override { return route_; }
  [[nodiscard]] const FabricDescriptor* fabric() const override;

  /// The longest prefix of `keys` that the peer has. Errors: kPeerLost when it is not
  /// ready or is lost, kTimeout, kBusy while its answers are overdue, and kInternal for an invalid
  /// answer, which also ends the connection.
  kj::Promise<Result<Prefix>> locate(const Bytes32& space, std::span<const BlockKey> keys) override;
  /// Also kRefused when the peer does not have the feature.
  kj::Promise<Result<Present>> locate_each(const Bytes32& space,
                                           std::span<const BlockKey> keys) override;
  kj::Promise<Result<LeaseGrant>> lease(const Bytes32& space, std::span<const BlockKey> keys,
                                        std::size_t shards,
                                        std::chrono::milliseconds time) override;
  kj::Promise<Result<LeaseGrant>> lease_pending(const Staging& staging,
                                                std::chrono::milliseconds time,
                                                std::chrono::milliseconds patience) override;
  void end_staging(std::uint64_t number) override;
  [[nodiscard]] bool can_release(std::uint64_t life) const noexcept override {
    return life != 0 && life >= node_since_;
  }
  kj::Promise<Result<bool>> confirm(std::uint64_t lease, Duration patience) override;
  kj::Promise<Result<Epoch>> reset(const Bytes32& space, const Epoch& epoch,
                                   Duration patience) override;
  /// While the link is not ready, the release is kept for the next greeting of the same process.
  void release(std::uint64_t lease) override;
  void lost(std::uint64_t life, const std::string& why) override;
  void route_lost(std::uint64_t life, const Route& route, const std::string& why) override;

  /// Waits until that job of an engine of the peer, and its scheduler's jobs before it, are over.
  /// The request gives the peer until one call's deadline before the end of `patience`, but at
  /// least three quarters of it; a peer that takes a call's deadline longer is late. Errors: as
  /// locate(), and those of JobWaits::wait(); kRefused when the peer is too old; kBusy while
  /// kMaxWaits of this node wait there. The answer of a peer also contains how far those jobs are,
  /// unless the peer is too old. `begun`: waits only until they have begun, for which fewer peers
  /// are new enough.
  kj::Promise<JobsReached> await_job(const JobId& job, Duration patience, bool begun = false);
  /// Half of the limit of open calls on a connection: lookups and claims need some, too.
  static constexpr std::size_t kMaxWaits = 512;
  /// Limit of calls of open_next() that wait.
  static constexpr std::size_t kMaxOpens = 256;

  // ---- blocks in the memory of the peer's workers

  /// Whether the peer is ready and new enough for the calls below.
  [[nodiscard]] bool has_readable_workers() const noexcept;
  /// The prefix of `keys` in the peer's pool, and what each of the readers could read after it.
  /// Errors: as locate_each().
  kj::Promise<Result<PeerOffer>> offered(const Bytes32& space, std::span<const BlockKey> keys,
                                         std::span<const PeerReader> readers);
  /// Begins a read of the leading `keys`, or waits for them; see openNext in
  /// peer.capnp. The caller calls end_read() in any case, also after an error or if it drops the
  /// promise. Errors: as locate_each(), those of read_piece(), and kBusy while kMaxOpens wait.
  kj::Promise<Result<PeerPiece>> open_next(const Bytes32& space, std::span<const BlockKey> keys,
                                           const PeerQuestion& question);
  /// Unknown names are fine. The peer ends the reads of a connection that ended.
  void end_read(std::uint64_t read);

 private:
  struct Connection;
  /// The routes of a lost link that batches may still use.
  struct Kept {
    Id128 node;
    Route route;
    std::optional<Route> last_resort;
  };

  kj::Promise<void> pause(Duration time);
  kj::Promise<Result<void>> attempt();
  kj::Promise<Result<void>> greet();
  kj::Promise<Result<void>> enter(const PeerSecret::Greeting& greeting, const PeerSecret& secret);
  kj::Promise<Result<void>> exchange_epochs();
  kj::Promise<void> watch_epochs();
  void send_epochs();
  void learn(const KnownEpochs& known);
  [[nodiscard]] bool knows_epochs() const { return stats_.version >= kPeerWireKnowsEpochs; }
  kj::Promise<Result<void>> find_route();
  Result<Route> connect(std::size_t lane);
  void disconnect(const Route& route);
  void forget_kept();
  void use(const Route& route);
  kj::Promise<Result<void>> try_lane(std::size_t lane);
  kj::Promise<void> improve(Duration pause);
  Duration next_trial_pause();
  kj::Promise<Result<void>> serve();
  kj::Promise<void> finish(const Result<void>& outcome);
  void say(State state, std::string why);
  Error failed(const kj::Exception& exception);
  /// The pages that an answer grants, if it is in time and of the epoch that was asked for.
  Result<LeaseGrant> granted(const Bytes32& space, const Epoch& epoch,
                             wire::Peer::LeaseResults::Reader answer, std::size_t asked,
                             std::size_t shards, bool in_time);
  Result<bool> is_of_epoch(const Bytes32& space, const Epoch& asked, wire::Epoch::Reader answer);
  /// The part of `patience` beyond the deadline that each call has.
  [[nodiscard]] Duration work_of(Duration patience) const {
    return std::max(patience - options_.call_deadline, Duration::zero());
  }
  void release_later(std::uint64_t lease);
  Result<void> check_askable();
  Result<void> check_waits();
  [[nodiscard]] Result<void> check_workers() const;
  Result<void> check_reads();
  void missed(OpenQuestions::Number question);
  kj::Promise<void> watch_silence();
  void drop(const std::string& why);
  template <typename T, typename Answer, typename Decode>
  kj::Promise<Result<T>> answered(kj::Promise<Answer>&& answer, Duration work, Decode decode);

  kj::AsyncIoContext& io_;
  const OwnNode& own_;
  Epochs& epochs_;
  Options options_;
  const SteadyClock clock_{};
  Lanes& lanes_;
  std::function<void()> changed_;
  std::unique_ptr<Connection> connection_;
  Duration pause_;
  kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>> wake_;  ///< Ends a pause.
  bool is_pausing_ = false;
  bool found_self_ = false;  ///< The present attempt reached this node.
  Route route_;
  std::optional<Kept> kept_;
  Id128 ready_node_{};            ///< The process that answered the latest greeting...
  std::uint64_t node_since_ = 0;  ///< ...and the first life that is its.
  std::vector<std::uint64_t>
      unreleased_;  ///< Its leases that ended here, with no confirmed release.
  Duration trial_pause_{};
  Stats stats_;
};

}  // namespace pegaflow::cluster
