// EventSocket against real publishers: PUB and ROUTER sockets of libzmq, as vLLM's
// ZmqEventPublisher uses them.
#include "index/events/event_socket.h"

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include <poll.h>
#include <zmq.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/patience.h"

namespace pegaflow::index {
namespace {

using Json = nlohmann::json;
using Bytes = std::vector<std::uint8_t>;
using Kind = Arrival::Kind;

Bytes stored(std::uint64_t hash, std::size_t padding = 0) {
  Json event = {{"type", "BlockStored"},
                {"block_hashes", Json::array({hash})},
                {"parent_block_hash", nullptr},
                {"token_ids", Json::array()},
                {"block_size", 16},
                {"padding", std::string(padding, 'x')}};
  return Json::to_msgpack(Json::array({1.0, Json::array({event}), 0}));
}

// An engine's publisher: PUB for live batches, ROUTER for replays, on ports that the system
// chooses.
class Publisher {
 public:
  Publisher() : context_(zmq_ctx_new()) { open("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"); }
  ~Publisher() {
    close();
    zmq_ctx_term(context_);
  }
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  void close() {
    zmq_close(events_);
    zmq_close(replay_);
    events_ = replay_ = nullptr;
  }
  // Another process at the same addresses, with sequence numbers from 0.
  void restart() {
    const std::string events = endpoint;
    const std::string replay = replay_endpoint;
    close();
    buffer.clear();
    open(events, replay);
  }

  void send(std::uint64_t sequence, const Bytes& payload) {
    buffer.emplace_back(sequence, payload);
    send_frames(events_, {Bytes{'k', 'v'}, number(sequence), payload});
  }
  void send_frames(const std::vector<Bytes>& frames) { send_frames(events_, frames); }

  // Answers a waiting request as vLLM does, with or without the topic; true if there was one.
  bool answer_replay(bool with_topic, bool with_end = true) {
    std::vector<Bytes> request;
    int more = 1;
    while (more != 0) {
      zmq_msg_t frame;
      zmq_msg_init(&frame);
      if (zmq_msg_recv(&frame, replay_, ZMQ_DONTWAIT) < 0) return false;
      const auto* const data = static_cast<const std::uint8_t*>(zmq_msg_data(&frame));
      request.emplace_back(data, data + zmq_msg_size(&frame));
      more = zmq_msg_more(&frame);
      zmq_msg_close(&frame);
    }
    REQUIRE(request.size() == 3);
    CHECK(request[1].empty());
    REQUIRE(request[2].size() == 8);
    const auto from = low64(std::as_bytes(std::span(request[2])));
    const auto reply = [&](const Bytes& topic, const Bytes& sequence, const Bytes& payload) {
      std::vector<Bytes> frames{request[0], {}, sequence, payload};
      if (with_topic) frames.insert(frames.begin() + 2, topic);
      send_frames(replay_, frames);
    };
    for (const auto& [sequence, payload] : buffer) {
      if (sequence >= from) reply(Bytes{'k', 'v'}, number(sequence), payload);
    }
    if (with_end) reply({}, number(UINT64_MAX), {});
    return true;
  }

  std::string endpoint;
  std::string replay_endpoint;
  std::deque<std::pair<std::uint64_t, Bytes>> buffer;

