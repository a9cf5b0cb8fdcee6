#pragma once
/// \file
/// The reader's end of one connection.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <sys/uio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "transport/batch_book.h"
#include "transport/checksum.h"
#include "transport/region.h"
#include "transport/tcp/wire.h"

namespace pegaflow::tcp {

/// The bytes of one request: a part of a chunk.
struct Piece {
  rails::Operation operation{};
  std::span<std::byte> place;  ///< Receives the bytes; at most kMaximumPieceBytes.
};

/// Requests pieces from one holder and receives each straight into its place.
///
/// Requests ahead only what the path holds: bytes that wait in the kernels' queues have left the
/// caches by the time they are copied. So the window begins at Window::least_bytes and grows up to
/// Window::bytes while the bytes received per round trip exceed it.
///
/// A response may write only to the place of the request that it names, if that is open, and only
/// with the requested size. Anything else ends the connection.
///
/// Thread-bound: to the thread of the fabric.
class Requester {
 public:
  struct Window {
    std::size_t pieces = 64;
    std::size_t bytes = std::size_t{2} << 20;  ///< At most.
    std::size_t least_bytes = std::size_t{256} << 10;
    /// Requests are sent in groups of this size: when the window is full, this much must arrive
    /// before the next requests. The holder answers a group with one system call.
    std::size_t group_bytes = std::size_t{256} << 10;
    /// The limit of background pieces: what a later foreground piece may have to wait for.
    std::size_t background_bytes = std::size_t{512} << 10;
  };

  /// Called for each piece that ended, with the reason when it failed. The connection no longer
  /// writes to the piece's place; it is the caller's again.
  using Ended = std::function<void(const Piece&, std::optional<Errc>)>;

  /// `socket` was dialed at `now`.
  Requester(UniqueFd socket, const Id128& wanted, const Window& window, TimePoint now);

  /// Whether a piece of that size may be requested now. A single piece is always allowed.
  [[nodiscard]] bool has_room(std::size_t size_bytes, bool background) const noexcept;
  /// Records the piece and queues its request; send_requests() sends it.
  void request(const Piece& piece, TimePoint now);

  /// Errors: the reason to close the connection, as receive().
  Result<void> send_requests();

  /// Receives the available bytes, about a megabyte at most; never waits.
  /// Errors: the reason to close the connection. kPeerLost: it ended or was never established;
  /// kCorrupt: an invalid message; kRefused: the holder has another protocol version; kGone: the
  /// holder is another incarnation.
  Result<void> receive(TimePoint now, const Ended& ended);

  /// Closes the socket: afterwards it writes to no place. Returns the open pieces in the order of
  /// their requests.
  std::vector<Piece> close();

  /// Whether a piece of that batch is open.
  [[nodiscard]] bool has_open(std::uint64_t batch) const noexcept;

  [[nodiscard]] bool wants_to_send() const noexcept {
    return state_ == State::kDialing || requests_sent_ < requests_.size();
  }
  /// Since when a response or the connection itself is due. No value: nothing is due.
  [[nodiscard]] std::optional<TimePoint> waiting_since() const noexcept;
  /// Whether bytes arrived that receive() has not read yet.
  [[nodiscard]] bool has_unread() const noexcept;
  /// Restarts the wait for a response: this process was the one that stalled.
  void restart_wait(TimePoint now) noexcept { progress_ = now; }
  /// When bytes last arrived; TimePoint::min(): never.
  [[nodiscard]] TimePoint last_received() const noexcept { return last_received_; }
  /// Whether a piece has ended here, with its bytes or with an error response.
  [[nodiscard]] bool has_ended_piece() const noexcept { return has_ended_piece_; }
  [[nodiscard]] bool greeted() const noexcept { return state_ == State::kOpen; }
  [[nodiscard]] std::size_t open_bytes() const noexcept { return open_bytes_; }
  /// How much it requests ahead now.
  [[nodiscard]] std::size_t window_bytes() const noexcept { return window_bytes_; }
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

 private:
  enum class State : std::uint8_t {
    /// The socket is not connected yet. The first send_requests() leads to kConnected, or finds
    /// that
    /// the dial failed.
    kDialing,
    /// Connected, and the hello is queued. The wait for the welcome begins with the first
    /// receive(),
    /// which leads to kGreeting: this process may have been stopped since it dialed.
    kConnected,
    /// The welcome is due. A good one leads to kOpen, any other ends the connection.
    kGreeting,
    /// Welcomed: sends requests and receives responses, until close().
    kOpen,
  };
  static constexpr std::uint32_t kNone = UINT32_MAX;

  struct Slot {
    bool open = false;
    std::uint64_t request_id = 0;
    Piece piece;
  };

  Result<void> dialed();
  Result<void> take_welcome();
  Result<void> take_response(const Ended& ended);
  void take_bytes(std::size_t count, const Ended& ended);
  void end_piece(std::uint32_t slot, std::optional<Errc> error, const Ended& ended);
  void measure(TimePoint now, std::size_t bytes) noexcept;
  [[nodiscard]] std::size_t message_size() const noexcept {
    return state_ == State::kOpen ? sizeof(Response) : sizeof(Welcome);
  }

  UniqueFd socket_;
  Id128 wanted_;
  Window window_;
  State state_ = State::kDialing;
  // When bytes last arrived, the first request of an idle connection was made, or the dial
  // succeeded.
  TimePoint progress_;
  TimePoint last_received_ = TimePoint::min();
  bool has_ended_piece_ = false;

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::uint64_t next_request_id_ = 1;
  std::size_t open_bytes_ = 0;
  std::size_t open_background_bytes_ = 0;

  std::size_t window_bytes_;
  bool full_ = false;  // Until a group of it has arrived.
  std::optional<TimePoint>
      requested_alone_;  // While nothing else was open and no bytes have arrived since.
  Duration round_trip_ = Duration::max();  // From such a request to the first byte: the minimum.
  TimePoint measured_since_{};             // Start of the measured bytes, which give the rate.
  std::size_t measured_bytes_ = 0;

  std::vector<std::byte> requests_;  // Not yet sent from requests_sent_ on.
  std::size_t requests_sent_ = 0;

  std::array<std::byte, sizeof(Response)> header_{};
  std::size_t header_size_ = 0;
  std::uint32_t current_ = kNone;  // The slot whose bytes are being received.
  std::size_t current_got_ = 0;
  std::uint64_t current_checksum_ = 0;
  PageChecksum checksum_;  // Of the current piece, when it arrives in several parts.
};

static_assert(sizeof(Response) >= sizeof(Welcome));

}  // namespace pegaflow::tcp
