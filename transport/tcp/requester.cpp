#include "transport/tcp/requester.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>

#include "base/assert.h"
#include "transport/tcp/limits.h"

namespace pegaflow::tcp {
namespace {

template <typename Message>
void append(std::vector<std::byte>& bytes, const Message& message) {
  const auto* const begin = reinterpret_cast<const std::byte*>(&message);
  bytes.insert(bytes.end(), begin, begin + sizeof message);
}

/// The longest pause within a measurement: after a longer one, the elapsed time says nothing about
/// the rate.
constexpr Duration kRest = std::chrono::milliseconds(1);

}  // namespace

Requester::Requester(UniqueFd socket, const Id128& wanted, const Window& window, TimePoint now)
    : socket_(std::move(socket)),
      wanted_(wanted),
      window_(window),
      progress_(now),
      window_bytes_(std::min(window.least_bytes, window.bytes)) {
  slots_.resize(window.pieces);
  for (std::size_t i = window.pieces; i > 0; --i) {
    free_slots_.push_back(static_cast<std::uint32_t>(i - 1));
  }
  requests_.reserve(window.pieces * sizeof(Request));
}

bool Requester::has_room(std::size_t size_bytes, bool background) const noexcept {
  if (state_ != State::kOpen || free_slots_.empty()) return false;
  if (open_bytes_ == 0) return true;
  if (background && open_background_bytes_ > 0 &&
      open_background_bytes_ + size_bytes > window_.background_bytes) {
    return false;
  }
  return !full_ && open_bytes_ + size_bytes <= window_bytes_;
}

void Requester::request(const Piece& piece, TimePoint now) {
  PEGA_ASSERT(!free_slots_.empty(), "{} requests are open", slots_.size());
  if (open_bytes_ == 0) {
    if (measured_bytes_ == 0 || now - progress_ > kRest) {
      measured_since_ = now;
      measured_bytes_ = 0;
    }
    progress_ = now;
    requested_alone_ = now;
  }
  const std::uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  slots_[slot] = {.open = true, .request_id = next_request_id_, .piece = piece};
  open_bytes_ += piece.place.size();
  if (piece.operation.background) open_background_bytes_ += piece.place.size();
  full_ = open_bytes_ + piece.place.size() > window_bytes_;
  append(requests_, Request{.request_id = next_request_id_,
                            .slot = slot,
                            .region = static_cast<std::uint32_t>(piece.operation.remote_region),
                            .offset = piece.operation.remote_offset,
                            .size_bytes = static_cast<std::uint32_t>(piece.place.size())});
  ++next_request_id_;
}

Result<void> Requester::send_requests() {
  if (state_ == State::kDialing) PEGA_TRY(dialed());
  while (requests_sent_ < requests_.size()) {
    const ssize_t sent = ::send(socket_.get(), requests_.data() + requests_sent_,
                                requests_.size() - requests_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      requests_sent_ += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN) {
      return {};
    } else if (errno != EINTR) {
      return fail(Errc::kPeerLost, "send requests: {}", std::strerror(errno));
    }
  }
  requests_.clear();
  requests_sent_ = 0;
  return {};
}

Result<void> Requester::dialed() {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return fail(Errc::kPeerLost, "connect: {}", std::strerror(error));
  state_ = State::kConnected;
  append(requests_, Hello{.wanted_high = wanted_.high, .wanted_low = wanted_.low});
  return {};
}

Result<void> Requester::receive(TimePoint now, const Ended& ended) {
  if (state_ == State::kConnected) {
    state_ = State::kGreeting;
    progress_ = now;
  }
  for (std::size_t received = 0; received < kIterationBytes;) {
    std::array<iovec, 2> parts{};
    std::size_t count = 0;
    std::size_t wanted = 0;
    const std::size_t header_left = message_size() - header_size_;
    if (current_ == kNone) {
      parts[count++] = {header_.data() + header_size_, header_left};
      wanted = header_left;
    } else {
      const std::span<std::byte> left = slots_[current_].piece.place.subspan(current_got_);
      const std::size_t part = std::min(left.size(), kGroupBytes);
      parts[count++] = {left.data(), part};
      wanted = part;
      if (part == left.size()) {  // The header behind it needs no call of its own.
        parts[count++] = {header_.data(), header_left};
        wanted += header_left;
      }
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return {};
      return fail(Errc::kPeerLost, "receive: {}", std::strerror(errno));
    }
    if (got == 0) return fail(Errc::kPeerLost, "the holder closed the connection");

    progress_ = last_received_ = now;
    received += static_cast<std::size_t>(got);
    if (state_ == State::kOpen) measure(now, static_cast<std::size_t>(got));
    auto rest = static_cast<std::size_t>(got);
    if (current_ != kNone) {
      const std::size_t of_place = std::min(rest, parts[0].iov_len);
      rest -= of_place;
      take_bytes(of_place, ended);
    }
    header_size_ += rest;
    if (header_size_ == message_size()) {
      header_size_ = 0;
      PEGA_TRY(state_ == State::kOpen ? take_response(ended) : take_welcome());
    }
    if (static_cast<std::size_t>(got) < wanted) return {};  // No more bytes are available now.
  }
  return {};
}

void Requester::measure(TimePoint now, std::size_t bytes) noexcept {
  if (requested_alone_) round_trip_ = std::min(round_trip_, now - *requested_alone_);
  requested_alone_.reset();
  measured_bytes_ += bytes;
  // Long enough that one wake-up does not dominate it.
  if (measured_bytes_ < 4 * window_bytes_ || now <= measured_since_) return;
  const std::chrono::duration<double> took = now - measured_since_;
  const std::chrono::duration<double> round_trip = round_trip_;
  // Doubled, so that the window grows where it was the limit.
  const double holds = 2 * static_cast<double>(measured_bytes_) * (round_trip / took);
  window_bytes_ = static_cast<std::size_t>(
      std::clamp(holds, static_cast<double>(std::min(window_.least_bytes, window_.bytes)),
                 static_cast<double>(window_.bytes)));
  measured_since_ = now;
  measured_bytes_ = 0;
}

Result<void> Requester::take_welcome() {
  const auto welcome = message_of<Welcome>(header_);
  if (welcome.magic != kMagic)
    return fail(Errc::kCorrupt, "the responder is not a holder of this lane");
  if (welcome.verdict == Verdict::kRefused || welcome.version != kWireVersion) {
    return fail(Errc::kRefused, "the holder has version {} of the lane's protocol, this node {}",
                welcome.version, kWireVersion);
  }
  if (welcome.verdict != Verdict::kGood ||
      Id128{welcome.holder_high, welcome.holder_low} != wanted_) {
    return fail(Errc::kGone, "the holder is another incarnation");
  }
  state_ = State::kOpen;
  return {};
}

Result<void> Requester::take_response(const Ended& ended) {
  const auto response = message_of<Response>(header_);
  if (response.magic != kMagic) return fail(Errc::kCorrupt, "a response with a wrong magic number");
  if (response.slot >= slots_.size() || !slots_[response.slot].open ||
      slots_[response.slot].request_id != response.request_id) {
    return fail(Errc::kCorrupt, "a response to a request that is not open");
  }
  const std::size_t requested = slots_[response.slot].piece.place.size();
  const bool good = response.verdict == Verdict::kGood;
  if (response.size_bytes != (good ? requested : 0)) {
    return fail(Errc::kCorrupt, "a response of {} bytes to a request for {}", response.size_bytes,
                requested);
  }
  switch (response.verdict) {
    case Verdict::kGood:
      current_ = response.slot;
      current_got_ = 0;
      current_checksum_ = response.checksum;
      return {};
    case Verdict::kGone:
      end_piece(response.slot, Errc::kGone, ended);
      return {};
    case Verdict::kInvalid:
      end_piece(response.slot, Errc::kInvalidArgument, ended);
      return {};
    case Verdict::kRefused:
      break;
  }
  return fail(Errc::kCorrupt, "a response with verdict {}",
              static_cast<std::uint16_t>(response.verdict));
}

void Requester::take_bytes(std::size_t count, const Ended& ended) {
  const std::span<std::byte> place = slots_[current_].piece.place;
  std::uint64_t checksum = kNoChecksum;
  if (count == place.size()) {
    checksum = PageChecksum::of(place);
  } else {
    if (current_got_ == 0) checksum_.reset();
    checksum_.add(place.subspan(current_got_, count));
    if (current_got_ + count == place.size()) checksum = checksum_.value();
  }
  current_got_ += count;
  if (current_got_ < place.size()) return;
  const std::uint32_t slot = std::exchange(current_, kNone);
  end_piece(slot,
            checksum == current_checksum_ ? std::nullopt : std::optional<Errc>(Errc::kCorrupt),
            ended);
}

void Requester::end_piece(std::uint32_t slot, std::optional<Errc> error, const Ended& ended) {
  const Piece piece = slots_[slot].piece;
  slots_[slot].open = false;
  free_slots_.push_back(slot);
  open_bytes_ -= piece.place.size();
  if (piece.operation.background) open_background_bytes_ -= piece.place.size();
  if (open_bytes_ + window_.group_bytes <= window_bytes_) full_ = false;
  has_ended_piece_ = true;
  ended(piece, error);
}

std::vector<Piece> Requester::close() {
  socket_.reset();
  std::vector<const Slot*> open;
  for (const Slot& slot : slots_) {
    if (slot.open) open.push_back(&slot);
  }
  std::sort(open.begin(), open.end(),
            [](const Slot* a, const Slot* b) { return a->request_id < b->request_id; });
  std::vector<Piece> pieces;
  pieces.reserve(open.size());
  for (const Slot* const slot : open) pieces.push_back(slot->piece);
  for (Slot& slot : slots_) slot.open = false;
  open_bytes_ = open_background_bytes_ = 0;
  full_ = false;
  return pieces;
}

bool Requester::has_open(std::uint64_t batch) const noexcept {
  return std::any_of(slots_.begin(), slots_.end(), [batch](const Slot& slot) {
    return slot.open && slot.piece.operation.batch == batch;
  });
}

bool Requester::has_unread() const noexcept {
  char byte = 0;
  return ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

std::optional<TimePoint> Requester::waiting_since() const noexcept {
  if (state_ == State::kOpen && open_bytes_ == 0) return std::nullopt;
  return progress_;
}

}  // namespace pegaflow::tcp
