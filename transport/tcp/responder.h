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

/// Answers what one reader asks, out of regions that are lent.
///
/// Holds at most kMaxRequests that are not answered; then it reads no more, and the reader's own
/// socket fills. Takes the memory of a region in its hands only within turn(): the kernel copies
/// what it sends.
///
/// Thread-bound: to the thread of the fabric. No allocation after it was made.
class Responder {
 public:
  static constexpr std::size_t kMaxRequests = 256;

  /// `regions` and `clock` outlive it.
  Responder(UniqueFd socket, const RegionTable& regions, const Id128& self, const Clock& clock)
      : socket_(std::move(socket)), regions_(regions), self_(self), clock_(clock) {}

  /// Reads questions and sends answers, about a megabyte at most, and never waits.
  /// Errors: why the connection has to be closed. kPeerLost: it ended; kCorrupt: it makes no sense;
  /// kRefused, kGone: it wants another version or incarnation, and has been told; kGone also when a
  /// region ended while its bytes were on the way.
  /// With `readable` false there is nothing to read, and only answers are sent.
  Result<void> serve(bool readable = true);

  /// Whether to call turn() when there is something to read; whether, when there is room to send.
  [[nodiscard]] bool wants_to_read() const noexcept { return count_ < kMaxRequests; }
  [[nodiscard]] bool wants_to_send() const noexcept {
    // A question in in_ came when there was no room for it, and nothing new may come to wake us.
    return count_ > 0 || parts_sent_ < parts_.size() || in_size_ >= sizeof(Request);
  }
  [[nodiscard]] bool greeted() const noexcept { return greeted_; }
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

 private:
  /// As many answers as go into one system call: enough for small pages, few enough that their
  /// bytes are still in the core's cache when the kernel copies them.
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

  std::array<std::byte, 4096> in_{};  // Bytes that came and are not taken apart yet.
  std::size_t in_size_ = 0;
  std::array<Request, kMaxRequests> requests_{};  // A ring.
  std::size_t first_ = 0;
  std::size_t count_ = 0;

  std::array<GroupItem, kGroup> group_{};
  std::array<iovec, 2 * kGroup> part_storage_{};
  std::array<std::size_t, 2 * kGroup> part_items_{};  // Which item of the group each belongs to.
  std::span<iovec> parts_;                            // Of the group, in part_storage_.
  std::size_t parts_sent_ = 0;                        // Whole ones; the next may be shortened.
};

}  // namespace pegaflow::tcp
