#include "perf/net/net_perftest.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/os/unique_fd.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kListenPatience{20};
constexpr std::chrono::seconds kRunPatience{120};
constexpr double kMebibyte = 1024.0 * 1024.0;

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

/// The program with the lane's settings of UCX; variables that the user has set stay.
Result<std::vector<std::string>> command_of(const NetLane& lane) {
  constexpr const char* kProgram = "/usr/bin/ucx_perftest";
  std::error_code error;
  if (!std::filesystem::exists(kProgram, error)) {
    return fail(Errc::kRefused, "{} (package ucx-utils) is missing", kProgram);
  }
  std::vector<std::string> command = {"/usr/bin/env"};
  const std::array<std::pair<const char*, std::string>, 3> settings = {
      {{"UCX_TLS", lane.ucx_over_tcp ? "tcp" : "rc,ud:aux"},
       {"UCX_NET_DEVICES", joined(lane.rails)},
       {"UCX_MAX_RMA_RAILS", std::to_string(lane.rails.size())}}};
  for (const auto& [name, value] : settings) {
    if (std::getenv(name) == nullptr) command.push_back(std::string(name) + "=" + value);
  }
  command.emplace_back(kProgram);
  return command;
}

/// A port that was free a moment ago: the program cannot choose one itself.
Result<std::uint16_t> free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  socklen_t size = sizeof any;
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&any), &size) != 0) {
    return fail_errno(errno, "find a free port");
  }
  return ntohs(any.sin_port);
}

/// Whether the kernel lists `port` as listening: a connection would take the place of the client.
Result<bool> listens(std::uint16_t port) {
  const std::string wanted = fmt::format(":{:04X} ", port);
  for (const char* const path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    PEGA_TRY_LET(const std::string text, harness::read_file(path));
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t local = line.find(':') + 2;
      const std::size_t state = line.find(' ', line.find(' ', local) + 1) + 1;
      if (line.find(wanted, local) < state && line.compare(state, 2, "0A") == 0) return true;
    }
  }
  return false;
}

/// The end of the program's output.
std::string words_of(const std::string& log_file) {
  std::string text = harness::read_file(log_file).value_or("");
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.size() - std::min<std::size_t>(text.size(), 300));
}

}  // namespace

Result<PerftestServer> PerftestServer::start(const NetLane& lane) {
  PEGA_TRY_LET(std::vector<std::string> command, command_of(lane));
  PEGA_TRY_LET(const std::uint16_t port, free_port());
  PEGA_TRY_LET(harness::TemporaryDirectory directory, harness::TemporaryDirectory::create());
  const std::string log_file = directory.path() + "/server.log";
  command.insert(command.end(), {"-p", std::to_string(port)});
  PEGA_TRY_LET(harness::Child child,
               harness::Child::start({.command = std::move(command), .log_file = log_file}));
  const auto last = Clock::now() + kListenPatience;
  for (;;) {
    PEGA_TRY_LET(const bool there, listens(port));
    if (there) return PerftestServer(std::move(directory), std::move(child), port);
    if (!child.running()) {
      return fail(Errc::kRefused, "ucx_perftest ended: {}", words_of(log_file));
    }
    if (Clock::now() > last) return fail(Errc::kTimeout, "ucx_perftest does not listen");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

Result<Perftest> run_perftest(const NetLane& lane, const std::string& host, std::uint16_t port,
                              std::uint64_t size_bytes, std::uint64_t count, unsigned outstanding) {
  PEGA_TRY_LET(std::vector<std::string> command, command_of(lane));
  PEGA_TRY_LET(const harness::TemporaryDirectory directory, harness::TemporaryDirectory::create());
  const std::string log_file = directory.path() + "/client.log";
  command.insert(command.end(), {host, "-p", std::to_string(port), "-t", "ucp_get", "-s",
                                 std::to_string(size_bytes), "-n", std::to_string(count), "-w",
                                 std::to_string(std::max<std::uint64_t>(outstanding, 4)), "-O",
                                 std::to_string(outstanding), "-f", "-v"});
  PEGA_TRY_LET(const harness::Child child,
               harness::Child::start({.command = std::move(command), .log_file = log_file}));
  pollfd entry{.fd = child.pidfd(), .events = POLLIN, .revents = 0};
  constexpr auto kMs = std::chrono::milliseconds(kRunPatience).count();
  if (::poll(&entry, 1, static_cast<int>(kMs)) != 1) {
    return fail(Errc::kTimeout, "ucx_perftest did not end within {} s", kRunPatience.count());
  }
  PEGA_TRY_LET(const std::string output, harness::read_file(log_file));
  Result<Perftest> parsed = parse_perftest(output);
  if (parsed) return parsed;
  return fail(Errc::kRefused, "ucx_perftest failed: {}", words_of(log_file));
}

Result<Perftest> parse_perftest(const std::string& output) {
  // Iterations; p50, average and overall latency; average and overall MB/s and operations/s.
  const std::size_t end = output.find_last_not_of(" \n");
  const std::size_t newline = output.rfind('\n', end);
  const std::size_t begin = newline == std::string::npos ? 0 : newline + 1;
  std::vector<double> numbers;
  if (end != std::string::npos) {
    std::istringstream fields(output.substr(begin, end + 1 - begin));
    for (std::string field; std::getline(fields, field, ',');) {
      char* rest = nullptr;
      numbers.push_back(std::strtod(field.c_str(), &rest));
      if (rest == field.c_str() || *rest != '\0') {
        return fail(Errc::kCorrupt, "'{}' is not a number", field);
      }
    }
  }
  if (numbers.size() != 8) {
    return fail(Errc::kCorrupt, "ucx_perftest printed {} numbers, not 8", numbers.size());
  }
  return Perftest{.p50_us = numbers[1], .gigabytes_per_second = numbers[5] * kMebibyte / 1e9};
}

}  // namespace pegaflow::perf
