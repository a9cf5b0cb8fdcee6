#include "index/events/event_socket.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>

#include <sys/epoll.h>
#include <zmq.h>

#include "base/assert.h"
#include "base/os/mailbox.h"
#include "base/os/thread.h"
#include "base/os/unique_fd.h"
#include "index/events/kv_event_sources.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kCommands = 8192;
constexpr int kMessagesPerVisit = 64;          // Of one socket, before the next one gets its turn.
constexpr std::size_t kWaitingPerStream = 16;  // Reports that found the queue full.
constexpr int kRetryMs = 5;                    // While the owner's queue is full.
constexpr std::size_t kMostFrames = 5;
constexpr std::uint64_t kWake = 0;  // Of the mailbox of commands, in epoll's data.

// ---- libzmq: sockets and messages, and its failures as values

tl::unexpected<Error> fail_zmq(std::string_view what, std::string_view object) {
  const int code = zmq_errno();
  const Errc errc =
      code == EMFILE || code == ENOMEM ? Errc::kOutOfCapacity : Errc::kInvalidArgument;
  return fail(errc, "{} {}: {}", what, object, zmq_strerror(code));
}

// Closes its socket when destroyed.
class ZmqSocket {
 public:
  ZmqSocket() = default;
  ZmqSocket(void* context, int type) : socket_(zmq_socket(context, type)) {}
  ZmqSocket(ZmqSocket&& other) noexcept : socket_(std::exchange(other.socket_, nullptr)) {}
  ZmqSocket& operator=(ZmqSocket&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  ~ZmqSocket() {
    if (socket_ != nullptr) zmq_close(socket_);
  }

  explicit operator bool() const { return socket_ != nullptr; }
  [[nodiscard]] void* get() const { return socket_; }
  template <typename T>
  bool set(int option, T value) {
    return zmq_setsockopt(socket_, option, &value, sizeof(value)) == 0;
  }
  [[nodiscard]] int fd() const {
    int fd = -1;
    std::size_t size = sizeof(fd);
    zmq_getsockopt(socket_, ZMQ_FD, &fd, &size);
    return fd;
  }

 private:
  void* socket_ = nullptr;
};

// One message of up to kMostFrames frames. A longer one is received and counts as malformed.
class Message {
 public:
  Message() = default;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  ~Message() { clear(); }

  // False when no message waits.
  bool receive(void* socket) {
    clear();
    for (bool more = true; more;) {
      zmq_msg_t* const frame = &frames_[std::min(count_, kMostFrames)];
      zmq_msg_init(frame);
      if (zmq_msg_recv(frame, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(frame);
        return false;
      }
      more = zmq_msg_more(frame) != 0;
      if (count_ < kMostFrames) {
        ++count_;
      } else {
        zmq_msg_close(frame);
        too_long_ = true;
      }
    }
    return true;
  }
  [[nodiscard]] std::size_t frames() const { return too_long_ ? kMostFrames + 1 : count_; }
  [[nodiscard]] std::span<const std::byte> frame(std::size_t i) {
    return {static_cast<const std::byte*>(zmq_msg_data(&frames_[i])), zmq_msg_size(&frames_[i])};
  }
  // The sequence number is the frame before the payload in every shape: [topic, seq, payload],
  // replays ["", seq, payload] and ["", topic, seq, payload].
  [[nodiscard]] std::optional<std::uint64_t> sequence() {
    if (too_long_ || count_ < 2 || frame(count_ - 2).size() != sizeof(std::uint64_t)) {
      return std::nullopt;
    }
    return low64(frame(count_ - 2));
  }
  [[nodiscard]] std::span<const std::byte> payload() { return frame(count_ - 1); }

 private:
  void clear() {
    for (std::size_t i = 0; i < count_; ++i) zmq_msg_close(&frames_[i]);
    count_ = 0;
    too_long_ = false;
  }

  std::array<zmq_msg_t, kMostFrames + 1> frames_;  // The last one for what is too long.
  std::size_t count_ = 0;
  bool too_long_ = false;
};

constexpr std::uint64_t kEndOfReplay = UINT64_MAX;

struct Command {
  enum class Kind : std::uint8_t { kAdd, kRemove, kReplay, kStop };
  Kind kind = Kind::kStop;
  StreamId stream = 0;
  EventSocket::Stream config;
  std::uint64_t ticket = 0;
  std::uint64_t sequence = 0;
};

// The sockets of one stream.
struct Subscription {
  StreamId id = 0;
  EventSocket::Stream config;
  KvEventDecoder decoder;
  ZmqSocket events;   // SUB
  ZmqSocket monitor;  // PAIR: connections of `events`.
  ZmqSocket replay;   // DEALER, while a replay is open.
  std::uint64_t ticket = 0;
  bool is_connected = false;
  bool was_connected = false;  // Until its sockets are closed.
  TimePoint connected_at;
  Duration delay{};             // Before the next attempt.
  bool overflowed = false;      // Live batches were dropped, and the owner has no report of it.
  std::deque<Arrival> waiting;  // Reports that found the queue full; then live batches are dropped.
};

Arrival arrival_of(const Subscription& stream, Arrival::Kind kind) {
  Arrival arrival;
  arrival.stream = stream.id;
  arrival.kind = kind;
  return arrival;
}

}  // namespace

// ---- the thread

// Everything but the mailboxes and the counters belongs to the thread.
class EventSocket::Thread {
 public:
  explicit Thread(const Options& options)
      : options_(options), commands_(kCommands), arrivals_(options.queue_batches) {}
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread() {
    if (thread_.joinable()) {
      stopping_.store(true, std::memory_order_release);  // Pairs with the load in run().
      (void)commands_.try_send(Command{});               // A full mailbox wakes the thread as well.
      thread_.join();
    }
    subscriptions_.clear();
    if (context_ != nullptr) zmq_ctx_term(context_);
  }

