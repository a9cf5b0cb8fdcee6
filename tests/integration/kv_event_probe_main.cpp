// Follows the event streams of one engine and prints what an index of its GPU cache would be told,
// one JSON object a line.
//
// usage: kv_event_probe HOST
//
// The first line of the input is the engine's response to GET /kv_event_sources; HOST is the
// engine's. Later lines are inputs of the owner: `restarted EVIDENCE`, `answered PROMPT PREDICTED
// REPORTED`, `overflowed`, `take-full-report`. The end of the input ends the program.
#include <array>
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include <poll.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "index/events/event_socket.h"
#include "index/events/kv_event_sources.h"
#include "index/events/source.h"

namespace pegaflow::index {
namespace {

using Json = nlohmann::json;

void print(const Json& line) {
  std::puts(line.dump().c_str());
  std::fflush(stdout);
}

class Probe {
 public:
  explicit Probe(std::unique_ptr<EventSocket> socket) : socket_(std::move(socket)) {}

  Result<void> follow(std::string_view sources, std::string_view host) {
    PEGA_TRY_LET(const std::vector<EventAddress> addresses, parse_kv_event_sources(sources, host));
    for (const EventAddress& address : addresses) {
      const bool can_replay = !address.replay_endpoint.empty();
      sources_.try_emplace(address.rank,
                           Source::Options{.can_replay = can_replay, .rank = address.rank});
      PEGA_TRY(socket_->add(address.rank, {.endpoint = address.endpoint,
                                           .replay_endpoint = address.replay_endpoint,
                                           .topic = address.topic,
                                           .decoder = {}}));
      print({{"following", address.endpoint}, {"replay", address.replay_endpoint}});
    }
    return {};
  }

  [[nodiscard]] int fd() const { return socket_->fd(); }

  void receive() {
    socket_->drain(256, [this](Arrival&& arrival) { take(std::move(arrival)); });
  }

  void tick() {
    for (auto& [rank, source] : sources_) {
      source.tick(clock_.now());
      act(rank, source);
    }
  }

  void command(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    for (auto& [rank, source] : sources_) {
      if (verb == "restarted") {
        std::string evidence;
        std::getline(words >> std::ws, evidence);
        source.restarted(evidence, clock_.now());
      } else if (verb == "answered") {
        std::uint64_t prompt = 0;
        std::uint64_t predicted = 0;
        std::uint64_t reported = 0;
        words >> prompt >> predicted >> reported;
        source.answered(prompt, predicted, reported, clock_.now());
      } else if (verb == "take-full-report") {
        print({{"full_report", source.take_full_report()}});
      } else if (verb == "overflowed") {
        source.overflowed(clock_.now());
      }
      act(rank, source);
    }
  }

 private:
  void take(Arrival&& arrival) {
    Source& source = sources_.at(static_cast<std::uint32_t>(arrival.stream));
    const TimePoint now = clock_.now();
    switch (arrival.kind) {
      case Arrival::Kind::kConnected:
        print({{"connection", true}});
        source.connected(now);
        break;
      case Arrival::Kind::kDisconnected:
        print({{"connection", false}, {"note", arrival.note}});
        source.disconnected(now);
        break;
      case Arrival::Kind::kLive:
        source.live(arrival.sequence, std::move(arrival.batch), now);
        break;
      case Arrival::Kind::kReplayed:
        source.replayed(arrival.ticket, arrival.sequence, std::move(arrival.batch), now);
        break;
      case Arrival::Kind::kReplayEnd:
      case Arrival::Kind::kReplayFailed:
        source.replay_ended(arrival.ticket, arrival.kind == Arrival::Kind::kReplayEnd, now);
        break;
      case Arrival::Kind::kOverflow:
        source.overflowed(now);
        break;
    }
    act(static_cast<std::uint32_t>(arrival.stream), source);
  }

  void act(std::uint32_t rank, Source& source) {
    for (SourceAction action; source.next(action);) {
      switch (action.kind) {
        case SourceAction::Kind::kApply:
          for (const KvEvent& event : action.batch.events) print_event(action.sequence, event);
          break;
        case SourceAction::Kind::kForget:
          print({{"forget", action.reason}});
          break;
        case SourceAction::Kind::kReplay:
          print({{"replay_from", action.from}});
          if (const auto asked = socket_->replay(rank, action.ticket, action.from); !asked) {
            source.replay_ended(action.ticket, false, clock_.now());
          }
          break;
        case SourceAction::Kind::kTrust:
          print({{"trust", std::string(to_string(action.trust))}, {"reason", action.reason}});
          break;
      }
    }
  }

  static void print_event(std::uint64_t sequence, const KvEvent& event) {
    static constexpr std::array kKinds{"stored", "removed", "cleared"};
    Json line = {{"event", kKinds[static_cast<std::size_t>(event.kind)]},
                 {"sequence", sequence},
                 {"hashes", event.hashes},
                 {"parent", nullptr},
                 {"block_size", event.block_size},
                 {"session_id", std::string(event.session_id)},
                 {"has_extra_keys", event.has_extra_keys}};
    if (event.parent) line["parent"] = *event.parent;
    print(line);
  }

  std::unique_ptr<EventSocket> socket_;
  std::map<std::uint32_t, Source> sources_;
  SteadyClock clock_;
};

int run(const std::string& host) {
  auto socket = EventSocket::start({});
  if (!socket) {
    std::fprintf(stderr, "%s\n", to_string(socket.error()).c_str());
    return 1;
  }
  Probe probe(std::move(*socket));
  std::string text;  // Read and not yet a whole line.
  bool follows = false;
  for (std::array<char, 65'536> buffer{};;) {
    std::array<pollfd, 2> waits{{{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                                 {.fd = probe.fd(), .events = POLLIN, .revents = 0}}};
    ::poll(waits.data(), waits.size(), 100);
    if (waits[0].revents != 0) {
      const ssize_t count = ::read(STDIN_FILENO, buffer.data(), buffer.size());
      if (count <= 0) return 0;
      text.append(buffer.data(), static_cast<std::size_t>(count));
    }
    for (std::size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1)) {
      const std::string line = text.substr(0, end);
      if (std::exchange(follows, true)) {
        probe.command(line);
      } else if (const auto followed = probe.follow(line, host); !followed) {
        std::fprintf(stderr, "%s\n", to_string(followed.error()).c_str());
        return 1;
      }
    }
    probe.receive();
    probe.tick();
  }
}

}  // namespace
}  // namespace pegaflow::index

int main(int count, char** arguments) {
  if (count != 2) {
    std::fputs("usage: kv_event_probe HOST\n", stderr);
    return 2;
  }
  return pegaflow::index::run(arguments[1]);
}
