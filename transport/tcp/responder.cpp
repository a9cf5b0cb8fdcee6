#include "transport/tcp/responder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/socket.h>

#include "transport/checksum.h"
#include "transport/tcp/limits.h"

namespace pegaflow::tcp {

Result<void> Responder::serve(bool readable) {
  if (readable || in_size_ >= sizeof(Request)) PEGA_TRY(receive());
  return send_some();
}

Result<void> Responder::receive() {
  for (bool nothing_more = false;;) {
    const std::size_t message = greeted_ ? sizeof(Request) : sizeof(Hello);
    std::size_t taken = 0;
    while (in_size_ - taken >= message && wants_to_read()) {
      if (!greeted_) {
        PEGA_TRY(greet());
        taken += sizeof(Hello);
        break;
      }
      requests_[(first_ + count_++) % kMaxRequests] =
          message_of<Request>(std::span(in_).subspan(taken));
      taken += sizeof(Request);
    }
    std::copy(in_.begin() + static_cast<std::ptrdiff_t>(taken),
              in_.begin() + static_cast<std::ptrdiff_t>(in_size_), in_.begin());
    in_size_ -= taken;
    if (!wants_to_read()) return {};
    if (in_size_ >= (greeted_ ? sizeof(Request) : sizeof(Hello))) continue;
    if (nothing_more) return {};

    const std::size_t room = in_.size() - in_size_;
    const ssize_t got = ::recv(socket_.get(), in_.data() + in_size_, room, MSG_DONTWAIT);
    if (got > 0) {
      in_size_ += static_cast<std::size_t>(got);
      // A second call would only return EAGAIN. The end of the connection is a new event.
      nothing_more = static_cast<std::size_t>(got) < room;
    } else if (got == 0) {
      return fail(Errc::kPeerLost, "the reader closed its connection");
    } else if (errno == EAGAIN) {
      return {};
    } else if (errno != EINTR) {
      return fail(Errc::kPeerLost, "receive requests: {}", std::strerror(errno));
    }
  }
}

Result<void> Responder::greet() {
  const Hello hello = message_of<Hello>(in_);
  if (hello.magic != kMagic) return fail(Errc::kCorrupt, "the client is not a reader of this lane");
  Welcome welcome{.holder_high = self_.high, .holder_low = self_.low};
  if (hello.version != kWireVersion) {
    welcome.verdict = Verdict::kRefused;
  } else if (Id128{hello.wanted_high, hello.wanted_low} != self_) {
    welcome.verdict = Verdict::kGone;
    // Our incarnation is not disclosed to a process that does not know it.
    welcome.holder_high = welcome.holder_low = 0;
  }
  // The first bytes on a new connection always fit.
  if (::send(socket_.get(), &welcome, sizeof welcome, MSG_NOSIGNAL | MSG_DONTWAIT) !=
      static_cast<ssize_t>(sizeof welcome)) {
    return fail(Errc::kPeerLost, "welcome a reader: {}", std::strerror(errno));
  }
  if (welcome.verdict == Verdict::kRefused) {
    return fail(Errc::kRefused, "a reader has version {} of the lane's protocol, this node {}",
                hello.version, kWireVersion);
  }
  if (welcome.verdict == Verdict::kGone) {
    return fail(Errc::kGone, "a reader wants another incarnation");
  }
  greeted_ = true;
  return {};
}

void Responder::make_response(const Request& request, GroupItem& item) const {
  item.response = {.request_id = request.request_id, .slot = request.slot};
  item.region = RegionId{request.region};
  item.bytes = {};
  const auto part = regions_.part(item.region, request.offset, request.size_bytes);
  if (!regions_.lent(item.region, clock_.now())) {
    item.response.verdict = Verdict::kGone;
  } else if (!part || part->empty() || part->size() > kMaximumPieceBytes) {
    item.response.verdict = Verdict::kInvalid;
  } else {
    item.bytes = *part;
    item.response.size_bytes = request.size_bytes;
    item.response.checksum = PageChecksum::of(*part);
  }
}

void Responder::make_group() {
  std::size_t items = 0;
  std::size_t parts = 0;
  std::size_t bytes = 0;
  while (count_ > 0 && items < kGroup) {
    const Request& request = requests_[first_];
    if (items > 0 && bytes + request.size_bytes > kGroupBytes) break;
    GroupItem& item = group_[items];
    make_response(request, item);
    bytes += item.bytes.size();
    part_items_[parts] = items;
    part_storage_[parts++] = {&item.response, sizeof item.response};
    if (!item.bytes.empty()) {
      part_items_[parts] = items;
      // sendmsg() only reads it.
      part_storage_[parts++] = {const_cast<std::byte*>(item.bytes.data()), item.bytes.size()};
    }
    ++items;
    first_ = (first_ + 1) % kMaxRequests;
    --count_;
  }
  parts_ = std::span(part_storage_).first(parts);
  parts_sent_ = 0;
}

bool Responder::group_still_lent() const {
  const TimePoint now = clock_.now();
  for (std::size_t i = parts_sent_; i < parts_.size(); ++i) {
    const GroupItem& item = group_[part_items_[i]];
    if (!item.bytes.empty() && !regions_.lent(item.region, now)) return false;
  }
  return true;
}

Result<void> Responder::send_some() {
  if (parts_sent_ < parts_.size() && !group_still_lent()) {
    return fail(Errc::kGone, "a region ended while its bytes were being sent");
  }
  for (std::size_t sent_bytes = 0; sent_bytes < kIterationBytes;) {
    if (parts_sent_ == parts_.size()) {
      if (count_ == 0) return {};
      make_group();
    }
    msghdr message{};
    message.msg_iov = &parts_[parts_sent_];
    message.msg_iovlen = parts_.size() - parts_sent_;
    // With more responses behind it, a half-full last segment is held back.
    const int more = count_ > 0 ? MSG_MORE : 0;
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT | more);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return {};
      return fail(Errc::kPeerLost, "send responses: {}", std::strerror(errno));
    }
    auto left = static_cast<std::size_t>(sent);
    sent_bytes += left;
    while (left > 0) {
      iovec& part = parts_[parts_sent_];
      const std::size_t of_part = std::min(left, part.iov_len);
      left -= of_part;
      part.iov_len -= of_part;
      part.iov_base = static_cast<std::byte*>(part.iov_base) + of_part;
      if (part.iov_len == 0) ++parts_sent_;
    }
  }
  return {};
}

}  // namespace pegaflow::tcp