 private:
  static Bytes number(std::uint64_t value) {
    Bytes bytes(8);
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(value >> 8 * (7 - i));
    return bytes;
  }
  static std::string bound(void* socket, const std::string& to) {
    // The former socket of a restart frees its port in ZeroMQ's own time.
    const auto deadline = std::chrono::steady_clock::now() + testing::kHang;
    while (zmq_bind(socket, to.c_str()) != 0) {
      REQUIRE(zmq_errno() == EADDRINUSE);
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      ::poll(nullptr, 0, 1);
    }
    std::array<char, 256> name{};
    std::size_t size = name.size();
    REQUIRE(zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, name.data(), &size) == 0);
    return name.data();
  }
  void open(const std::string& events, const std::string& replay) {
    events_ = zmq_socket(context_, ZMQ_PUB);
    replay_ = zmq_socket(context_, ZMQ_ROUTER);
    const int none = 0;
    zmq_setsockopt(events_, ZMQ_LINGER, &none, sizeof(none));
    zmq_setsockopt(replay_, ZMQ_LINGER, &none, sizeof(none));
    const int deep = 100'000;
    zmq_setsockopt(events_, ZMQ_SNDHWM, &deep, sizeof(deep));
    zmq_setsockopt(replay_, ZMQ_SNDHWM, &deep, sizeof(deep));
    endpoint = bound(events_, events);
    replay_endpoint = bound(replay_, replay);
  }
  static void send_frames(void* socket, const std::vector<Bytes>& frames) {
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const int flags = i + 1 < frames.size() ? ZMQ_SNDMORE : 0;
      REQUIRE(zmq_send(socket, frames[i].data(), frames[i].size(), flags) >= 0);
    }
  }

  void* context_;
  void* events_ = nullptr;
  void* replay_ = nullptr;
};

// A socket with what arrived.
struct Rig {
  explicit Rig(const EventSocket::Options& options = {}) {
    auto started = EventSocket::start(options);
    REQUIRE(started);
    socket = std::move(*started);
  }
  void add(StreamId id, const Publisher& publisher, std::string topic = "") {
    REQUIRE(socket->add(id, {.endpoint = publisher.endpoint,
                             .replay_endpoint = publisher.replay_endpoint,
                             .topic = std::move(topic),
                             .decoder = {}}));
  }
  // Waits until `done` holds, draining; `work` runs between waits.
  void until(
      const std::function<bool()>& done, const std::function<void()>& work = [] {}) {
    const auto deadline = std::chrono::steady_clock::now() + testing::kHang;
    while (!done()) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      work();
      pollfd waits{.fd = socket->fd(), .events = POLLIN, .revents = 0};
      ::poll(&waits, 1, 10);
      socket->drain(64, [this](Arrival&& arrival) { arrivals.push_back(std::move(arrival)); });
    }
  }
  [[nodiscard]] std::size_t count(Kind kind, StreamId stream = 1) const {
    std::size_t sum = 0;
    for (const Arrival& arrival : arrivals) sum += arrival.kind == kind && arrival.stream == stream;
    return sum;
  }
  [[nodiscard]] std::vector<std::uint64_t> sequences(Kind kind) const {
    std::vector<std::uint64_t> found;
    for (const Arrival& arrival : arrivals) {
      if (arrival.kind == kind) found.push_back(arrival.sequence);
    }
    return found;
  }
  // A subscription reaches the publisher some time after the connection: batches are published
  // until one arrives. Returns the next sequence number.
  std::uint64_t subscribe(Publisher& publisher, StreamId stream = 1, std::uint64_t sequence = 0) {
    const std::size_t before = count(Kind::kLive, stream);
    until([&] { return count(Kind::kLive, stream) > before; },
          [&] { publisher.send(sequence, stored(sequence)), ++sequence; });
    return sequence;
  }

  std::unique_ptr<EventSocket> socket;
  std::vector<Arrival> arrivals;
};

}  // namespace

