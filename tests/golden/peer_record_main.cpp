// Records the messages between two servers of this build: golden_peer_record FILE
//
// A proxy between the reader and the owner forwards messages and records them.
#define DOCTEST_CONFIG_IMPLEMENT  // For the checks of tests/support/nodes.h.
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/os/unique_fd.h"
#include "tests/golden/peer_scenario.h"
#include "tests/golden/transcript.h"
#include "tests/support/nodes.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::testing {
namespace {

UniqueFd tcp_socket(const tcp::SocketAddress& address, bool listens) {
  UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int done = listens ? ::bind(socket.get(), address.data(), address.size())
                           : ::connect(socket.get(), address.data(), address.size());
  if (done != 0 || (listens && ::listen(socket.get(), 1) != 0)) {
    throw std::runtime_error("the proxy's socket");
  }
  return socket;
}

/// Forwards one connection until the dialer closes it.
std::vector<RecordedMessage> forward(const UniqueFd& listener, const tcp::SocketAddress& to) {
  const UniqueFd dialer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const UniqueFd answerer = tcp_socket(to, false);
  std::vector<RecordedMessage> said;
  std::vector<std::byte> unsent[2];
  for (;;) {
    pollfd wanted[2] = {{dialer.get(), POLLIN, 0}, {answerer.get(), POLLIN, 0}};
    ::poll(wanted, 2, -1);
    for (int i = 0; i < 2; ++i) {
      if (wanted[i].revents == 0) continue;
      std::byte buffer[65536];
      const ssize_t got = ::recv(wanted[i].fd, buffer, sizeof buffer, 0);
      if (got <= 0) return said;
      std::vector<std::byte>& stream = unsent[i];
      stream.insert(stream.end(), buffer, buffer + got);
      while (const auto size = message_bytes(stream)) {
        const auto end = stream.begin() + static_cast<std::ptrdiff_t>(*size);
        said.push_back({.is_from_client = i == 0, .bytes = {stream.begin(), end}});
        stream.erase(stream.begin(), end);
      }
      // Far below a socket's buffer.
      if (::send(wanted[1 - i].fd, buffer, static_cast<std::size_t>(got), MSG_NOSIGNAL) != got) {
        return said;
      }
    }
  }
}

void record(const std::string& file) {
  const auto at = node_addresses(2);
  const ServerProcess owner(golden_owner(at[0]));
  GoldenEngine on_owner(owner.socket());
  on_owner.save();

  const UniqueFd listener = tcp_socket(tcp::SocketAddress::parse(at[1]).value(), true);
  std::vector<RecordedMessage> said;
  std::thread proxy([&] { said = forward(listener, tcp::SocketAddress::parse(at[0]).value()); });
  std::exception_ptr problem;
  {
    ServerProcess reader(golden_reader(at[1]));
    try {
      run_peer_scenario(reader, at[1], on_owner.engine().session().status().server);
    } catch (...) {
      problem = std::current_exception();
    }
    reader.kill();
  }
  proxy.join();
  if (problem) std::rethrow_exception(problem);
  write_transcript(file, said);
}

}  // namespace
}  // namespace pegaflow::testing

int main(int count, char** arguments) {
  if (count != 2) {
    std::fputs("usage: golden_peer_record FILE\n", stderr);
    return 2;
  }
  try {
    pegaflow::testing::record(arguments[1]);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "golden_peer_record: %s\n", problem.what());
    return 1;
  }
  return 0;
}
