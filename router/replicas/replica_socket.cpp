#include "router/replicas/replica_socket.h"

#include <array>
#include <cerrno>
#include <utility>

#include <zmq.h>

#include "router/replicas/replica_message.h"

namespace pegaflow::router {

namespace {

constexpr int kHeartbeatMs = 1000;
constexpr int kLostMs = 5000;
constexpr int kReconnectMs = 100;
constexpr int kMostReconnectMs = 2000;
/// A subscription is one byte.
constexpr int kSubscriptionBytes = 64;
constexpr int kSubscriptions = 2000;  // Of one call of serve().

tl::unexpected<Error> fail_zmq(std::string_view what, std::string_view object) {
  const int code = zmq_errno();
  const Errc errc =
      code == EMFILE || code == ENOMEM ? Errc::kOutOfCapacity : Errc::kInvalidArgument;
  return fail(errc, "{} {}: {}", what, object, zmq_strerror(code));
}

template <typename T>
bool set(void* socket, int option, T value) {
  return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

int fd_of(void* socket) {
  int fd = -1;
  std::size_t size = sizeof fd;
  zmq_getsockopt(socket, ZMQ_FD, &fd, &size);
  return fd;
}

}  // namespace

void ReplicaSocket::Closing::operator()(void* socket) const { zmq_close(socket); }

ReplicaSocket::~ReplicaSocket() {
  subscribers_.clear();
  publisher_.reset();
  if (context_ != nullptr) zmq_ctx_term(context_);
}

Result<ReplicaSocket::Socket> ReplicaSocket::make(int type, int message_bytes) const {
  Socket socket(zmq_socket(context_, type));
  if (!socket) return fail_zmq("create a socket of", "ZeroMQ");
  void* const raw = socket.get();
  const bool is_set =
      set(raw, ZMQ_LINGER, 0) && set(raw, ZMQ_IPV6, 1) && set(raw, ZMQ_SNDHWM, kQueue) &&
      set(raw, ZMQ_RCVHWM, kQueue) && set(raw, ZMQ_MAXMSGSIZE, std::int64_t{message_bytes}) &&
      set(raw, ZMQ_HEARTBEAT_IVL, kHeartbeatMs) && set(raw, ZMQ_HEARTBEAT_TIMEOUT, kLostMs) &&
      set(raw, ZMQ_RECONNECT_IVL, kReconnectMs) &&
      set(raw, ZMQ_RECONNECT_IVL_MAX, kMostReconnectMs);
  if (!is_set) return fail_zmq("configure a socket of", "ZeroMQ");
  return socket;
}

Result<std::unique_ptr<ReplicaSocket>> ReplicaSocket::open(const std::string& listen) {
  std::unique_ptr<ReplicaSocket> made(new ReplicaSocket());
  made->context_ = zmq_ctx_new();
  if (made->context_ == nullptr) return fail_zmq("start", "ZeroMQ");
  zmq_ctx_set(made->context_, ZMQ_BLOCKY, 0);
  PEGA_TRY(made->open_publisher(listen));
  return made;
}

Result<void> ReplicaSocket::open_publisher(const std::string& listen) {
  PEGA_TRY_LET(Socket socket, make(ZMQ_XPUB, kSubscriptionBytes));
  void* const raw = socket.get();
  if (!set(raw, ZMQ_XPUB_MANUAL, 1)) return fail_zmq("configure a socket of", "ZeroMQ");
  std::string endpoint = "tcp://" + listen;
  // ZeroMQ's name for any free port.
  if (endpoint.ends_with(":0")) endpoint.replace(endpoint.size() - 1, 1, "*");
  if (zmq_bind(raw, endpoint.c_str()) != 0) return fail_zmq("listen at", listen);
  std::array<char, 256> bound{};
  std::size_t size = bound.size();
  if (zmq_getsockopt(raw, ZMQ_LAST_ENDPOINT, bound.data(), &size) != 0) {
    return fail_zmq("ask for the address of", listen);
  }
  const std::string_view text(bound.data());
  address_ = text.substr(text.find("//") + 2);
  publisher_ = std::move(socket);
  strange_ = 0;
  return {};
}

int ReplicaSocket::publisher_fd() const { return publisher_ ? fd_of(publisher_.get()) : -1; }

bool ReplicaSocket::serve() {
  // ZeroMQ closes sockets later; until then the address is in use.
  if (!publisher_) return open_publisher(std::string(address_)).has_value();
  for (int i = 0; i < kSubscriptions; ++i) {
    std::array<char, kSubscriptionBytes> text{};
    const int size = zmq_recv(publisher_.get(), text.data(), text.size(), ZMQ_DONTWAIT);
    if (size < 0) return false;
    // The first byte is 1 to subscribe and 0 to end it; the topic of all messages is empty.
    if (size == 1) {
      const int option = text[0] == 1 ? ZMQ_SUBSCRIBE : ZMQ_UNSUBSCRIBE;
      zmq_setsockopt(publisher_.get(), option, "", 0);
    } else if (++strange_ > kStrange) {
      publisher_.reset();
      return true;
    }
  }
  return false;
}

bool ReplicaSocket::publish(std::string_view message) {
  return publisher_ &&
         zmq_send(publisher_.get(), message.data(), message.size(), ZMQ_DONTWAIT) >= 0;
}

Result<int> ReplicaSocket::subscribe(const std::string& address) {
  subscribers_.erase(address);
  PEGA_TRY_LET(Socket socket, make(ZMQ_SUB, static_cast<int>(kMaxReplicaMessage)));
  if (zmq_setsockopt(socket.get(), ZMQ_SUBSCRIBE, "", 0) != 0 ||
      zmq_connect(socket.get(), ("tcp://" + address).c_str()) != 0) {
    return fail_zmq("subscribe to", address);
  }
  const int fd = fd_of(socket.get());
  subscribers_.emplace(address, std::move(socket));
  return fd;
}

void ReplicaSocket::unsubscribe(const std::string& address) { subscribers_.erase(address); }

bool ReplicaSocket::receive(const std::string& address, std::string& out) {
  const auto found = subscribers_.find(address);
  if (found == subscribers_.end()) return false;
  zmq_msg_t frame;
  bool is_first = true;
  for (bool more = true; more; is_first = false) {
    zmq_msg_init(&frame);
    if (zmq_msg_recv(&frame, found->second.get(), ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(&frame);
      return false;
    }
    more = zmq_msg_more(&frame) != 0;
    if (is_first && !more) {
      out.assign(static_cast<const char*>(zmq_msg_data(&frame)), zmq_msg_size(&frame));
    } else {
      out.clear();
    }
    zmq_msg_close(&frame);
  }
  return true;
}

}  // namespace pegaflow::router
