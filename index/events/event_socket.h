#pragma once
/// \file
/// Subscriptions to the event streams of engines over ZeroMQ, on a thread of their own.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "index/events/kv_event.h"

namespace pegaflow::index {

/// Number of a subscription, chosen by the owner and never used twice.
using StreamId = std::uint64_t;

/// An event of one stream, in the order in which the thread received it.
struct Arrival {
  enum class Kind : std::uint8_t {
    kConnected,     ///< The subscription has a connection.
    kDisconnected,  ///< It lost its connection; ZeroMQ connects again by itself.
    kLive,          ///< A batch of the subscription. If `batch.undecodable`, `note` tells why.
    kReplayed,      ///< A batch of the replay `ticket`; the same.
    kReplayEnd,     ///< The replay's end marker.
    kReplayFailed,  ///< The replay cannot be requested or returned a message of another form.
    kOverflow,      ///< Live batches were dropped, because the owner was slow.
  };
  StreamId stream = 0;
  Kind kind = Kind::kConnected;
  std::uint64_t sequence = 0;
  std::uint64_t ticket = 0;
  KvBatch batch;
  std::string note;
};

/// Receives events of many engines. Owns one thread, `pega-events`, and all sockets.
///
/// Only connects, never listens: to the configured engines over `tcp://` and `ipc://`. Each stream
/// is a SUB socket; a replay is a DEALER socket that lives until the end marker. Batches are
/// decoded on the thread and cross to the owner through a bounded queue.
///
/// The subscriptions are always read, because a publisher whose queue is full stops its engine.
/// When the owner is slow, live batches are dropped, counted, and reported as kOverflow, once for
/// each stream, as soon as the queue has room; replays wait instead. Nothing grows. A frame above
/// Options::max_frame_bytes closes its connection. Lost connections are opened again with a delay
/// from 100 ms to 5 s.
///
/// All functions belong to the owner's thread. Without traffic the thread sleeps and costs nothing.
class EventSocket {
 public:
  struct Options {
    std::size_t max_streams = 4096;
    std::size_t queue_batches = 4096;                   ///< Decoded batches for the owner.
    std::size_t queue_bytes = std::size_t{256} << 20U;  ///< Memory of these batches.
    std::size_t max_frame_bytes = std::size_t{64} << 20U;
    int receive_limit = 10'000;  ///< Messages that ZeroMQ keeps for each socket (RCVHWM).
    Duration least_reconnect = std::chrono::milliseconds(100);
    Duration most_reconnect = std::chrono::seconds(5);
  };
  struct Stream {
    std::string endpoint;         ///< `tcp://HOST:PORT` or `ipc://PATH`.
    std::string replay_endpoint;  ///< The same; empty: no replays.
    std::string topic;            ///< Prefix; empty is everything.
    KvEventDecoder::Options decoder;
  };
  /// Counters of all streams since the start.
  struct Stats {
    std::uint64_t batches = 0;
    std::uint64_t bytes = 0;  ///< Sum of payloads.
    std::uint64_t blocks = 0;
    std::uint64_t undecodable = 0;  ///< Payloads that are no batch.
    std::uint64_t malformed = 0;    ///< Messages with other frames: ignored.
    std::uint64_t dropped = 0;      ///< Live batches for which the queue had no room.
    std::uint64_t replays = 0;
    std::uint64_t connects = 0;
  };

  /// Errors: kOutOfCapacity when the system refuses the thread or the sockets.
  static Result<std::unique_ptr<EventSocket>> start(const Options& options);
  /// Closes all sockets and joins the thread.
  ~EventSocket();
  EventSocket(const EventSocket&) = delete;
  EventSocket& operator=(const EventSocket&) = delete;

  /// Subscribes. Failures of the connection are retried forever and are visible as the lack of a
  /// kConnected.
  /// Errors: kInvalidArgument for an endpoint of another form; kOutOfCapacity beyond max_streams;
  /// kBusy when too many commands wait.
  Result<void> add(StreamId id, Stream stream);
  /// Closes the stream. Arrivals that are queued already are still delivered; the owner ignores
  /// them.
  /// Idempotent. Errors: kBusy when too many commands wait.
  Result<void> remove(StreamId id);
  /// Requests the batches from `sequence` on. Replaces an open replay of the stream, whose
  /// remaining batches are discarded. The replay ends with kReplayEnd or kReplayFailed; there is no
  /// timeout here. Errors: kInvalidArgument for an unknown stream or one without a replay endpoint;
  /// kBusy when too many commands wait.
  Result<void> replay(StreamId id, std::uint64_t ticket, std::uint64_t sequence);

  /// Readable while arrivals wait. For the owner's event loop.
  [[nodiscard]] int fd() const noexcept;
  /// Passes at most `most` arrivals to `use`, and returns their count. When it returns `most`, fd()
  /// stays readable.
  std::size_t drain(std::size_t most, const std::function<void(Arrival&&)>& use);

  [[nodiscard]] Stats stats() const;

 private:
  class Thread;
  explicit EventSocket(std::unique_ptr<Thread> thread);
  std::unique_ptr<Thread> thread_;
  std::map<StreamId, bool> streams_;  // Whether the stream has a replay endpoint.
  std::size_t max_streams_ = 0;
};

}  // namespace pegaflow::index
