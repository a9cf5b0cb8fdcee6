// Publishes KV events as an engine does: a ZeroMQ PUB socket at a free port.
//
// usage: event_publisher
//
// It prints its port. Each line of the input is a batch in hexadecimal digits, which it publishes
// with the next sequence number; a line `wait` returns once a subscriber came, and prints
// `subscribed`. The end of the input ends the program.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <zmq.h>

namespace {

int fail(const char* what) {
  std::fprintf(stderr, "event_publisher: %s: %s\n", what, zmq_strerror(zmq_errno()));
  return 1;
}

unsigned char byte_of(const std::string& digits) {
  return static_cast<unsigned char>(std::stoul(digits, nullptr, 16));
}

bool publish(void* socket, std::uint64_t sequence, const std::string& hex) {
  std::vector<unsigned char> payload;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) payload.push_back(byte_of(hex.substr(i, 2)));
  unsigned char number[8];
  for (int i = 0; i < 8; ++i) number[i] = static_cast<unsigned char>(sequence >> (56 - 8 * i));
  return zmq_send(socket, "", 0, ZMQ_SNDMORE) >= 0 &&
         zmq_send(socket, number, sizeof number, ZMQ_SNDMORE) >= 0 &&
         zmq_send(socket, payload.data(), payload.size(), 0) >= 0;
}

}  // namespace

int main() {
  void* const context = zmq_ctx_new();
  void* const socket = zmq_socket(context, ZMQ_XPUB);
  const int all = 1;  // Reports each subscriber, also one with the same topic.
  zmq_setsockopt(socket, ZMQ_XPUB_VERBOSE, &all, sizeof all);
  char endpoint[64];
  std::size_t size = sizeof endpoint;
  if (zmq_bind(socket, "tcp://127.0.0.1:*") != 0 ||
      zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &size) != 0) {
    return fail("bind");
  }
  const std::string_view place(endpoint);
  std::printf("%s\n", std::string(place.substr(place.rfind(':') + 1)).c_str());
  std::fflush(stdout);
  std::uint64_t sequence = 0;
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line == "wait") {
      char subscription[64];
      if (zmq_recv(socket, subscription, sizeof subscription, 0) < 0) return fail("wait");
      std::printf("subscribed\n");
    } else if (publish(socket, sequence++, line)) {
      std::printf("published\n");
    } else {
      return fail("publish");
    }
    std::fflush(stdout);
  }
  const int linger = 0;
  zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
  zmq_close(socket);
  zmq_ctx_term(context);
  return 0;
}