  Result<void> start() {
    context_ = zmq_ctx_new();
    if (context_ == nullptr) return fail_zmq("start", "ZeroMQ");
    const auto sockets = static_cast<int>(3 * options_.max_streams + 16);
    if (zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, sockets) != 0) {
      return fail_zmq("reserve sockets of", "ZeroMQ");
    }
    zmq_ctx_set(context_, ZMQ_BLOCKY, 0);
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_) return fail_errno(errno, "create an epoll descriptor");
    watch(commands_.fd(), kWake, EPOLLIN);
    PEGA_TRY_LET(thread_, start_thread("pega-events", [this] { run(); }));
    return {};
  }

  [[nodiscard]] bool send(Command command) { return commands_.try_send(std::move(command)); }
  [[nodiscard]] int fd() const noexcept { return arrivals_.fd(); }

  std::size_t drain(std::size_t most, const std::function<void(Arrival&&)>& use) {
    return arrivals_.drain(
        [&](Arrival&& arrival) {
          queued_bytes_.fetch_sub(arrival.batch.bytes(), std::memory_order_relaxed);
          queued_.fetch_sub(1, std::memory_order_relaxed);
          use(std::move(arrival));
        },
        most);
  }

  [[nodiscard]] Stats stats() const {
    const auto get = [](const std::atomic<std::uint64_t>& counter) {
      return counter.load(std::memory_order_relaxed);
    };
    return {.batches = get(batches_),
            .bytes = get(bytes_),
            .blocks = get(blocks_),
            .undecodable = get(undecodable_),
            .malformed = get(malformed_),
            .dropped = get(dropped_),
            .replays = get(replays_),
            .connects = get(connects_)};
  }

 private:
  using Iterator = std::map<std::uint64_t, Subscription>::iterator;

  void watch(int fd, std::uint64_t number, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = number;
    const int added = ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
    PEGA_ASSERT(added == 0 || errno == EEXIST, "epoll_ctl: errno {}", errno);
  }

  void run() {
    std::array<epoll_event, 64> events{};
    while (!stopping_.load(std::memory_order_acquire)) {
      const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                     next_timeout_ms());
      for (int i = 0; i < count; ++i) {
        const std::uint64_t number = events[static_cast<std::size_t>(i)].data.u64;
        if (number == kWake) {
          commands_.drain([this](Command&& command) { execute(std::move(command)); });
        } else {
          ready_.insert(number);
        }
      }
      if (count == 0) ready_.merge(std::exchange(blocked_, {}));
      open_due();
      for (const std::uint64_t number : std::exchange(ready_, {})) {
        const auto found = subscriptions_.find(number);
        if (found != subscriptions_.end()) visit(number, found->second);
      }
    }
  }

  // Until the first stream is opened again, or the owner's queue is tried again; -1 without either.
  [[nodiscard]] int next_timeout_ms() const {
    if (!ready_.empty()) return 0;
    Duration wait = blocked_.empty() ? Duration::max() : std::chrono::milliseconds(kRetryMs);
    if (!closed_.empty()) wait = std::min(wait, closed_.begin()->first - clock_.now());
    if (wait == Duration::max()) return -1;
    return std::max(0, 1 + static_cast<int>(wait / std::chrono::milliseconds(1)));
  }

  // ZeroMQ does not connect again after a violation of its protocol, a frame above the limit among
  // them, and keeps messages of the former connection. So a lost connection gets new sockets.
  void close_broken(std::uint64_t number, Subscription& stream) {
    stream.events = ZmqSocket();
    stream.monitor = ZmqSocket();
    const TimePoint now = clock_.now();
    const bool lasted = now - stream.connected_at > options_.most_reconnect;
    stream.delay =
        lasted ? options_.least_reconnect : std::max(stream.delay, options_.least_reconnect);
    closed_.emplace(now + stream.delay, number);
    stream.delay = std::min(2 * stream.delay, options_.most_reconnect);
  }

  void open_due() {
    while (!closed_.empty() && closed_.begin()->first <= clock_.now()) {
      const std::uint64_t number = closed_.begin()->second;
      closed_.erase(closed_.begin());
      const auto found = subscriptions_.find(number);
      if (found != subscriptions_.end()) open_or_report(number, found->second);
    }
  }

  void open_or_report(std::uint64_t number, Subscription& stream) {
    if (auto opened = open(number, stream); !opened) {
      Arrival arrival = arrival_of(stream, Arrival::Kind::kDisconnected);
      arrival.note = opened.error().detail;
      report(stream, std::move(arrival));
    }
    ready_.insert(number);  // Its descriptors signal changes only from here on.
  }

  void execute(Command&& command) {
    if (command.kind == Command::Kind::kAdd) {
      add(std::move(command));
      return;
    }
    const auto number = numbers_.find(command.stream);
    if (number == numbers_.end()) return;
    if (command.kind == Command::Kind::kReplay) {
      open_replay(number->second, subscriptions_.at(number->second), command);
    } else {
      subscriptions_.erase(number->second);
      numbers_.erase(number);
    }
  }

  void add(Command&& command) {
    const std::uint64_t number = ++last_number_;
    numbers_[command.stream] = number;
    Subscription& stream = subscriptions_[number];
    stream.id = command.stream;
    stream.config = std::move(command.config);
    stream.decoder = KvEventDecoder(stream.config.decoder);
    open_or_report(number, stream);
  }

  // Options of every socket that connects to an engine.
  bool configure(ZmqSocket& socket) const {
    using std::chrono::duration_cast;
    using std::chrono::milliseconds;
    const auto ms = [](Duration time) {
      return static_cast<int>(duration_cast<milliseconds>(time).count());
    };
    return socket.set(ZMQ_LINGER, 0) && socket.set(ZMQ_RCVHWM, options_.receive_limit) &&
           socket.set(ZMQ_MAXMSGSIZE, static_cast<std::int64_t>(options_.max_frame_bytes)) &&
           socket.set(ZMQ_RECONNECT_IVL, ms(options_.least_reconnect)) &&
           socket.set(ZMQ_RECONNECT_IVL_MAX, ms(options_.most_reconnect)) &&
           socket.set(ZMQ_IPV6, 1) && socket.set(ZMQ_TCP_KEEPALIVE, 1) &&
           socket.set(ZMQ_TCP_KEEPALIVE_IDLE, 10) && socket.set(ZMQ_TCP_KEEPALIVE_INTVL, 5) &&
           socket.set(ZMQ_TCP_KEEPALIVE_CNT, 3);
  }

  Result<void> open(std::uint64_t number, Subscription& stream) {
    stream.events = ZmqSocket(context_, ZMQ_SUB);
    if (!stream.events || !configure(stream.events) ||
        zmq_setsockopt(stream.events.get(), ZMQ_SUBSCRIBE, stream.config.topic.data(),
                       stream.config.topic.size()) != 0) {
      return fail_zmq("open a socket for", stream.config.endpoint);
    }
    const std::string name = fmt::format("inproc://events-{}", ++last_monitor_);
    if (zmq_socket_monitor(stream.events.get(), name.c_str(),
                           ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) != 0) {
      return fail_zmq("watch the connection to", stream.config.endpoint);
    }
    stream.monitor = ZmqSocket(context_, ZMQ_PAIR);
    if (!stream.monitor || !stream.monitor.set(ZMQ_LINGER, 0) ||
        zmq_connect(stream.monitor.get(), name.c_str()) != 0 ||
        zmq_connect(stream.events.get(), stream.config.endpoint.c_str()) != 0) {
      return fail_zmq("connect to", stream.config.endpoint);
    }
    watch(stream.monitor.fd(), number, EPOLLIN | EPOLLET);
    watch(stream.events.fd(), number, EPOLLIN | EPOLLET);
    return {};
  }

  void open_replay(std::uint64_t number, Subscription& stream, const Command& command) {
    replays_.fetch_add(1, std::memory_order_relaxed);
    stream.ticket = command.ticket;
    // A new socket for each replay, so that late messages of another one cannot be mistaken.
    stream.replay = ZmqSocket(context_, ZMQ_DEALER);
    std::array<std::byte, sizeof(std::uint64_t)> from{};
    for (std::size_t i = 0; i < from.size(); ++i) {
      from[i] = static_cast<std::byte>(command.sequence >> 8U * (from.size() - 1 - i));
    }
    void* const socket = stream.replay.get();
    if (!stream.replay || !configure(stream.replay) ||
        zmq_connect(socket, stream.config.replay_endpoint.c_str()) != 0 ||
        zmq_send(socket, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
        zmq_send(socket, from.data(), from.size(), ZMQ_DONTWAIT) < 0) {
      const auto error = fail_zmq("request a replay from", stream.config.replay_endpoint);
      end_replay(stream, Arrival::Kind::kReplayFailed, error.value().detail);
      return;
    }
    watch(stream.replay.fd(), number, EPOLLIN | EPOLLET);
    ready_.insert(number);
  }

  void end_replay(Subscription& stream, Arrival::Kind kind, std::string note) {
    stream.replay = ZmqSocket();
    Arrival arrival = arrival_of(stream, kind);
    arrival.ticket = stream.ticket;
    arrival.note = std::move(note);
    report(stream, std::move(arrival));
  }

  // Receives what waits on the sockets of a stream. The descriptors signal changes only, so a
  // stream with more to receive is visited again.
  void visit(std::uint64_t number, Subscription& stream) {
    flush(stream);
    receive_connections(stream);
    Message message;
    int received = 0;
    while (received < kMessagesPerVisit && stream.events && message.receive(stream.events.get())) {
      ++received;
      // A message of a new connection comes behind the report of that connection.
      receive_connections(stream);
      receive_live(stream, message);
    }
    int replayed = 0;
    while (replayed < kMessagesPerVisit && stream.replay && has_room_for_replays() &&
           message.receive(stream.replay.get())) {
      ++replayed;
      receive_replayed(stream, message);
    }
    flush(stream);
    if (!stream.is_connected && stream.was_connected && received < kMessagesPerVisit) {
      stream.was_connected = false;
      close_broken(number, stream);
    }
    if (received == kMessagesPerVisit || replayed == kMessagesPerVisit) ready_.insert(number);
    const bool stalled = stream.replay && !has_room_for_replays();
    if (stalled || stream.overflowed || !stream.waiting.empty()) blocked_.insert(number);
  }

  void receive_connections(Subscription& stream) {
    Message message;
    while (stream.monitor && message.receive(stream.monitor.get())) {
      if (message.frames() == 0 || message.frame(0).size() < sizeof(std::uint16_t)) continue;
      std::uint16_t event = 0;
      std::memcpy(&event, message.frame(0).data(), sizeof(event));
      const bool connected = event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
      if (connected == stream.is_connected) continue;
      stream.is_connected = connected;
      if (connected) {
        connects_.fetch_add(1, std::memory_order_relaxed);
        stream.was_connected = true;
        stream.connected_at = clock_.now();
      }
      report(stream, arrival_of(stream, connected ? Arrival::Kind::kConnected
                                                  : Arrival::Kind::kDisconnected));
    }
  }

  Arrival decode(const Subscription& stream, Arrival::Kind kind, std::uint64_t sequence,
                 std::span<const std::byte> payload) {
    Arrival arrival = arrival_of(stream, kind);
    arrival.sequence = sequence;
    if (Result<KvBatch> batch = stream.decoder.decode(payload)) {
      arrival.batch = std::move(*batch);
    } else {
      arrival.batch.undecodable = true;
      arrival.batch.wire_bytes = payload.size();
      arrival.note = batch.error().detail;
      undecodable_.fetch_add(1, std::memory_order_relaxed);
    }
    batches_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(payload.size(), std::memory_order_relaxed);
    blocks_.fetch_add(arrival.batch.blocks(), std::memory_order_relaxed);
    return arrival;
  }

  void receive_live(Subscription& stream, Message& message) {
    const std::optional<std::uint64_t> sequence = message.sequence();
    if (!sequence || message.frames() > kMostFrames) {
      malformed_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    flush(stream);
    if (!stream.overflowed && stream.waiting.empty()) {
      Arrival arrival = decode(stream, Arrival::Kind::kLive, *sequence, message.payload());
      if (enqueue(arrival)) return;
    }
    stream.overflowed = true;
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }

  void receive_replayed(Subscription& stream, Message& message) {
    const std::optional<std::uint64_t> sequence = message.sequence();
    const std::size_t frames = message.frames();
    if (!sequence || frames < 3 || frames > kMostFrames) {
      malformed_.fetch_add(1, std::memory_order_relaxed);
      end_replay(stream, Arrival::Kind::kReplayFailed,
                 fmt::format("{} answered a replay with a message of {} frames",
                             stream.config.replay_endpoint, frames));
      return;
    }
    if (*sequence == kEndOfReplay) {
      end_replay(stream, Arrival::Kind::kReplayEnd, {});
      return;
    }
    Arrival arrival = decode(stream, Arrival::Kind::kReplayed, *sequence, message.payload());
    arrival.ticket = stream.ticket;
    // has_room_for_replays() and this thread being the only sender leave a place for it.
    if (!enqueue(arrival)) {
      end_replay(stream, Arrival::Kind::kReplayFailed, "the queue of batches is full");
    }
  }

  // ---- the queue to the owner

  // Half of the queue stays free for live batches, which cannot wait.
  [[nodiscard]] bool has_room_for_replays() const {
    return queued_.load(std::memory_order_relaxed) < options_.queue_batches / 2 &&
           queued_bytes_.load(std::memory_order_relaxed) < options_.queue_bytes / 2;
  }

  // Moves from `arrival` only if there is room.
  bool enqueue(Arrival& arrival) {
    const std::size_t bytes = arrival.batch.bytes();
    if (queued_bytes_.load(std::memory_order_relaxed) + bytes > options_.queue_bytes) return false;
    queued_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    queued_.fetch_add(1, std::memory_order_relaxed);
    if (arrivals_.try_send(std::move(arrival))) return true;
    queued_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    queued_.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }

  // Sends a report without a batch, or keeps it until there is room.
  void report(Subscription& stream, Arrival arrival) {
    flush(stream);
    if (!stream.overflowed && stream.waiting.empty() && enqueue(arrival)) return;
    if (stream.waiting.size() == kWaitingPerStream) {
      // Connections came and went many times: the state of today is what matters.
      stream.waiting.clear();
      stream.waiting.push_back(arrival_of(stream, Arrival::Kind::kDisconnected));
    }
    stream.waiting.push_back(std::move(arrival));
  }

  void flush(Subscription& stream) {
    if (stream.overflowed) {
      Arrival overflow = arrival_of(stream, Arrival::Kind::kOverflow);
      if (!enqueue(overflow)) return;
      stream.overflowed = false;
    }
    while (!stream.waiting.empty()) {
      if (!enqueue(stream.waiting.front())) return;
      stream.waiting.pop_front();
    }
  }

  const Options options_;
  Mailbox<Command> commands_;
  Mailbox<Arrival> arrivals_;
  std::atomic<std::size_t> queued_{0};
  std::atomic<std::size_t> queued_bytes_{0};
  std::atomic<std::uint64_t> batches_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> blocks_{0};
  std::atomic<std::uint64_t> undecodable_{0};
  std::atomic<std::uint64_t> malformed_{0};
  std::atomic<std::uint64_t> dropped_{0};
  std::atomic<std::uint64_t> replays_{0};
  std::atomic<std::uint64_t> connects_{0};
  std::atomic<bool> stopping_{false};

  void* context_ = nullptr;
  UniqueFd epoll_;
  std::map<std::uint64_t, Subscription> subscriptions_;  // By a number of the thread's own.
  std::map<StreamId, std::uint64_t> numbers_;
  std::multimap<TimePoint, std::uint64_t> closed_;  // Streams to open again.
  SteadyClock clock_;
  std::uint64_t last_number_ = kWake;
  std::uint64_t last_monitor_ = 0;
  std::set<std::uint64_t> ready_;    // Visited in this iteration.
  std::set<std::uint64_t> blocked_;  // Visited after kRetryMs: the owner's queue is full.
  std::thread thread_;
};

// ---- the owner's side

EventSocket::EventSocket(std::unique_ptr<Thread> thread) : thread_(std::move(thread)) {}
EventSocket::~EventSocket() = default;

Result<std::unique_ptr<EventSocket>> EventSocket::start(const Options& options) {
  auto thread = std::make_unique<Thread>(options);
  PEGA_TRY(thread->start());
  std::unique_ptr<EventSocket> socket(new EventSocket(std::move(thread)));
  socket->max_streams_ = options.max_streams;
  return socket;
}

Result<void> EventSocket::add(StreamId id, Stream stream) {
  PEGA_TRY(check_event_endpoint(stream.endpoint));
  if (!stream.replay_endpoint.empty()) PEGA_TRY(check_event_endpoint(stream.replay_endpoint));
  if (streams_.contains(id)) {
    return fail(Errc::kInvalidArgument, "subscribe to {}: stream {} exists", stream.endpoint, id);
  }
  if (streams_.size() >= max_streams_) {
    return fail(Errc::kOutOfCapacity, "subscribe to {}: there are {} streams already",
                stream.endpoint, max_streams_);
  }
  const bool can_replay = !stream.replay_endpoint.empty();
  Command command;
  command.kind = Command::Kind::kAdd;
  command.stream = id;
  command.config = std::move(stream);
  if (!thread_->send(std::move(command))) {
    return fail(Errc::kBusy, "subscribe: {} commands wait", kCommands);
  }
  streams_[id] = can_replay;
  return {};
}

Result<void> EventSocket::remove(StreamId id) {
  if (!streams_.contains(id)) return {};
  Command command;
  command.kind = Command::Kind::kRemove;
  command.stream = id;
  if (!thread_->send(std::move(command))) {
    return fail(Errc::kBusy, "unsubscribe: {} commands wait", kCommands);
  }
  streams_.erase(id);
  return {};
}

Result<void> EventSocket::replay(StreamId id, std::uint64_t ticket, std::uint64_t sequence) {
  const auto found = streams_.find(id);
  if (found == streams_.end() || !found->second) {
    return fail(Errc::kInvalidArgument, "request a replay: stream {} {}", id,
                found == streams_.end() ? "does not exist" : "has no replay endpoint");
  }
  Command command;
  command.kind = Command::Kind::kReplay;
  command.stream = id;
  command.ticket = ticket;
  command.sequence = sequence;
  if (!thread_->send(std::move(command))) {
    return fail(Errc::kBusy, "request a replay: {} commands wait", kCommands);
  }
  return {};
}

int EventSocket::fd() const noexcept { return thread_->fd(); }

std::size_t EventSocket::drain(std::size_t most, const std::function<void(Arrival&&)>& use) {
  return thread_->drain(most, use);
}

EventSocket::Stats EventSocket::stats() const { return thread_->stats(); }

}  // namespace pegaflow::index
