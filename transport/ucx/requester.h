#pragma once
/// \file
/// The side of a rail that reads: its ways to peers and the GETs under way on them.

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

/// A peer as its description has it; shared by the rails, read only.
struct PeerAddress {
  FabricAddress address;
  Id128 incarnation;
  std::unordered_map<std::uint32_t, RegionKey> regions;
};

/// A region of ours as one rail knows it.
struct LocalRegion {
  std::span<std::byte> memory;
  ucp_mem_h handle = nullptr;
};
using LocalRegions = std::unordered_map<std::uint32_t, LocalRegion>;

/// Takes operations from the dealer and posts a GET for each.
///
/// A way to a peer (a *lane*) is greeted first: the peer says whether it still is the incarnation
/// that we want. Then each region is asked for: for how long may it be read? Our clock starts
/// before the question, so a lease ends here first. A GET whose bytes come after that end has
/// failed, so the region is asked for again a second before, and what comes meanwhile waits for the
/// answer. When the peer revokes a region, no further GET is posted, and it hears from us when the
/// last one is through.
///
/// An operation is over with its callback and not before: closing an endpoint only makes the
/// callbacks come. A lane keeps less under way than a card's queue holds, so they come at once.
///
/// A lane that nobody needs any more is closed when its greeting is answered and its GETs are
/// through, or the peer has become silent: a peer's UCX over TCP may end its process when a way
/// goes in the middle of either (1.13 by an assertion in its handshake, 1.22 by a bad free of the
/// answer to a GET).
///
/// Thread-bound: to the rail's thread.
class Requester {
 public:
  struct Options {
    std::size_t rail = 0;          ///< Which one it is of the fabric.
    std::string device;            ///< Its name, to be paired by.
    std::size_t operations = 192;  ///< Under way to a peer; less than a card's queue.
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
  /// Takes what the dealer has and posts it. False: it had nothing that there is room for.
  bool fill();
  /// Tells the dealer what has ended since the last call. True: there is something for other rails.
  bool report_outcomes();
  /// Looks after lanes that broke, were closed, or say nothing. Whether progress found anything
  /// before decides who was slow, the peer or we.
  void check_paths(bool progressed);
  [[nodiscard]] TimePoint next_time() const noexcept { return next_check_; }
  /// Whether GETs are under way.
  [[nodiscard]] bool is_busy() const noexcept { return posted_count_ > 0; }
  /// Whether fill() may find something to do that it did not before.
  [[nodiscard]] bool has_more_room() const noexcept { return more_room_; }

  void close_all();
  [[nodiscard]] bool all_closed();
  /// The worker is gone, and with it whatever was under way.
  void worker_is_gone();

 private:
  struct Region {
    ucp_rkey_h key = nullptr;
    TimePoint lease_end = TimePoint::min();  ///< What comes later is thrown away.
    TimePoint renew_at = TimePoint::min();   ///< GETs are posted until then without a question.
    std::optional<TimePoint> requested_at;   ///< Since when an answer is due.
    std::size_t open = 0;                    ///< GETs under way.
    std::optional<std::int64_t> revocation;  ///< To be confirmed when none is.
    std::deque<Operation> parked;            ///< They wait for the lease.
  };
  struct Path {
    enum class State : std::uint8_t { kGreeting, kOpen, kDraining, kClosing };
    Fabric::PeerId peer{};
    std::shared_ptr<const PeerAddress> where;
    std::size_t remote_rail = 0;
    std::uint64_t number = 0;         ///< As the peer names it to us ...
    std::uint64_t remote_number = 0;  ///< ... and we to the peer.
    State state = State::kGreeting;
    std::unique_ptr<Endpoint> endpoint;
    TimePoint progress;  ///< When something last came, or was asked for while nothing was due.
    std::size_t posted = 0;
    std::size_t taken = 0;  ///< Operations that are posted or parked.
    std::uint64_t taken_bytes = 0;
    std::size_t background = 0;
    std::uint64_t background_bytes = 0;
    std::unordered_map<std::uint32_t, Region> regions;
  };
  struct Peer {
    std::shared_ptr<const PeerAddress> where;
    std::unique_ptr<Path> path;  ///< None: it broke.
    std::size_t remote_rail = 0;
    unsigned breaks = 0;
    std::optional<TimePoint> redial_at;
  };
  /// A GET under way. From a pool, since UCX keeps its address.
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
  std::unordered_map<std::uint64_t, Path*> paths_;  // Those not closing, by their number.
  std::vector<std::unique_ptr<Path>> draining_;     // Nobody's, but at something still.
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