TEST_SUITE("EventSocket") {
  TEST_CASE("a connection is reported before its batches, which arrive decoded and in order") {
    Publisher publisher;
    Rig rig;
    rig.add(1, publisher);
    const std::uint64_t first = rig.subscribe(publisher);
    for (std::uint64_t i = first; i < first + 500; ++i) publisher.send(i, stored(i));
    rig.until([&] { return rig.arrivals.back().sequence == first + 499; });

    CHECK(rig.arrivals.front().kind == Kind::kConnected);
    const auto sequences = rig.sequences(Kind::kLive);
    for (std::size_t i = 1; i < sequences.size(); ++i) {
      REQUIRE(sequences[i] == sequences[i - 1] + 1);
    }
    const KvBatch& batch = rig.arrivals.back().batch;
    CHECK(batch.rank == 0U);
    CHECK(batch.events.at(0).hashes[0] == first + 499);
    CHECK(rig.socket->stats().batches == sequences.size());
    CHECK(rig.socket->stats().dropped == 0);
  }

  TEST_CASE("a replay in both shapes, and its end") {
    for (const bool with_topic : {true, false}) {
      Publisher publisher;
      Rig rig;
      rig.add(1, publisher);
      for (std::uint64_t i = 0; i < 200; ++i) publisher.buffer.emplace_back(i, stored(i));
      REQUIRE(rig.socket->replay(1, 77, 150));

      rig.until([&] { return rig.count(Kind::kReplayEnd) == 1; },
                [&] { publisher.answer_replay(with_topic); });

      const auto sequences = rig.sequences(Kind::kReplayed);
      REQUIRE(sequences.size() == 50);
      CHECK(sequences.front() == 150);
      CHECK(sequences.back() == 199);
      for (const Arrival& arrival : rig.arrivals) {
        if (arrival.kind == Kind::kReplayed) CHECK(arrival.ticket == 77);
      }
    }
  }

  TEST_CASE("a new replay replaces an open one, whose late answers do not arrive") {
    Publisher publisher;
    Rig rig;
    rig.add(1, publisher);
    publisher.buffer.emplace_back(0, stored(0));
    REQUIRE(rig.socket->replay(1, 1, 0));
    rig.until([&] { return rig.count(Kind::kReplayed) == 1; },
              [&] { publisher.answer_replay(true, false); });
    REQUIRE(rig.socket->replay(1, 2, 0));

    rig.until([&] { return rig.count(Kind::kReplayEnd) == 1; },
              [&] { publisher.answer_replay(true); });

    CHECK(rig.arrivals.back().ticket == 2);
  }

  TEST_CASE("an engine that restarts in place: disconnected, connected, sequence from 0") {
    Publisher publisher;
    Rig rig({.least_reconnect = std::chrono::milliseconds(10)});
    rig.add(1, publisher);
    rig.subscribe(publisher, 1, 1000);

    publisher.restart();
    rig.until([&] { return rig.count(Kind::kConnected) == 2; });
    rig.subscribe(publisher, 1, 0);

    CHECK(rig.count(Kind::kDisconnected) == 1);
    CHECK(rig.arrivals.back().sequence < 1000);
  }

  TEST_CASE("an engine that is not there yet is connected once it is") {
    Publisher publisher;
    const std::string endpoint = publisher.endpoint;
    publisher.close();
    Rig rig({.least_reconnect = std::chrono::milliseconds(10)});
    rig.add(1, publisher);

    publisher.restart();
    CHECK(publisher.endpoint == endpoint);

    rig.until([&] { return rig.count(Kind::kConnected) == 1; });
  }

  TEST_CASE("payloads that are no batch arrive as undecodable, other frames are counted") {
    Publisher publisher;
    Rig rig;
    rig.add(1, publisher);
    const std::uint64_t next = rig.subscribe(publisher);
    publisher.send_frames({Bytes{'x'}, Bytes{1, 2, 3}, stored(1)});
    publisher.send_frames({Bytes{'x'}});
    publisher.send_frames(std::vector<Bytes>(7, Bytes{'x'}));
    publisher.send(next, Bytes{0xff, 0xff});

    rig.until([&] { return rig.arrivals.back().batch.undecodable; });

    CHECK(rig.arrivals.back().sequence == next);
    CHECK(rig.arrivals.back().note == "decode a batch of KV events: neither an array nor a map");
    CHECK(rig.socket->stats().malformed == 3);
    CHECK(rig.socket->stats().undecodable == 1);
  }

  TEST_CASE("a slow owner loses live batches, learns it once, and memory stays bounded") {
    Publisher publisher;
    Rig rig({.queue_batches = 64});
    rig.add(1, publisher);
    std::uint64_t next = rig.subscribe(publisher);
    const std::uint64_t before = rig.socket->stats().batches + rig.socket->stats().dropped;
    for (int i = 0; i < 1000; ++i, ++next) publisher.send(next, stored(next));
    // The thread reads all of them while the owner reads none.
    const auto deadline = std::chrono::steady_clock::now() + testing::kHang;
    while (rig.socket->stats().batches + rig.socket->stats().dropped < before + 1000) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      ::poll(nullptr, 0, 1);
    }

    rig.until([&] { return rig.count(Kind::kOverflow) == 1; });
    publisher.send(next, stored(next));
    rig.until([&] { return rig.arrivals.back().sequence == next; });

    CHECK(rig.socket->stats().dropped >= 900);
    CHECK(rig.count(Kind::kOverflow) == 1);
  }

  TEST_CASE("a replay waits for a slow owner and loses nothing") {
    Publisher publisher;
    Rig rig({.queue_batches = 64});
    rig.add(1, publisher);
    for (std::uint64_t i = 0; i < 5000; ++i) publisher.buffer.emplace_back(i, stored(i));
    REQUIRE(rig.socket->replay(1, 1, 0));

    rig.until([&] { return rig.count(Kind::kReplayEnd) == 1; },
              [&] { publisher.answer_replay(true); });

    CHECK(rig.sequences(Kind::kReplayed).size() == 5000);
  }

  TEST_CASE("a frame above the limit closes the connection and is not delivered") {
    Publisher publisher;
    Rig rig({.max_frame_bytes = 10'000, .least_reconnect = std::chrono::milliseconds(10)});
    rig.add(1, publisher);
    const std::uint64_t next = rig.subscribe(publisher);

    publisher.send(next, stored(next, 20'000));
    rig.until([&] { return rig.count(Kind::kConnected) == 2; });
    rig.subscribe(publisher, 1, next + 1);

    for (const std::uint64_t sequence : rig.sequences(Kind::kLive)) CHECK(sequence != next);
  }

  TEST_CASE("a slow connection attempt of one engine does not delay others") {
    Publisher publisher;
    Rig rig;
    REQUIRE(rig.socket->add(
        2, {.endpoint = "tcp://127.0.0.1:1", .replay_endpoint = "", .topic = "", .decoder = {}}));
    rig.add(1, publisher);
    rig.subscribe(publisher);

    CHECK(rig.count(Kind::kConnected, 2) == 0);
  }

  TEST_CASE("streams are added and removed while others run; topics are filtered") {
    Publisher first;
    Publisher second;
    Rig rig;
    rig.add(1, first, "kv");
    rig.add(2, second);
    rig.subscribe(first, 1);
    rig.subscribe(second, 2);
    first.send_frames({Bytes{'o', 't', 'h', 'e', 'r'}, Bytes(8), stored(1)});
    CHECK(rig.socket->remove(2));
    CHECK(rig.socket->remove(2));
    rig.add(3, second);
    rig.subscribe(second, 3);
    rig.subscribe(first, 1, 5000);

    CHECK(rig.sequences(Kind::kLive).back() >= 5000);
    CHECK(rig.socket->stats().malformed == 0);
  }

  TEST_CASE("wrong calls") {
    Publisher publisher;
    Rig rig({.max_streams = 1});
    rig.add(1, publisher);
    const auto add = [&](StreamId id, const char* endpoint) {
      return rig.socket->add(
          id, {.endpoint = endpoint, .replay_endpoint = "", .topic = "", .decoder = {}});
    };
    CHECK(add(2, "tcp://*:1").error().code == Errc::kInvalidArgument);
    CHECK(add(2, "inproc://x").error().code == Errc::kInvalidArgument);
    CHECK(add(1, "tcp://127.0.0.1:1").error().code == Errc::kInvalidArgument);
    CHECK(add(2, "tcp://127.0.0.1:1").error().code == Errc::kOutOfCapacity);
    CHECK(rig.socket->replay(9, 1, 0).error().code == Errc::kInvalidArgument);
    REQUIRE(rig.socket->remove(1));
    REQUIRE(add(2, "tcp://127.0.0.1:1"));
    CHECK(rig.socket->replay(2, 1, 0).error().detail ==
          "request a replay: stream 2 has no replay endpoint");
  }
}

}  // namespace pegaflow::index
