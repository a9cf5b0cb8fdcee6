#pragma once
/// \file
/// The ZeroMQ sockets between routers: one publishes, one for each other router receives.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow::router {

/// Sends and receives whole messages of at most kMaxReplicaMessage bytes. Nothing waits: a message
/// for a subscriber whose queue is full is dropped by ZeroMQ, and queues have kQueue messages. A
/// subscriber that does not answer ZeroMQ's heartbeats for 5 s is disconnected, and its queue is
/// freed. ZeroMQ keeps every subscription of a stranger, so the publisher is opened anew, without
/// all connections, after kStrange subscriptions to anything but all messages.
///
/// Thread-bound: the caller's event loop waits for the descriptors. ZeroMQ has two threads of its
/// own.
class ReplicaSocket {
 public:
  static constexpr int kQueue = 1000;
  static constexpr int kStrange = 1000;

  /// Publishes at HOST:PORT; port 0 selects a free one.
  /// Errors: kInvalidArgument for an address that cannot be bound; kOutOfCapacity.
  static Result<std::unique_ptr<ReplicaSocket>> open(const std::string& listen);
  ~ReplicaSocket();
  ReplicaSocket(const ReplicaSocket&) = delete;
  ReplicaSocket& operator=(const ReplicaSocket&) = delete;

  /// HOST:PORT as bound.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Readable when serve() has something to do; -1 while the publisher is closed.
  [[nodiscard]] int publisher_fd() const;
  /// Accepts subscriptions. Call it when publisher_fd() is readable, and once a second. Returns
  /// whether publisher_fd() is another one now.
  bool serve();
  /// False when the message was dropped at once.
  bool publish(std::string_view message);

  /// Connects to HOST:PORT, anew if it was connected. Failures are tried again by ZeroMQ.
  /// Returns the descriptor that becomes readable when messages wait; it belongs to the socket.
  /// Errors: kInvalidArgument for another form; kOutOfCapacity.
  Result<int> subscribe(const std::string& address);
  void unsubscribe(const std::string& address);
  /// Receives one message from the address. False when none waits. A message of several frames is
  /// received as an empty one.
  bool receive(const std::string& address, std::string& out);

 private:
  struct Closing {
    void operator()(void* socket) const;
  };
  using Socket = std::unique_ptr<void, Closing>;

  ReplicaSocket() = default;
  Result<Socket> make(int type, int message_bytes) const;
  Result<void> open_publisher(const std::string& listen);

  void* context_ = nullptr;
  Socket publisher_;
  std::string address_;
  int strange_ = 0;                            // Subscriptions since the publisher was opened.
  std::map<std::string, Socket> subscribers_;  // By address.
};

}  // namespace pegaflow::router
