#include "server/pool/keeper_wire.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace pegaflow::server {
namespace {

namespace fs = std::filesystem;

constexpr int kBacklog = 16;

Result<sockaddr_un> address_of(const fs::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string text = path.string();
  if (text.size() >= sizeof address.sun_path) {
    return fail(Errc::kInvalidArgument, "{} is too long for a socket: the limit is {} bytes", text,
                sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, text.c_str(), text.size() + 1);
  return address;
}

Result<UniqueFd> make_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(errno, "make a socket for the keeper");
  return fd;
}

}  // namespace

Result<void> send_message(int socket, const KeeperMessage& message, int first, int second) {
  KeeperMessage copy = message;
  iovec bytes{&copy, sizeof copy};
  msghdr header{};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  const std::array<int, KeeperMessage::kMostFds> fds = {first, second};
  const std::size_t count = first < 0 ? 0U : second < 0 ? 1U : 2U;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fds)> control{};
  if (count != 0) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(count * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), count * sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return {};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return fail(Errc::kBusy, "the other end of the keeper's socket does not read");
    }
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) {
      return fail(Errc::kPeerLost, "the keeper's socket is closed");
    }
    return fail_errno(errno, "send a message of the keeper");
  }
}

Result<std::optional<ReceivedMessage>> receive_message(int socket) {
  ReceivedMessage received;
  iovec bytes{&received.message, sizeof received.message};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(KeeperMessage::kMostFds * sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t length = 0;
  do {
    length = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return fail(Errc::kBusy, "the keeper has not answered");
    }
    if (errno == ECONNRESET) return std::optional<ReceivedMessage>();
    return fail_errno(errno, "receive a message of the keeper");
  }
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count && i < received.fds.size(); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights) + i * sizeof fd, sizeof fd);
      received.fds[i] = UniqueFd(fd);
    }
  }
  if (length == 0) return std::optional<ReceivedMessage>();
  if (static_cast<std::size_t>(length) != sizeof received.message ||
      received.message.magic != KeeperMessage::kMagic ||
      (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return fail(Errc::kInvalidArgument, "{} bytes that are no message of a keeper", length);
  }
  return std::optional(std::move(received));
}

fs::path keeper_path(const fs::path& socket) {
  fs::path path = socket;
  if (path.extension() == ".sock") path.replace_extension();
  return path += ".keeper";
}

Result<UniqueFd> listen_as_keeper(const fs::path& path) {
  PEGA_TRY_LET(const std::optional<UniqueFd> other, connect_to_keeper(path));
  if (other) return fail(Errc::kRefused, "another keeper listens at {}", path.string());
  PEGA_TRY_LET(const sockaddr_un address, address_of(path));
  PEGA_TRY_LET(UniqueFd fd, make_socket());
  ::unlink(path.c_str());  // Of a process that is gone; bind() reports what remains.
  // The mode before any process can connect: a socket takes that of its descriptor.
  if (::fchmod(fd.get(), 0600) != 0 ||
      ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    auto error = fail_errno(errno, "listen at " + path.string());
    error.value().code = Errc::kRefused;
    return error;
  }
  return fd;
}

Result<std::optional<UniqueFd>> connect_to_keeper(const fs::path& path,
                                                  std::chrono::milliseconds patience) {
  PEGA_TRY_LET(const sockaddr_un address, address_of(path));
  PEGA_TRY_LET(UniqueFd fd, make_socket());
  // A keeper that is stopped accepts nothing: once its queue is full, connect() waits for it.
  const timeval limit{.tv_sec = patience.count() / 1000, .tv_usec = patience.count() % 1000 * 1000};
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
    return fail_errno(errno, "limit the wait for the keeper");
  }
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) continue;
    if (errno == ENOENT || errno == ECONNREFUSED) return std::optional<UniqueFd>();
    if (errno == EAGAIN) {
      return fail(Errc::kTimeout,
                  "the keeper at {} has accepted no connection for {} ms: it is stopped or hangs",
                  path.string(), patience.count());
    }
    auto error = fail_errno(errno, "connect to the keeper at " + path.string());
    if (errno == EACCES || errno == EPERM) error.value().code = Errc::kRefused;
    return error;
  }
  return std::optional(std::move(fd));
}

}  // namespace pegaflow::server
