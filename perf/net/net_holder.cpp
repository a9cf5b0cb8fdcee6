#include "perf/net/net_holder.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/hex.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/pool/memory_room.h"
#include "perf/lib/command.h"
#include "perf/net/net_memory.h"
#include "perf/net/net_perftest.h"
#include "perf/net/net_plain.h"
#include "transport/tcp/socket.h"

namespace pegaflow::perf {
namespace {

constexpr Log kLog{"net"};
constexpr int kProtocol = 3;
constexpr std::size_t kLineBytes = 65536;
constexpr std::uint64_t kMostMemory = std::uint64_t{64} << 30;
constexpr std::chrono::seconds kGreetingPatience{10};
constexpr std::chrono::hours kLease{24};
constexpr const char* kPerftest = "perftest";

constexpr const char* kOurs = "pega0";
constexpr const char* kTheirs = "pega1";
constexpr const char* kOurAddress = "10.255.77.1";
constexpr const char* kTheirAddress = "10.255.77.2";

Result<void> write_line(int fd, std::string text) {
  text += '\n';
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t sent = ::send(fd, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return fail_errno(errno, "send to the other end");
    rest.remove_prefix(static_cast<std::size_t>(sent));
  }
  return {};
}

/// Reads one byte per call, so that the bytes after the line stay in the socket.
Result<std::string> read_line(int fd, TimePoint last = TimePoint::max()) {
  std::string line;
  while (line.size() < kLineBytes) {
    if (std::chrono::steady_clock::now() >= last)
      return fail(Errc::kTimeout, "the other end sent no line in time");
    char byte = 0;
    const ssize_t got = ::recv(fd, &byte, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, "receive from the other end");
    if (got == 0) return fail(Errc::kPeerLost, "the other end closed the connection");
    if (byte == '\n') return line;
    line += byte;
  }
  return fail(Errc::kCorrupt, "the other end sent a line of more than {} bytes", kLineBytes);
}

nlohmann::json to_json(const NetOffer& offer) {
  nlohmann::json regions = nlohmann::json::array();
  for (const RegionDescriptor& region : offer.fabric.regions) {
    regions.push_back({{"region", static_cast<std::uint32_t>(region.region)},
                       {"bytes", region.size_bytes},
                       {"key", to_hex(region.key)}});
  }
  return {{"backend", offer.fabric.backend},
          {"incarnation", {offer.fabric.incarnation.high, offer.fabric.incarnation.low}},
          {"address", to_hex(offer.fabric.address)},
          {"regions", regions},
          {"plain", offer.plain},
          {"memory", offer.memory}};
}

Result<NetOffer> offer_of(const std::string& line) {
  try {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("error")) {
      return fail(Errc::kRefused, "the other end reports: {}", json["error"].get<std::string>());
    }
    NetOffer offer;
    offer.fabric.backend = json.at("backend").get<std::string>();
    offer.fabric.incarnation = {json.at("incarnation").at(0).get<std::uint64_t>(),
                                json.at("incarnation").at(1).get<std::uint64_t>()};
    offer.fabric.address = from_hex(json.at("address").get<std::string>());
    for (const auto& region : json.at("regions")) {
      offer.fabric.regions.push_back({.region = RegionId{region.at("region").get<std::uint32_t>()},
                                      .size_bytes = region.at("bytes").get<std::uint64_t>(),
                                      .key = from_hex(region.at("key").get<std::string>())});
    }
    offer.plain = json.at("plain").get<std::string>();
    offer.memory = json.at("memory").get<std::string>();
    if (offer.fabric.regions.size() != 1)
      return fail(Errc::kCorrupt, "the other end did not offer exactly one region");
    return offer;
  } catch (const nlohmann::json::exception& problem) {
    return fail(Errc::kCorrupt, "the other end is not `pegaflow-perf net`: {}", problem.what());
  }
}

Result<NetRequest> request_of(const std::string& line) {
  try {
    const auto json = nlohmann::json::parse(line);
    if (json.at("protocol").get<int>() != kProtocol) {
      return fail(Errc::kRefused, "the two ends are different versions of pegaflow-perf");
    }
    NetRequest request{.backend = json.at("backend").get<std::string>(),
                       .memory_bytes = json.at("memory_bytes").get<std::uint64_t>(),
                       .seed = json.at("seed").get<std::uint64_t>()};
    if (request.memory_bytes == 0 || request.memory_bytes > kMostMemory) {
      return fail(Errc::kInvalidArgument, "the reader requests {} bytes of memory",
                  request.memory_bytes);
    }
    return request;
  } catch (const nlohmann::json::exception& problem) {
    return fail(Errc::kCorrupt, "the reader is not `pegaflow-perf net`: {}", problem.what());
  }
}

/// The lane of a child of this process: what the reader does not choose.
std::string to_text(const NetLane& lane) {
  return nlohmann::json{{"backend", lane.backend},
                        {"rails", lane.rails},
                        {"memory", lane.memory},
                        {"ucx_library", lane.ucx_library},
                        {"ucx_over_tcp", lane.ucx_over_tcp}}
      .dump();
}

Result<NetLane> lane_of(const char* text) {
  try {
    const auto json = nlohmann::json::parse(text);
    return NetLane{.backend = json.at("backend").get<std::string>(),
                   .rails = json.at("rails").get<std::vector<std::string>>(),
                   .ucx_library = json.at("ucx_library").get<std::string>(),
                   .ucx_over_tcp = json.at("ucx_over_tcp").get<bool>(),
                   .memory = json.at("memory").get<std::string>()};
  } catch (const nlohmann::json::exception& problem) {
    return fail(Errc::kInvalidArgument, "hold-net: {}", problem.what());
  }
}

/// The listener is non-blocking, like the lane's sockets.
int accept_one(int listener) {
  for (;;) {
    pollfd entry{.fd = listener, .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, -1) < 0 && errno != EINTR) return -1;
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket >= 0) return socket;
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) return -1;
  }
}

