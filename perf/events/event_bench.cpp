// event_bench: the cost of KV events in a router.
//
//   event_bench decode [RUNS]      blocks a second on one core: batches of 192 blocks of 16 tokens,
//   as
//                                  vLLM 0.32 writes them; tokens skipped and kept, in turns
//   event_bench idle [SECONDS]     CPU of 100 subscribed streams without traffic, in percent of a
//   core event_bench receive [BATCHES]  one publisher at full speed, over TCP on loopback, to the
//   owner
//
// Each prints JSON, one line a run. The publishers are another process.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "index/events/event_socket.h"

namespace pegaflow::index {
namespace {

using Json = nlohmann::json;
using Bytes = std::vector<std::uint8_t>;
using SystemClock = std::chrono::steady_clock;

constexpr int kBlocks = 192;
constexpr int kBlockSize = 16;
constexpr int kStreams = 100;

Bytes batch_of(int blocks) {
  std::uint64_t hash = 1;
  Json hashes = Json::array();
  Json tokens = Json::array();
  Json extra_keys = Json::array();
  for (int i = 0; i < blocks; ++i) {
    hash = hash * 6364136223846793005U + 1442695040888963407U;
    hashes.push_back(hash);
    extra_keys.push_back(nullptr);
    for (int j = 0; j < kBlockSize; ++j) tokens.push_back(hash >> (20 + j) & 0x1ffff);
  }
  const Json event = {{"type", "BlockStored"},
                      {"block_hashes", hashes},
                      {"parent_block_hash", nullptr},
                      {"token_ids", tokens},
                      {"block_size", kBlockSize},
                      {"lora_id", nullptr},
                      {"medium", "GPU"},
                      {"lora_name", nullptr},
                      {"extra_keys", extra_keys},
                      {"group_idx", 0},
                      {"kv_cache_spec_kind", "full_attention"}};
  return Json::to_msgpack(Json::array({1795353078.47, Json::array({event}), 0}));
}

double seconds_since(SystemClock::time_point start) {
  return std::chrono::duration<double>(SystemClock::now() - start).count();
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int decode(int runs) {
  const Bytes payload = batch_of(kBlocks);
  for (int run = 0; run < runs; ++run) {
    for (const bool keep_tokens : {false, true}) {
      const KvEventDecoder decoder({.keep_tokens = keep_tokens});
      std::uint64_t blocks = 0;
      const double cpu = cpu_seconds();
      for (int i = 0; i < 5000; ++i) {
        const auto batch = decoder.decode(std::as_bytes(std::span(payload)));
        if (!batch || batch->events.size() != 1) return 1;
        blocks += batch->blocks();
      }
      const double spent = cpu_seconds() - cpu;
      fmt::print(R"({{"tokens": "{}", "payload_bytes": {}, "blocks_per_cpu_second": {:.0f}}})"
                 "\n",
                 keep_tokens ? "kept" : "skipped", payload.size(),
                 static_cast<double>(blocks) / spent);
    }
  }
  return 0;
}

// Publishers in a process of their own; `batches` are published on the first one when the pipe `go`
// has a byte.
[[noreturn]] void publish(int endpoints, int go, int count, int batches) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  void* const context = zmq_ctx_new();
  std::vector<void*> sockets;
  for (int i = 0; i < count; ++i) {
    void* const socket = zmq_socket(context, ZMQ_PUB);
    const int unlimited = 0;
    zmq_setsockopt(socket, ZMQ_SNDHWM, &unlimited, sizeof(unlimited));
    std::array<char, 64> name{};
    std::size_t size = name.size();
    if (zmq_bind(socket, "tcp://127.0.0.1:*") != 0 ||
        zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, name.data(), &size) != 0 ||
        ::write(endpoints, name.data(), name.size()) < 0) {
      std::_Exit(1);
    }
    sockets.push_back(socket);
  }
  const Bytes payload = batch_of(64);
  char byte = 0;
  if (::read(go, &byte, 1) != 1) std::_Exit(0);
  for (int i = 0; i < batches; ++i) {
    std::array<std::uint8_t, 8> sequence{};
    for (std::size_t j = 0; j < 8; ++j) {
      sequence[j] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(i) >> 8 * (7 - j));
    }
    zmq_send(sockets[0], "", 0, ZMQ_SNDMORE);
    zmq_send(sockets[0], sequence.data(), sequence.size(), ZMQ_SNDMORE);
    zmq_send(sockets[0], payload.data(), payload.size(), 0);
  }
  while (::read(go, &byte, 1) > 0) {
  }
  std::_Exit(0);
}

