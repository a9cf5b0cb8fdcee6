#pragma once
/// \file
/// The holder's end of one connection.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sys/uio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/wire.h"

namespace pegaflow::tcp {

/// Answers the requests of one reader out of lent regions.
///
/// Holds at most kMaxRequests that are not answered; then it stops reading, and the reader's own
/// socket fills. Uses the memory of a region only within serve(): the kernel copies the bytes it
/// sends.
///
/// Thread-bound: to the fabric's thread. Does not allocate after construction.
class Responder {
 public:
  static constexpr std::size_t kMaxRequests = 256;

  /// `regions` and `clock` outlive it.
  Responder(UniqueFd socket, const RegionTable& regions, const Id128& self, const Clock& clock)
      : socket_(std::move(socket)), regions_(regions), self_(self), clock_(clock) {}

  /// Reads requests and sends responses, about a megabyte at most, and never waits.
  /// Errors: the reason to close the connection. kPeerLost: it ended; kCorrupt: an invalid message;
  /// kRefused, kGone: the reader wants another version or incarnation, which the welcome has
  /// reported; kGone also when a region ended while its bytes were being sent. With `readable`
  /// false it only sends responses.
  Result<void> serve(bool readable = true);

  /// Whether to call serve() when the socket is readable, and when it is writable.
  [[nodiscard]] bool wants_to_read() const noexcept { return count_ < kMaxRequests; }
  [[nodiscard]] bool wants_to_send() const noexcept {
    // A request in in_ arrived when there was no room for it, and no later event may come for it.
    return count_ > 0 || parts_sent_ < parts_.size() || in_size_ >= sizeof(Request);
  }
  [[nodiscard]] bool greeted() const noexcept { return greeted_; }
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

 private:
  /// Responses in one system call: enough for small pages, few enough that their bytes are still in
  /// the core's cache when the kernel copies them.
  static constexpr std::size_t kGroup = 16;
  struct GroupItem {
    Response response;
    std::span<const std::byte> bytes;
    RegionId region{};
  };

  Result<void> receive();
  Result<void> greet();
  Result<void> send_some();
  void make_group();
  void make_response(const Request& request, GroupItem& item) const;
  [[nodiscard]] bool group_still_lent() const;

  UniqueFd socket_;
  const RegionTable& regions_;
  Id128 self_;
  const Clock& clock_;
  bool greeted_ = false;

  std::array<std::byte, 4096> in_{};  // Bytes received and not yet parsed.
  std::size_t in_size_ = 0;
  std::array<Request, kMaxRequests> requests_{};  // A ring.
  std::size_t first_ = 0;
  std::size_t count_ = 0;

  std::array<GroupItem, kGroup> group_{};
  std::array<iovec, 2 * kGroup> part_storage_{};
  std::array<std::size_t, 2 * kGroup> part_items_{};  // Which item of the group each belongs to.
  std::span<iovec> parts_;                            // The group's, in part_storage_.
  std::size_t parts_sent_ = 0;  // Parts sent completely; the next may be shortened.
};

}  // namespace pegaflow::tcp