Result<void> set_patience(int socket, std::chrono::seconds patience) {
  const timeval time{.tv_sec = patience.count(), .tv_usec = 0};
  if (::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) == 0) return {};
  return fail_errno(errno, "set the receive timeout of a reader");
}

/// All of the memory becomes resident; an eighth of the available memory stays free.
Result<NetRequest> within_room(const NetRequest& request) {
  PEGA_TRY_LET(const engine::MemoryRoom room, engine::memory_room());
  if (request.memory_bytes <= room.available_bytes / 8 * 7) return request;
  return fail(Errc::kOutOfCapacity, "the reader requests {} of memory, and {} are available",
              format_bytes(request.memory_bytes), format_bytes(room.available_bytes));
}

/// Serves requests for `ucx_perftest` while the lane is measured.
Result<void> serve_perftest(int socket, const NetLane& lane) {
  std::optional<PerftestServer> server;
  for (;;) {
    const Result<std::string> line = read_line(socket);
    if (!line && line.error().code == Errc::kPeerLost) return {};
    if (!line) return tl::unexpected<Error>(line.error());
    if (*line != kPerftest || lane.backend != "ucx") {
      return fail(Errc::kCorrupt, "a reader sent an unknown request");
    }
    server.reset();  // Before the next one listens.
    Result<PerftestServer> started = PerftestServer::start(lane);
    nlohmann::json answer;
    if (started) {
      server.emplace(std::move(*started));
      answer = {{"port", server->port()}};
    } else {
      answer = {{"error", to_string(started.error())}};
    }
    PEGA_TRY(write_line(socket, answer.dump()));
  }
}

/// The memory and the lane of one reader, in the order of construction.
struct Held {
  std::unique_ptr<NetMemory> memory;
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<PlainSender> plain;
};

Result<NetOffer> hold(const NetRequest& request, int socket, const NetLane& lane,
                      const Clock& clock, Held& held) {
  PEGA_TRY_LET(const std::shared_ptr<cuda::Gpu> gpu, gpu_of(lane));
  PEGA_TRY_LET(held.memory, NetMemory::create(gpu, request.memory_bytes));
  PEGA_TRY(held.memory->fill(request.seed));
  // The lane listens at the address that the reader has reached.
  PEGA_TRY_LET(const tcp::SocketAddress here, tcp::SocketAddress::near_end(socket));
  const std::string listen = to_string(here.with_port(0));
  PEGA_TRY_LET(held.fabric, make_lane(
                                lane, listen, clock, [](Fabric::Completion&&) {}, gpu));
  PEGA_TRY_LET(const RegionId region, held.fabric->register_region(held.memory->memory()));
  PEGA_TRY(held.fabric->lend(region, clock.now() + kLease));
  NetOffer offer{.fabric = held.fabric->describe(), .plain = {}, .memory = lane.memory};
  if (lane.backend == "tcp") {
    PEGA_TRY_LET(held.plain, PlainSender::start(listen, held.memory->host_bytes()));
    offer.plain = held.plain->address();
  }
  return offer;
}

