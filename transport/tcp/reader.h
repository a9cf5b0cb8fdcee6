#pragma once
/// \file
/// The reading side of the lane: peers, their connections, and batches in flight.

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/fabric.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/requester.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::tcp {

/// Splits batches into pieces and has them fetched by the peer's connections: each takes the next
/// piece when its window has room, so that a slow connection takes less.
///
/// A batch that is cancelled or late closes the connections with open pieces of it, which makes its
/// places safe. Other open pieces of these connections are requested again on new ones.
///
/// A holder may close a connection for its own reasons, for example when a region ends while its
/// bytes are being sent. So a connection that breaks, or that is silent for `stall_timeout` while
/// others of the peer are not, is dialed again; the new one reports by piece which regions are
/// gone. The peer is lost when a dial fails and no other connection is up, when all are silent, or
/// when one connection breaks kMostBreaks times in a row without a completed piece.
///
/// Thread-bound: to the fabric's thread. Calls `sink` once per batch.
class Reader {
 public:
  struct Options {
    std::size_t connections = 4;  ///< Per peer.
    std::size_t piece_bytes = 0;  ///< The largest request.
    Requester::Window window;     ///< Per connection.
    Duration connect_timeout{};   ///< Until the connection is up and welcomed.
    Duration stall_timeout{};
    Duration user_timeout{};
  };
  struct PeerAddress {
    SocketAddress address;
    Id128 incarnation;
    std::vector<RegionDescriptor> regions;
  };

  /// All references outlive it.
  Reader(const Options& options, Poller& poller, const RegionTable& regions, const Clock& clock,
         Fabric::CompletionSink sink);

  void connect(Fabric::PeerId id, PeerAddress address);
  /// Returns false when there is no such peer.
  bool disconnect(Fabric::PeerId id);
  void read(Fabric::Batch batch);
  void cancel(std::uint64_t ticket);
  /// Cancels every batch with a place in that region.
  void forget_region(RegionId region);
  /// Cancels all batches (kCancelled) and closes all connections.
  void finish();

  /// Returns false when the key is not the reader's.
  bool on_event(Poller::Key key, std::uint32_t events);
  /// Handles deadlines and silent connections.
  void on_time(TimePoint now);
  /// When on_time() has work to do; TimePoint::max(): not before the next event.
  [[nodiscard]] TimePoint next_time() const noexcept;

 private:
  static constexpr std::size_t kPriorities = 2;
  static constexpr unsigned kMostBreaks = 4;

  /// One connection to a peer: in use while it has a requester, else waiting for `redial_at`, or
  /// closed for good when its peer is lost.
  struct Link {
    std::optional<Requester> requester;
    Poller::Key key = 0;
    std::uint32_t events = 0;
    unsigned breaks = 0;                 ///< Since a piece last completed here.
    std::optional<TimePoint> redial_at;  ///< When to dial again, while there is no connection.
  };
  struct Peer {
    PeerAddress where;
    std::vector<Link> links;
    /// Batches with pieces that are not yet requested, by priority.
    std::array<std::deque<std::uint64_t>, kPriorities> waiting;
    std::optional<Error> lost;
  };
  struct Work {
    Fabric::Batch batch;
    std::uint64_t number = 0;
    Fabric::Completion completion;
    std::vector<std::uint32_t> pieces_left;  ///< By chunk.
    std::size_t next_chunk = 0;              ///< The next bytes to request:
    std::uint64_t next_offset = 0;           ///< chunk and offset.
    std::deque<Piece> retries;               ///< Requested first: their connection was closed.
    std::size_t open = 0;                    ///< Pieces requested and not ended.
    bool is_waiting = false;                 ///< Its number is in Peer::waiting.
  };
  using Works = std::unordered_map<std::uint64_t, Work>;

  void validate(Work& work, const Peer* peer) const;
  void dial(Fabric::PeerId id, Peer& peer, Link& link);
  void link_broke(Fabric::PeerId id, Peer& peer, Link& link, Error error);
  /// Returns whether the link was dialed or closed; the caller then hands out its pieces.
  bool check_link(Fabric::PeerId id, Peer& peer, Link& link, TimePoint now);
  void fill(Fabric::PeerId id, Peer& peer);
  bool next_piece(Work& work, Piece& piece) const;
  Link* link_for(Peer& peer, std::size_t size_bytes, bool background) const;
  void flush(Fabric::PeerId id, Peer& peer);
  void watch(Fabric::PeerId id, Peer& peer, Link& link);
  void on_ended(const Piece& piece, std::optional<Errc> error);
  void withdraw(std::uint64_t number, Errc reason, const std::string& detail);
  void close_link(Link& link);
  void enqueue(Peer& peer, Work& work, bool first);
  void lose(Fabric::PeerId id, Peer& peer, Error error);
  void complete(Works::iterator work);
  void fail_rest(Work& work, Errc reason, const std::string& detail);
  void check_links_by(TimePoint time) noexcept { next_check_ = std::min(next_check_, time); }

  Options options_;
  Poller& poller_;
  const RegionTable& regions_;
  const Clock& clock_;
  Fabric::CompletionSink sink_;
  Requester::Ended ended_;
  std::unordered_map<std::uint32_t, Peer> peers_;
  std::unordered_map<Poller::Key, std::pair<Fabric::PeerId, std::size_t>> links_;
  Works works_;
  std::uint64_t last_number_ = 0;
  std::set<std::pair<TimePoint, std::uint64_t>> deadlines_;
  std::vector<std::uint64_t> finished_;  // Batches whose last piece has ended.
  TimePoint next_check_ = TimePoint::max();
};

}  // namespace pegaflow::tcp