struct Publishers {
  Publishers(int count, int batches) {
    std::array<int, 2> endpoints{};
    std::array<int, 2> start{};
    if (::pipe(endpoints.data()) != 0 || ::pipe(start.data()) != 0) std::abort();
    process = ::fork();
    if (process == 0) {
      ::close(start[1]);
      publish(endpoints[1], start[0], count, batches);
    }
    ::close(endpoints[1]);
    ::close(start[0]);
    go = start[1];
    for (int i = 0; i < count; ++i) {
      std::array<char, 64> name{};
      std::size_t got = 0;
      while (got < name.size()) {
        const ssize_t more = ::read(endpoints[0], name.data() + got, name.size() - got);
        if (more <= 0) std::abort();
        got += static_cast<std::size_t>(more);
      }
      names.emplace_back(name.data());
    }
    ::close(endpoints[0]);
  }
  ~Publishers() {
    ::close(go);
    ::waitpid(process, nullptr, 0);
  }
  Publishers(const Publishers&) = delete;
  Publishers& operator=(const Publishers&) = delete;

  pid_t process = -1;
  int go = -1;
  std::vector<std::string> names;
};

// Subscribed to all publishers, with every connection made.
std::unique_ptr<EventSocket> subscribe(const Publishers& publishers) {
  auto socket = EventSocket::start({});
  if (!socket) std::abort();
  StreamId id = 0;
  for (const std::string& name : publishers.names) {
    EventSocket::Stream stream;
    stream.endpoint = name;
    if (!(*socket)->add(++id, std::move(stream))) std::abort();
  }
  while ((*socket)->stats().connects < publishers.names.size()) ::usleep(1000);
  ::usleep(200'000);  // The subscriptions travel behind the connections.
  (*socket)->drain(SIZE_MAX, [](Arrival&&) {});
  return std::move(*socket);
}

int idle(int seconds) {
  const Publishers publishers(kStreams, 0);
  const auto socket = subscribe(publishers);
  for (int i = 0; i < 3; ++i) {
    const auto start = SystemClock::now();
    const double cpu = cpu_seconds();
    ::usleep(static_cast<useconds_t>(seconds) * 1'000'000);
    fmt::print(R"({{"streams": {}, "seconds": {}, "percent_of_a_core": {:.4f}}})"
               "\n",
               kStreams, seconds, 100 * (cpu_seconds() - cpu) / seconds_since(start));
  }
  return 0;
}

int receive(int batches) {
  const Publishers publishers(1, batches);
  const auto socket = subscribe(publishers);
  std::uint64_t blocks = 0;
  int received = 0;
  int dropped = 0;
  const auto start = SystemClock::now();
  const double cpu = cpu_seconds();
  if (::write(publishers.go, "x", 1) != 1) return 1;
  while (received + static_cast<int>(socket->stats().dropped) < batches &&
         seconds_since(start) < 60) {
    pollfd waits{.fd = socket->fd(), .events = POLLIN, .revents = 0};
    ::poll(&waits, 1, 10);
    socket->drain(256, [&](Arrival&& arrival) {
      if (arrival.kind != Arrival::Kind::kLive) return;
      ++received;
      blocks += arrival.batch.blocks();
    });
    dropped = static_cast<int>(socket->stats().dropped);
  }
  const double wall = seconds_since(start);
  fmt::print(R"({{"batches": {}, "dropped": {}, "blocks_per_second": {:.0f}, )"
             R"("cpu_us_per_batch_of_64_blocks": {:.1f}}})"
             "\n",
             received, dropped, static_cast<double>(blocks) / wall,
             1e6 * (cpu_seconds() - cpu) / std::max(received, 1));
  return 0;
}

int run(std::string_view what, int number) {
  if (what == "decode") return decode(number > 0 ? number : 7);
  if (what == "idle") return idle(number > 0 ? number : 10);
  if (what == "receive") return receive(number > 0 ? number : 20'000);
  std::fputs("usage: event_bench decode [RUNS] | idle [SECONDS] | receive [BATCHES]\n", stderr);
  return 2;
}

}  // namespace
}  // namespace pegaflow::index

int main(int count, char** arguments) {
  return pegaflow::index::run(count > 1 ? arguments[1] : "",
                              count > 2 ? std::atoi(arguments[2]) : 0);
}