Result<void> hold_for(int socket, const NetLane& lane) {
  // Readers are served one after the other, so a silent one must not block the next for long.
  PEGA_TRY(set_patience(socket, kGreetingPatience));
  PEGA_TRY_LET(const std::string line,
               read_line(socket, std::chrono::steady_clock::now() + kGreetingPatience));
  PEGA_TRY(set_patience(socket, std::chrono::seconds(0)));
  const auto of_this_lane = [&](const NetRequest& asked) -> Result<NetRequest> {
    if (asked.backend == lane.backend) return asked;
    return fail(Errc::kRefused, "this end runs with --backend {}", lane.backend);
  };
  const Result<NetRequest> request = request_of(line).and_then(of_this_lane).and_then(within_room);
  const SteadyClock clock;
  Held held;
  const Result<NetOffer> offer = request.and_then(
      [&](const NetRequest& asked) { return hold(asked, socket, lane, clock, held); });
  if (!offer) {
    PEGA_TRY(write_line(socket, nlohmann::json{{"error", to_string(offer.error())}}.dump()));
    return tl::unexpected<Error>(offer.error());
  }
  PEGA_TRY(write_line(socket, to_json(*offer).dump()));
  return serve_perftest(socket, lane);
}

// ---- namespaces

Result<void> run_ip(std::vector<std::string> words) {
  words.insert(words.begin(), "ip");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::array<char*, 2> environment{const_cast<char*>("PATH=/usr/sbin:/sbin:/usr/bin:/bin"),
                                   nullptr};
  pid_t pid = -1;
  int error = ENOENT;
  for (const char* const path : {"/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip", "/bin/ip"}) {
    error = ::posix_spawn(&pid, path, nullptr, nullptr, arguments.data(), environment.data());
    if (error == 0) break;
  }
  if (error != 0) return fail(Errc::kRefused, "the program `ip` (package iproute2) is missing");
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return {};
  return fail(Errc::kRefused, "`ip {} {}` failed", words.at(1), words.at(2));
}

Result<void> own_namespace() {
  if (::unshare(CLONE_NEWNET) == 0) return {};
  return fail(Errc::kRefused, "create a network namespace: {}; this needs root",
              std::strerror(errno));
}

Result<void> raise(const char* device, const std::string& address) {
  PEGA_TRY(run_ip({"address", "add", address + "/30", "dev", device}));
  PEGA_TRY(run_ip({"link", "set", device, "up"}));
  return run_ip({"link", "set", "lo", "up"});
}

Result<void> expect(int control, std::string_view word) {
  PEGA_TRY_LET(const std::string line, read_line(control));
  if (line == word) return {};
  return fail(Errc::kRefused, "{}", line);
}

}  // namespace

Result<void> hold_net(int listener, const NetLane& lane) {
  for (;;) {
    const UniqueFd socket(accept_one(listener));
    if (!socket) return fail_errno(errno, "accept a reader");
    if (const Result<void> held = hold_for(socket.get(), lane); !held) {
      kLog.warn("a reader was not served reason={}", to_string(held.error()));
    }
  }
}

Result<NetConnection> ask_holder(const std::string& address, const NetRequest& request) {
  PEGA_TRY_LET(const tcp::SocketAddress to, tcp::SocketAddress::parse(address, false));
  UniqueFd socket(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket || ::connect(socket.get(), to.data(), to.size()) != 0) {
    return fail_errno(errno, "connect to " + address);
  }
  const nlohmann::json json = {{"protocol", kProtocol},
                               {"backend", request.backend},
                               {"memory_bytes", request.memory_bytes},
                               {"seed", request.seed}};
  PEGA_TRY(write_line(socket.get(), json.dump()));
  PEGA_TRY_LET(const std::string line, read_line(socket.get()));
  PEGA_TRY_LET(NetOffer offer, offer_of(line));
  return NetConnection{.socket = std::move(socket), .offer = std::move(offer)};
}

