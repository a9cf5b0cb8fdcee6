#pragma once
/// \file
/// The reading side of a rail: its paths to peers and the GETs in flight on them.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "transport/dealer.h"
#include "transport/fabric.h"
#include "transport/ucx/wire.h"
#include "transport/ucx/worker.h"

namespace pegaflow::ucx {

using rails::Dealer;
using rails::Operation;
using rails::Outcome;

/// A peer as its description lists it; shared by the rails, read-only.
struct PeerAddress {
  FabricAddress address;
  Id128 incarnation;
  std::unordered_map<std::uint32_t, RegionKey> regions;
};

/// A local region as registered with one rail.
struct LocalRegion {
  Memory memory;
  ucp_mem_h handle = nullptr;
};
using LocalRegions = std::unordered_map<std::uint32_t, LocalRegion>;

/// Takes operations from the dealer and posts a GET for each.
///
/// A path to a peer begins with a greeting, in which the peer confirms that it still is the
/// expected incarnation. Then the rail requests a lease for each region, which limits how long it
/// may be read. The reader's clock starts before the request, so a lease ends earlier here than at
/// the owner. A GET whose bytes arrive after the end has failed, so the lease is renewed one second
/// before; operations that are due meanwhile wait for the new one. When the peer revokes a lease,
/// no further GET is posted, and the reader confirms when the last one has ended.
///
/// An operation ends with its callback and not before: closing an endpoint only makes the callbacks
/// come. A path keeps fewer operations in flight than a card's queue holds, so they come at once.
///
/// A path without a peer is drained: it is closed when its greeting is answered and its
/// GETs have ended, or when the peer is silent. Closing it earlier could end the peer's process
/// with UCX over TCP (1.13 by an assertion in its handshake, 1.22 by a bad free of the response to
/// a GET).
///
/// Thread-bound: to the rail's thread.
class Requester {
 public:
  struct Options {
    std::size_t rail = 0;          ///< The rail's number in the fabric.
    std::string device;            ///< Paths prefer a remote rail of this name.
    std::size_t operations = 192;  ///< In flight per peer; less than a card's queue holds.
    std::uint64_t bytes = std::uint64_t{16} << 20;
    std::uint64_t piece_bytes = std::uint64_t{1} << 20;
    Duration connect_timeout{};
    Duration stall_timeout{};
  };

  /// All references outlive it.
  Requester(const Options& options, Worker& worker, const LocalRegions& regions, Dealer& dealer,
            const Clock& clock);
  ~Requester();
  Requester(const Requester&) = delete;
  Requester& operator=(const Requester&) = delete;

  void connect(Fabric::PeerId id, std::shared_ptr<const PeerAddress> where);
  void disconnect(Fabric::PeerId id);
  void on_message(const Message& message);
  /// Posts operations from the dealer. Returns false when the dealer had none that fit.
  bool fill();
  /// Reports ended operations to the dealer. Returns true when other rails have work to retry.
  bool report_outcomes();
  /// Closes paths that broke, are drained, or whose peer is silent. `progressed`: whether the last
  /// poll of UCX found anything; then a late response may be this process's fault.
  void check_paths(bool progressed);
  [[nodiscard]] TimePoint next_time() const noexcept { return next_check_; }
  /// Whether GETs are in flight.
  [[nodiscard]] bool is_busy() const noexcept { return posted_count_ > 0; }
  /// Whether there is more room since the last fill().
  [[nodiscard]] bool has_more_room() const noexcept { return more_room_; }

  void close_all();
  [[nodiscard]] bool all_closed();
  /// Ends all operations in flight: the worker was destroyed.
  void worker_is_gone();

