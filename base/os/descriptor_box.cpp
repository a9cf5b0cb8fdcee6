#include "base/os/descriptor_box.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/socket.h>

namespace pegaflow {
namespace {

constexpr std::size_t kPerMessage = DescriptorBox::kPerMessage;
constexpr std::size_t kControlBytes = CMSG_SPACE(kPerMessage * sizeof(int));

/// SCM_PIDFD, from Linux 6.5 on; not in every header.
constexpr int kScmPidfd = 4;

struct Message {
  explicit Message(std::size_t control_bytes) {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control_bytes;
  }
  char byte = 0;
  iovec part{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  msghdr header{};
};

tl::unexpected<Error> too_many(int error_number, std::string_view what) {
  return fail(Errc::kRefused, "{}: {}; raise the limit of open files (ulimit -n)", what,
              std::strerror(error_number));
}

/// A socket with one unread message that holds the descriptors.
Result<UniqueFd> socket_with(std::span<const UniqueFd> descriptors) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return too_many(errno, "create a socket for descriptors");
  }
  const UniqueFd writer(ends[0]);
  UniqueFd reader(ends[1]);
  Message message(CMSG_SPACE(descriptors.size() * sizeof(int)));
  cmsghdr* const part = CMSG_FIRSTHDR(&message.header);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  for (std::size_t i = 0; i < descriptors.size(); ++i) {
    const int number = descriptors[i].get();
    std::memcpy(CMSG_DATA(part) + i * sizeof number, &number, sizeof number);
  }
  if (::sendmsg(writer.get(), &message.header, MSG_NOSIGNAL) != 1) {
    if (errno == ETOOMANYREFS) return too_many(errno, "put descriptors into a socket");
    return fail(Errc::kIo, "put {} descriptors into a socket: {}", descriptors.size(),
                std::strerror(errno));
  }
  return reader;
}

/// Duplicates of the descriptors in the unread message of a socket.
Result<std::vector<UniqueFd>> descriptors_in(int socket) {
  Message message(kControlBytes);
  if (::recvmsg(socket, &message.header, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != 1) {
    return fail(Errc::kInvalidArgument, "no socket with descriptors: {}", std::strerror(errno));
  }
  std::vector<UniqueFd> found;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message.header); part != nullptr;
       part = CMSG_NXTHDR(&message.header, part)) {
    // A sender's pidfd, for a socket that asks for it, is a descriptor, too.
    const bool has_descriptors = part->cmsg_type == SCM_RIGHTS || part->cmsg_type == kScmPidfd;
    if (part->cmsg_level != SOL_SOCKET || !has_descriptors) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part) + i * sizeof number, sizeof number);
      found.emplace_back(number);
    }
  }
  // The kernel leaves out those for which this process has no number.
  if ((message.header.msg_flags & MSG_CTRUNC) != 0) {
    return too_many(EMFILE, "take descriptors out of a socket");
  }
  return found;
}

}  // namespace

Result<void> DescriptorBox::add(UniqueFd descriptor) {
  if (sealed_.size() * kPerMessage + added_.size() == kMost) {
    *this = DescriptorBox();
    return fail(Errc::kInvalidArgument, "more than {} descriptors in a box", kMost);
  }
  added_.push_back(std::move(descriptor));
  return added_.size() == kPerMessage ? seal() : Result<void>();
}

Result<void> DescriptorBox::seal() {
  Result<UniqueFd> box = socket_with(added_);
  if (!box) {
    *this = DescriptorBox();
    return tl::unexpected<Error>(std::move(box.error()));
  }
  added_.clear();
  sealed_.push_back(std::move(*box));
  return {};
}

Result<UniqueFd> DescriptorBox::close() {
  if (!added_.empty()) PEGA_TRY(seal());
  return socket_with(std::exchange(sealed_, {}));
}

Result<UniqueFd> DescriptorBox::pack(std::span<const UniqueFd> descriptors) {
  if (descriptors.size() > kMost) {
    return fail(Errc::kInvalidArgument, "more than {} descriptors in a box", kMost);
  }
  std::vector<UniqueFd> boxes;
  for (std::size_t at = 0; at < descriptors.size(); at += kPerMessage) {
    const std::size_t count = std::min(kPerMessage, descriptors.size() - at);
    PEGA_TRY_LET(boxes.emplace_back(), socket_with(descriptors.subspan(at, count)));
  }
  return socket_with(boxes);
}

Result<void> DescriptorBox::look(int box, std::size_t count,
                                 const std::function<Result<void>(UniqueFd)>& take) {
  PEGA_TRY_LET(const std::vector<UniqueFd> boxes, descriptors_in(box));
  std::size_t taken = 0;
  for (const UniqueFd& one : boxes) {
    PEGA_TRY_LET(std::vector<UniqueFd> descriptors, descriptors_in(one.get()));
    taken += descriptors.size();
    if (taken > count) break;
    for (UniqueFd& each : descriptors) PEGA_TRY(take(std::move(each)));
  }
  if (taken == count) return {};
  return fail(Errc::kInvalidArgument, "a box with {}{} descriptors, not {}",
              taken > count ? "more than " : "", taken > count ? count : taken, count);
}

}  // namespace pegaflow
