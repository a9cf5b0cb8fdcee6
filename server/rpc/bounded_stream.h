#pragma once
/// \file
/// The bounds that Cap'n Proto's RPC system does not set for itself.

#include <cstddef>
#include <cstdint>

#include <capnp/rpc-twoparty.h>
#include <capnp/serialize-async.h>
#include <kj/async-io.h>
#include <kj/function.h>

#include "base/error.h"

namespace pegaflow::server {

/// The messages of one connection, counted as they arrive.
///
/// RpcSystem keeps an answer until the peer sends `finish` for it, and queues answers for a peer
/// that does not read; neither has a limit in KJ 0.9.2. Here both have one, and a message that
/// exceeds it ends the connection. Thread-bound.
class BoundedStream final : public capnp::MessageStream {
 public:
  struct Limits {
    std::size_t hello_words = std::size_t{64} << 10;  ///< Limit of a message before hello.
    std::size_t message_words = std::size_t{1} << 20;
    /// Calls whose answers the peer has not released. An engine has a few dozen.
    std::int64_t questions = 4096;
    /// Bytes queued for a peer that does not read: 128 answers of the largest kind.
    std::size_t queued_bytes = std::size_t{4} << 20;
  };

  /// `stream` outlives it. `on_end` is called once, when no further message will be read, with the
  /// reason unless the peer closed in order.
  BoundedStream(kj::AsyncCapabilityStream& stream, const Limits& limits,
                kj::Function<void(const Error*)> on_end);

  /// Sets the network that reads from this stream, whose queue is checked. Before the first
  /// message.
  void watch_queue_of(capnp::TwoPartyVatNetwork& network) { network_ = network; }
  /// Whether more answers are queued than a peer that reads would leave. Checked when a message
  /// arrives, and by the owner when an answer is queued.
  [[nodiscard]] bool queue_is_full();
  [[nodiscard]] Error queue_error() const;
  /// The peer has sent its hello: its messages may have full size now.
  void greeted() { is_greeted_ = true; }

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(
      kj::ArrayPtr<kj::AutoCloseFd> fd_space, capnp::ReaderOptions options,
      kj::ArrayPtr<capnp::word> scratch_space) override;
  kj::Promise<void> writeMessage(
      kj::ArrayPtr<const int> fds,
      kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override;
  kj::Promise<void> writeMessages(
      kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override;
  kj::Maybe<int> getSendBufferSize() override { return inner_.getSendBufferSize(); }
  kj::Promise<void> end() override { return inner_.end(); }

 private:
  void count(capnp::MessageReader& message);
  void ended(const Error* why);

  capnp::AsyncCapabilityMessageStream inner_;
  Limits limits_;
  kj::Function<void(const Error*)> on_end_;
  kj::Maybe<capnp::TwoPartyVatNetwork&> network_;
  bool is_greeted_ = false;
  bool has_ended_ = false;
  std::int64_t questions_ = 0;
};

}  // namespace pegaflow::server