 private:
  struct Region {
    ucp_rkey_h key = nullptr;
    TimePoint lease_end = TimePoint::min();  ///< Bytes that arrive later are discarded.
    TimePoint renew_at = TimePoint::min();   ///< Until then GETs need no new lease.
    std::optional<TimePoint> requested_at;   ///< When the pending lease was requested.
    std::size_t open = 0;                    ///< GETs in flight.
    std::optional<std::int64_t> revocation;  ///< To be confirmed when none is in flight.
    std::deque<Operation> parked;            ///< Operations that wait for the lease.
  };
  struct Path {
    enum class State : std::uint8_t {
      /// The hello was sent; no operation is taken yet. A good welcome leads to kOpen, disconnect()
      /// to kLeaving; any other welcome, an error or silence breaks the path (kClosing).
      kGreeting,
      /// Welcomed: takes operations. disconnect() leads to kDraining, an error or silence to
      /// kClosing.
      kOpen,
      /// Its peer was disconnected during the greeting. The welcome, whatever it contains, leads to
      /// kDraining, an error or silence to kClosing.
      kLeaving,
      /// Its peer was disconnected, and the greeting is answered. The end of its last GET leads to
      /// kClosing, as do an error and silence.
      kDraining,
      /// Its endpoint is being closed: the path ends with the last callback.
      kClosing,
    };
    Fabric::PeerId peer{};
    std::shared_ptr<const PeerAddress> where;
    std::size_t remote_rail = 0;
    std::uint64_t number = 0;         ///< The peer's messages carry it ...
    std::uint64_t remote_number = 0;  ///< ... and ours carry this one.
    State state = State::kGreeting;
    std::unique_ptr<Endpoint> endpoint;
    TimePoint
        progress;  ///< When bytes last arrived, or the first request of an idle path was made.
    std::size_t posted = 0;
    std::size_t taken = 0;  ///< Operations that are posted or parked.
    std::uint64_t taken_bytes = 0;
    std::size_t background = 0;
    std::uint64_t background_bytes = 0;
    std::unordered_map<std::uint32_t, Region> regions;
  };
  struct Peer {
    enum class State : std::uint8_t {
      /// There is no path. dial() leads to kDialed; a peer that the dealer has lost stays here.
      kClosed,
      /// There is a path, and Path::State is how far it has come. When it breaks, the peer is
      /// kPaused, or kClosed when the dealer has lost it.
      kDialed,
      /// The path broke. At `redial_at` another is dialed (kDialed).
      kPaused,
    };
    State state = State::kClosed;
    std::shared_ptr<const PeerAddress> where;
    std::unique_ptr<Path> path;  ///< In kDialed only.
    TimePoint redial_at;         ///< In kPaused only.
    std::size_t remote_rail = 0;
    unsigned breaks = 0;
  };
  /// A GET in flight. Allocated from a pool, since UCX keeps its address.
  struct Posted {
    Requester* requester = nullptr;
    Path* path = nullptr;
    TimePoint lease_end;
    Operation operation;
  };

  static void on_done(void* request, ucs_status_t status, void* posted);
  void dial(Fabric::PeerId id, Peer& peer);
  void break_path(Fabric::PeerId id, Peer& peer, const Error& error, bool for_good);
  void drain_path(std::unique_ptr<Path> path);
  void close_path(std::unique_ptr<Path> path);
  void close_drained(bool progressed, TimePoint now);
  void give_back(Path& path, const Operation& operation, Outcome outcome);
  [[nodiscard]] Dealer::Room room(Fabric::PeerId id) const;
  void take(Path& path, const Operation& operation, TimePoint now);
  void post(Path& path, Region& region, const Operation& operation, TimePoint now);
  void finish(Posted* posted, ucs_status_t status);
  void confirm(Path& path, std::uint32_t number, Region& region);
  void on_welcome(Path& path, const Message& message);
  void on_lease(Path& path, const Message& message);
  [[nodiscard]] std::optional<Error> check(const Path& path, bool progressed, TimePoint now);
  [[nodiscard]] bool is_done(Path& path);
  void check_by(TimePoint time) noexcept { next_check_ = std::min(next_check_, time); }

  const Options options_;
  Worker& worker_;
  const LocalRegions& regions_;
  Dealer& dealer_;
  const Clock& clock_;
  std::unordered_map<std::uint32_t, Peer> peers_;
  std::unordered_map<std::uint64_t, Path*> paths_;  // Not closing, by their number.
  std::vector<std::unique_ptr<Path>> draining_;     // Without a peer, but still in use.
  std::vector<std::unique_ptr<Path>> closing_;
  std::deque<Posted> pool_;
  std::vector<Posted*> free_;
  std::vector<Outcome> outcomes_;
  std::uint64_t last_number_;
  std::size_t posted_count_ = 0;
  bool more_room_ = false;
  TimePoint next_check_ = TimePoint::max();
};

}  // namespace pegaflow::ucx
