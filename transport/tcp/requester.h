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
#include "transport/checksum.h"
#include "transport/region.h"
#include "transport/tcp/wire.h"

namespace pegaflow::tcp {

/// A part of a chunk: what one question asks for.
struct Piece {
  std::uint64_t batch = 0;  ///< The reader's number for it.
  std::uint32_t chunk = 0;  ///< Of the batch.
  bool background = false;
  RegionId remote_region{};
  std::uint64_t remote_offset = 0;
  std::span<std::byte> place;  ///< Where its bytes go; at most kMaximumPieceBytes.
};

/// Asks one holder for pieces and receives each straight into its place.
///
/// It asks ahead for what the way holds and not for more: bytes that lie in the kernels' queues
/// have left the caches by the time that they are copied on. So it begins with Window::least_bytes,
/// and goes up to Window::bytes when what comes in the time of a question and its answer is more.
///
/// What an answer may touch is the place of the question that it names, if that is open, of the
/// size that was asked. Everything else ends the connection.
///
/// Thread-bound: to the thread of the fabric.
class Requester {
 public:
  struct Window {
    std::size_t pieces = 64;
    std::size_t bytes = std::size_t{2} << 20;  ///< At most.
    std::size_t least_bytes = std::size_t{256} << 10;
    /// Questions go out for so much at once: where all that was asked for is open, this much of it
    /// has to come first. The holder answers them with one system call.
    std::size_t group_bytes = std::size_t{256} << 10;
    /// What pieces of the background may take: what a piece of the foreground that comes later has
    /// to wait for.
    std::size_t background_bytes = std::size_t{512} << 10;
  };

  /// Called for each piece that ended, with the reason when it did not come. The socket is no
  /// longer written from; the piece's place is the caller's again.
  using Ended = std::function<void(const Piece&, std::optional<Errc>)>;

  /// `socket` was dialed at `now`.
  Requester(UniqueFd socket, const Id128& wanted, const Window& window, TimePoint now);

  /// Whether a piece of that size may be asked for now. One is always let in.
  [[nodiscard]] bool has_room(std::size_t size_bytes, bool background) const noexcept;
  /// Remembers the piece and puts its question into the queue; send_requests() sends it.
  void request(const Piece& piece, TimePoint now);

  /// Errors: why the connection has to be closed, as receive().
  Result<void> send_requests();

  /// What is there, about a megabyte at most; never waits.
  /// Errors: why the connection has to be closed. kPeerLost: it ended or never began; kCorrupt: it
  /// makes no sense; kRefused: the holder speaks another version; kGone: it is another incarnation.
  Result<void> receive(TimePoint now, const Ended& ended);

  /// Closes the socket: nothing is written to any place any more. Returns the pieces that were
  /// open, in the order of asking.
  std::vector<Piece> close();

  /// Whether a piece of that batch is open.
  [[nodiscard]] bool has_open(std::uint64_t batch) const noexcept;

  [[nodiscard]] bool wants_to_send() const noexcept {
    return state_ == State::kDialing || requests_sent_ < requests_.size();
  }
  /// Since when something is due: an answer, or the connection itself. No value: nothing is.
  [[nodiscard]] std::optional<TimePoint> waiting_since() const noexcept;
  /// Whether something came that receive() was not called for yet.
  [[nodiscard]] bool has_unread() const noexcept;
  /// Counts from now on what is due: it was we who did not look.
  void restart_wait(TimePoint now) noexcept { progress_ = now; }
  /// When something last came; TimePoint::min(): nothing did.
  [[nodiscard]] TimePoint last_received() const noexcept { return last_received_; }
  /// Whether a piece has ended here, with its bytes or with an answer that there are none.
  [[nodiscard]] bool has_ended_piece() const noexcept { return has_ended_piece_; }
  [[nodiscard]] bool greeted() const noexcept { return state_ == State::kOpen; }
  [[nodiscard]] std::size_t open_bytes() const noexcept { return open_bytes_; }
  /// What it asks ahead for now.
  [[nodiscard]] std::size_t window_bytes() const noexcept { return window_bytes_; }
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

 private:
  enum class State : std::uint8_t { kDialing, kGreeting, kOpen };
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
  // When something last came, or was asked for while nothing was open, or the dial succeeded.
  TimePoint progress_;
  TimePoint last_received_ = TimePoint::min();
  bool just_dialed_ = false;
  bool has_ended_piece_ = false;

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::uint64_t next_request_id_ = 1;
  std::size_t open_bytes_ = 0;
  std::size_t open_background_bytes_ = 0;

  std::size_t window_bytes_;
  bool full_ = false;                         // Until a group of it is there.
  std::optional<TimePoint> requested_alone_;  // When nothing else was open, and nothing came since.
  Duration round_trip_ = Duration::max();     // From such a question to the first byte: the least.
  TimePoint measured_since_{};                // What came since then: how fast it comes.
  std::size_t measured_bytes_ = 0;

  std::vector<std::byte> requests_;  // Not yet sent, from questions_sent_ on.
  std::size_t requests_sent_ = 0;

  std::array<std::byte, sizeof(Response)> header_{};
  std::size_t header_size_ = 0;
  std::uint32_t current_ = kNone;  // The slot whose bytes come now.
  std::size_t current_got_ = 0;
  std::uint64_t current_checksum_ = 0;
  PageChecksum checksum_;  // Of the current one, when it comes in several parts.
};

static_assert(sizeof(Response) >= sizeof(Welcome));

}  // namespace pegaflow::tcp
