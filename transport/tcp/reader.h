#pragma once
/// \file
/// The reading side of the lane: peers, their connections, and batches in flight.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "transport/batch_book.h"
#include "transport/fabric.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/requester.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::tcp {

/// Has the operations of a BatchBook fetched by the peer's connections, each as one piece: a
/// connection takes the next one when its window has room, so that a slow connection takes less.
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
  static constexpr unsigned kMostBreaks = 4;

  /// One connection to a peer.
  struct Link {
    enum class State : std::uint8_t {
      /// There is no connection. dial() leads to kDialed or kPaused; a lost peer's links stay here.
      kClosed,
      /// `requester` is the connection, and Requester knows how far it has come. When it breaks, it
      /// is dialed again: at once if it had been welcomed, else after a pause (kPaused) while
      /// another connection of the peer is up. Otherwise the peer is lost (kClosed). A batch that
      /// is withdrawn closes it and has it dialed again.
      kDialed,
      /// The last dial led to no welcome. At `redial_at` the link is dialed again.
      kPaused,
    };
    State state = State::kClosed;
    std::optional<Requester> requester;  ///< In kDialed only.
    Poller::Key key = 0;
    std::uint32_t events = 0;
    TimePoint redial_at;  ///< In kPaused only.
    unsigned breaks = 0;  ///< Since a piece last completed here.

    [[nodiscard]] bool is_up() const noexcept {
      return state == State::kDialed && requester->greeted();
    }
  };
  struct Peer : rails::BatchBook::Peer {
    SocketAddress address;
    Id128 incarnation;
    std::vector<Link> links;
  };

  void dial(Peer& peer, Link& link);
  void link_broke(Peer& peer, Link& link, Error error);
  /// Returns whether the link was dialed or closed; the caller then hands out its pieces.
  bool check_link(Peer& peer, Link& link, TimePoint now);
  void fill(Peer& peer);
  static Link* link_for(Peer& peer, const rails::Operation& operation);
  void flush(Peer& peer);
  void watch(Peer& peer, Link& link);
  void on_ended(const Piece& piece, std::optional<Errc> error);
  void withdraw(rails::BatchBook::Entry& entry, Errc reason, const std::string& detail);
  void close_link(Link& link);
  void lose(Peer& peer, Error error);
  void check_links_by(TimePoint time) noexcept { next_check_ = std::min(next_check_, time); }

  Options options_;
  Poller& poller_;
  const RegionTable& regions_;
  const Clock& clock_;
  Requester::Ended ended_;
  std::unordered_map<std::uint32_t, Peer> peers_;
  std::unordered_map<Poller::Key, std::pair<Peer*, Link*>> links_;
  rails::BatchBook book_;
  TimePoint next_check_ = TimePoint::max();
};

}  // namespace pegaflow::tcp
