// Records the transcript of this build: golden_record FILE
//
// A proxy between client and server forwards messages with their descriptors, and records them.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/os/unique_fd.h"
#include "tests/golden/scenario.h"
#include "tests/golden/transcript.h"
#include "tests/support/server_process.h"

namespace pegaflow::testing {
namespace {

UniqueFd unix_socket(const std::string& path, bool listens) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  auto* const where = reinterpret_cast<sockaddr*>(&address);
  const int done = listens ? ::bind(socket.get(), where, sizeof address)
                           : ::connect(socket.get(), where, sizeof address);
  if (done != 0 || (listens && ::listen(socket.get(), 8) != 0)) {
    throw std::runtime_error("the proxy's socket: " + std::string(std::strerror(errno)));
  }
  return socket;
}

/// Forwards one direction of one connection.
struct Direction {
  std::size_t connection = 0;
  bool is_from_client = false;
  int from = -1;
  int to = -1;
  std::vector<std::byte> unsent{};  ///< Bytes of an incomplete message.
  std::vector<int> descriptors{};   ///< Descriptors that came with them.
};

class Proxy {
 public:
  Proxy(const std::string& path, std::string server)
      : listener_(unix_socket(path, true)), server_(std::move(server)) {
    thread_ = std::thread([this] { run(); });
  }
  /// The messages that were recorded until the clients had left.
  std::vector<RecordedMessage> finish() {
    thread_.join();
    return std::move(said_);
  }

 private:
  static constexpr std::size_t kConnections = 2;

  void run() {
    std::size_t open = 0;
    std::size_t accepted = 0;
    do {
      std::vector<pollfd> wanted;
      if (accepted < kConnections) wanted.push_back({listener_.get(), POLLIN, 0});
      for (const Direction& each : directions_) wanted.push_back({each.from, POLLIN, 0});
      ::poll(wanted.data(), wanted.size(), -1);
      if (accepted < kConnections && wanted[0].revents != 0) {
        accept(accepted++);
        open += 2;
        continue;
      }
      const std::size_t first = accepted < kConnections ? 1 : 0;
      for (std::size_t i = 0; i < directions_.size(); ++i) {
        if (wanted[first + i].revents == 0) continue;
        if (forward(directions_[i])) continue;
        directions_[i].from = -1;  // poll() ignores it.
        --open;
      }
    } while (accepted < kConnections || open != 0);
  }

  void accept(std::size_t number) {
    sockets_.emplace_back(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const int client = sockets_.back().get();
    sockets_.push_back(unix_socket(server_, false));
    const int server = sockets_.back().get();
    directions_.push_back(
        {.connection = number, .is_from_client = true, .from = client, .to = server});
    directions_.push_back(
        {.connection = number, .is_from_client = false, .from = server, .to = client});
  }

  /// Returns false at the end of the stream.
  bool forward(Direction& way) {
    std::byte buffer[65536];
    iovec part{buffer, sizeof buffer};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(way.from, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) {
      ::shutdown(way.to, SHUT_WR);
      return false;
    }
    for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr;
         each = CMSG_NXTHDR(&message, each)) {
      const std::size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(each) + i * sizeof(int), sizeof fd);
        way.descriptors.push_back(fd);
      }
    }
    way.unsent.insert(way.unsent.end(), buffer, buffer + got);
    while (const auto size = message_bytes(way.unsent)) {
      const auto end = way.unsent.begin() + static_cast<std::ptrdiff_t>(*size);
      // The kernel reads no further than the message that carries descriptors.
      const bool is_last = *size == way.unsent.size();
      said_.push_back({.connection = way.connection,
                       .is_from_client = way.is_from_client,
                       .descriptors = is_last ? way.descriptors.size() : 0,
                       .bytes = {way.unsent.begin(), end}});
      way.unsent.erase(way.unsent.begin(), end);
      send(way, said_.back());
    }
    return true;
  }

  static void send(Direction& way, const RecordedMessage& said) {
    const std::vector<std::byte>& bytes = said.bytes;
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (said.descriptors != 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(int) * way.descriptors.size());
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int) * way.descriptors.size());
      std::memcpy(CMSG_DATA(header), way.descriptors.data(), sizeof(int) * way.descriptors.size());
    }
    // Messages of the scenario are far below a socket's buffer. A peer that has closed its end
    // already does not need the last of them.
    const ssize_t sent = ::sendmsg(way.to, &message, MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(bytes.size()) && errno != EPIPE) {
      throw std::runtime_error("the proxy could not forward a message");
    }
    if (said.descriptors == 0) return;
    for (const int fd : std::exchange(way.descriptors, {})) ::close(fd);
  }

  UniqueFd listener_;
  std::string server_;
  std::vector<UniqueFd> sockets_;
  std::vector<Direction> directions_;
  std::vector<RecordedMessage> said_;
  std::thread thread_;
};

}  // namespace
}  // namespace pegaflow::testing

int main(int count, char** arguments) {
  using pegaflow::testing::Proxy;
  if (count != 2) {
    std::fputs("usage: golden_record FILE\n", stderr);
    return 2;
  }
  try {
    pegaflow::testing::ServerProcess server;
    const std::string path = (server.directory() / "proxy.sock").string();
    Proxy proxy(path, server.socket());
    pegaflow::testing::run_golden_scenario(path);
    pegaflow::testing::write_transcript(arguments[1], proxy.finish());
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "golden_record: %s\n", problem.what());
    return 1;
  }
  return 0;
}
