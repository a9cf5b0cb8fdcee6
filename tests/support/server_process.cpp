#include "tests/support/server_process.h"

#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

namespace pegaflow::testing {
namespace {

template <typename T>
T value_of(Result<T>&& result) {
  if (!result) throw std::runtime_error(to_string(result.error()));
  return std::move(*result);
}

}  // namespace

TemporaryDirectory::TemporaryDirectory()
    : directory_(value_of(harness::TemporaryDirectory::create())), path_(directory_.path()) {}

std::filesystem::path ServerProcess::binary() {
  const char* const other = std::getenv("PEGA_TEST_SERVER");
  return other != nullptr ? other : PEGA_SERVER_BINARY;
}

ServerProcess::ServerProcess(Options options)
    : server_(value_of(
          harness::ServerProcess::launch({.program = binary().string(),
                                          .pool_size = std::move(options.pool_size),
                                          .arguments = std::move(options.arguments),
                                          .command_prefix = std::move(options.command_prefix),
                                          .http_host = std::move(options.http_host)}))) {
  if (options.wait_until_ready) wait_until_ready();
}

void ServerProcess::start(Wait wait) {
  check(server_.relaunch());
  if (wait == Wait::kUntilReady) wait_until_ready();
}

void ServerProcess::wait_until_ready(std::chrono::seconds limit) {
  check(server_.wait_until_ready(limit));
}

std::string ServerProcess::wait_for_http_address(std::chrono::seconds limit) const {
  return value_of(server_.wait_for_http_address(limit));
}

void ServerProcess::signal(int number) const { check(server_.process().signal(number)); }

void ServerProcess::kill() {
  signal(SIGKILL);
  if (!wait_for_exit()) fail("the server survived SIGKILL");
}

int ServerProcess::terminate(std::chrono::seconds limit) {
  signal(SIGTERM);
  const auto code = wait_for_exit(limit);
  if (!code) fail("the server did not end after SIGTERM");
  return *code;
}

std::optional<int> ServerProcess::wait_for_exit(std::chrono::seconds limit) {
  return server_.process().wait_for_exit(limit);
}

std::string ServerProcess::log() const { return server_.log().value_or(""); }

void ServerProcess::fail(const std::string& what) const {
  throw std::runtime_error("pegaflow-server: " + what + "\n" + log());
}

void ServerProcess::check(const Result<void>& result) const {
  if (!result) fail(to_string(result.error()));
}

ServerProcess::Response ServerProcess::get(const std::string& path) const {
  return http_request(http(), "GET", path);
}

ServerProcess::Response ServerProcess::post(const std::string& path) const {
  return http_request(http_socket(), "POST", path);
}

double ServerProcess::metric(std::string_view sample) const {
  const std::string page = get("/metrics").body;
  const harness::ServerProcess::Metrics metrics = harness::parse_metrics(page);
  const auto found = metrics.find(sample);
  if (found == metrics.end()) fail("no metric " + std::string(sample) + " in\n" + page);
  return found->second;
}

bool ServerProcess::metric_becomes(std::string_view sample, double value,
                                   std::chrono::seconds limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (metric(sample) != value) {
    if (std::chrono::steady_clock::now() >= end) return false;
  }
  return true;
}

ServerProcess::Response http_request(const std::string& address, std::string_view method,
                                     const std::string& path,
                                     const std::vector<std::string>& headers) {
  return value_of(harness::http_request(address, method, path, headers));
}

std::string own_address() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  std::string found;
  for (const ifaddrs* each = list; each != nullptr && found.empty(); each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    if ((each->ifa_flags & (IFF_UP | IFF_LOOPBACK)) != IFF_UP) continue;
    char text[INET_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, text,
                sizeof text);
    found = text;
  }
  ::freeifaddrs(list);
  return found;
}

Ran run_server_binary(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment, std::chrono::seconds limit) {
  const TemporaryDirectory directory;
  const std::string log = (directory.path() / "log").string();
  std::vector<std::string> command = {ServerProcess::binary().string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  harness::Child child = value_of(harness::Child::start(
      {.command = std::move(command), .log_file = log, .environment = environment}));
  const auto code = child.wait_for_exit(limit);
  std::string output = harness::read_file(log).value_or("");
  if (!code) throw std::runtime_error("pegaflow-server did not end:\n" + output);
  return {.exit_code = *code, .output = std::move(output)};
}

}  // namespace pegaflow::testing