Result<std::uint16_t> ask_perftest(const NetConnection& connection) {
  PEGA_TRY(write_line(connection.socket.get(), kPerftest));
  PEGA_TRY_LET(const std::string line, read_line(connection.socket.get()));
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (json.contains("error") && json["error"].is_string()) {
    return fail(Errc::kRefused, "the other end reports: {}", json["error"].get<std::string>());
  }
  constexpr std::uint64_t kMostPort = 65535;
  if (!json.contains("port") || !json["port"].is_number_unsigned() ||
      json["port"].get<std::uint64_t>() > kMostPort) {
    return fail(Errc::kCorrupt, "perftest: the other end returned \"{}\" instead of a port", line);
  }
  return json["port"].get<std::uint16_t>();
}

/// The body of the child. It sends "ready" from its namespace, or the reason why it has none;
/// receives "go" once its end of the cable is there, or "loopback"; and sends its address.
Result<void> run_hold_net(std::span<const char* const> arguments) {
  int control = -1;
  const std::string_view text = arguments.size() == 2 ? arguments[0] : "";
  if (std::from_chars(text.data(), text.data() + text.size(), control).ec != std::errc()) {
    return fail(Errc::kInvalidArgument, "hold-net: the arguments are DESCRIPTOR LANE");
  }
  PEGA_TRY_LET(const NetLane lane, lane_of(arguments[1]));
  const UniqueFd home(::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
  Result<void> own = lane.backend == "tcp"
                         ? own_namespace()
                         : fail(Errc::kRefused, "NICs stay in their network namespace");
  PEGA_TRY(write_line(control, own ? "ready" : to_string(own.error())));
  PEGA_TRY_LET(const std::string order, read_line(control));
  std::string address = kTheirAddress;
  if (order == "go") {
    PEGA_TRY(raise(kTheirs, address));
  } else {
    if (own && ::setns(home.get(), CLONE_NEWNET) != 0)
      return fail_errno(errno, "return to the original network namespace");
    address = "127.0.0.1";
  }
  PEGA_TRY_LET(const tcp::SocketAddress at, tcp::SocketAddress::parse(address + ":0"));
  PEGA_TRY_LET(const UniqueFd listener, tcp::listen_at(at));
  PEGA_TRY_LET(const tcp::SocketAddress bound, tcp::SocketAddress::near_end(listener.get()));
  PEGA_TRY(write_line(control, to_string(bound)));
  return hold_net(listener.get(), lane);
}

Result<NetChild> NetChild::start(const NetLane& lane) {
  int pair[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
    return fail_errno(errno, "make a pair of sockets");
  }
  UniqueFd ours(pair[0]);
  UniqueFd theirs(pair[1]);
  PEGA_TRY_LET(const std::string own, harness::own_path());
  std::vector<std::string> command = {own, "hold-net", std::to_string(pair[1]), to_text(lane)};
  PEGA_TRY_LET(harness::Child child,
               harness::Child::start(
                   {.command = std::move(command), .log_file = {}, .inherited_fd = pair[1]}));
  theirs.reset();  // So that the end of the child is detected.
  const pid_t pid = child.pid();
  NetChild started(std::move(child), std::move(ours));
  const int control = started.control_.get();

  started.home_ = UniqueFd(::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
  const Result<void> joined = [&]() -> Result<void> {
    PEGA_TRY(expect(control, "ready"));
    PEGA_TRY(own_namespace());
    PEGA_TRY(run_ip({"link", "add", kOurs, "type", "veth", "peer", "name", kTheirs, "netns",
                     std::to_string(pid)}));
    return raise(kOurs, kOurAddress);
  }();
  if (!joined) {
    if (::setns(started.home_.get(), CLONE_NEWNET) != 0)
      return fail_errno(errno, "return to the original network namespace");
    started.loopback_because_ = joined.error().detail;
  }
  PEGA_TRY(write_line(control, joined ? "go" : "loopback"));
  PEGA_TRY_LET(started.address_, read_line(control));
  return started;
}

NetChild::~NetChild() {
  // Threads created in between keep the namespace, but they have ended by now.
  if (home_ && loopback_because_.empty()) (void)::setns(home_.get(), CLONE_NEWNET);
}

}  // namespace pegaflow::perf
