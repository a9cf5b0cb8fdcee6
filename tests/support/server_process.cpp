#include "tests/support/server_process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

namespace pegaflow::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Starts `command` with its output in `log`; it dies with us.
pid_t spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment,
            const fs::path& log) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& argument : command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  // Before the child runs, so that whoever waits for its words finds the file.
  const UniqueFd out(::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(125);
  ::dup2(out.get(), 1);
  ::dup2(out.get(), 2);
  for (const std::string& variable : environment) ::putenv(const_cast<char*>(variable.c_str()));
  ::execvp(arguments[0], arguments.data());
  ::_exit(126);
}

UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

int milliseconds_until(steady_clock::time_point end) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(end - steady_clock::now());
  return static_cast<int>(std::max<std::int64_t>(0, left.count()));
}

std::optional<int> wait_for(pid_t pid, const UniqueFd& pidfd, std::chrono::seconds limit) {
  pollfd wanted{pidfd.get(), POLLIN, 0};
  if (::poll(&wanted, 1, static_cast<int>(limit.count() * 1000)) != 1) return std::nullopt;
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) throw std::runtime_error("waitpid failed");
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  char name[] = "/tmp/pega-test-XXXXXX";
  if (::mkdtemp(name) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

fs::path ServerProcess::binary() {
  const char* const other = std::getenv("PEGA_TEST_SERVER");
  return other != nullptr ? other : PEGA_SERVER_BINARY;
}

ServerProcess::ServerProcess(Options options) : options_(std::move(options)) {
  start(options_.wait_until_ready ? Wait::kUntilReady : Wait::kNo);
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) kill();
}

void ServerProcess::start(Wait wait) {
  const fs::path ready = directory() / "ready.json";
  fs::remove(ready);
  std::vector<std::string> command = options_.command_prefix;
  command.insert(command.end(), {binary().string(), "--addr", "unix:" + socket(), "--http-addr",
                                 options_.http_host + ":0", "--ready-file", ready.string(),
                                 "--pool-size", options_.pool_size});
  command.insert(command.end(), options_.arguments.begin(), options_.arguments.end());
  pid_ = spawn(command, {}, directory() / "log");
  pidfd_ = open_pidfd(pid_);
  if (wait == Wait::kUntilReady) wait_until_ready();
}

void ServerProcess::wait_until_ready(std::chrono::seconds limit) {
  const auto end = steady_clock::now() + limit;
  const UniqueFd watch(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (::inotify_add_watch(watch.get(), directory().c_str(), IN_MOVED_TO) < 0) {
    fail("inotify_add_watch failed");
  }
  // Watched first, then looked at, so that it cannot come in between.
  while (!fs::exists(directory() / "ready.json")) {
    pollfd wanted[] = {{watch.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}};
    if (::poll(wanted, 2, milliseconds_until(end)) <= 0) fail("not ready in time");
    if (wanted[1].revents != 0) {
      const auto status = wait_for_exit();
      fail(fmt::format("ended with {} before it was ready", status.value_or(0)));
    }
    char events[4096];
    while (::read(watch.get(), events, sizeof events) > 0) {
    }
  }
  http_ = nlohmann::json::parse(read_file(directory() / "ready.json")).at("http");
}

std::string ServerProcess::wait_for_http_address(std::chrono::seconds limit) const {
  constexpr std::string_view kField = "http address=";
  const auto end = steady_clock::now() + limit;
  const UniqueFd watch(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (::inotify_add_watch(watch.get(), (directory() / "log").c_str(), IN_MODIFY) < 0) {
    fail("inotify_add_watch failed");
  }
  for (;;) {
    const std::string text = log();
    const std::size_t found = text.find(kField);
    const std::size_t line_end = text.find('\n', found);
    if (found != std::string::npos && line_end != std::string::npos) {
      const std::size_t start = found + kField.size();
      return text.substr(start, line_end - start);
    }
    pollfd wanted[] = {{watch.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}};
    if (::poll(wanted, 2, milliseconds_until(end)) <= 0) fail("no HTTP address in time");
    if (wanted[1].revents != 0) fail("ended before it had an HTTP address");
    char events[4096];
    while (::read(watch.get(), events, sizeof events) > 0) {
    }
  }
}

void ServerProcess::signal(int number) const {
  if (pid_ <= 0 || ::kill(pid_, number) != 0) fail("there is no server to signal");
}

void ServerProcess::kill() {
  signal(SIGKILL);
  if (!wait_for_exit()) fail("survived SIGKILL");
}

int ServerProcess::terminate(std::chrono::seconds limit) {
  signal(SIGTERM);
  const auto code = wait_for_exit(limit);
  if (!code) fail("did not end after SIGTERM");
  return *code;
}

std::optional<int> ServerProcess::wait_for_exit(std::chrono::seconds limit) {
  const auto code = wait_for(pid_, pidfd_, limit);
  if (code) {
    pid_ = -1;
    pidfd_.reset();
  }
  return code;
}

std::string ServerProcess::log() const { return read_file(directory() / "log"); }

void ServerProcess::fail(const std::string& what) const {
  throw std::runtime_error("pegaflow-server: " + what + "\n" + log());
}

ServerProcess::Response ServerProcess::get(const std::string& path) const {
  return http_request(http_, "GET", path);
}

ServerProcess::Response ServerProcess::post(const std::string& path) const {
  return http_request(http_socket(), "POST", path);
}

double ServerProcess::metric(std::string_view sample) const {
  const std::string page = "\n" + get("/metrics").body;
  const std::string line = "\n" + std::string(sample) + " ";
  const std::size_t found = page.find(line);
  if (found == std::string::npos) fail("no metric " + std::string(sample) + " in\n" + page);
  return std::strtod(page.c_str() + found + line.size(), nullptr);
}

bool ServerProcess::metric_becomes(std::string_view sample, double value,
                                   std::chrono::seconds limit) const {
  const auto end = steady_clock::now() + limit;
  while (metric(sample) != value) {
    if (steady_clock::now() >= end) return false;
  }
  return true;
}

namespace {

UniqueFd connect_to(const std::string& address) {
  const bool is_path = address.starts_with('/');
  UniqueFd fd(::socket(is_path ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{.tv_sec = 20, .tv_usec = 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  address.copy(path.sun_path, sizeof path.sun_path - 1);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  if (!is_path) {
    const std::size_t colon = address.rfind(':');
    to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
    ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  }
  const auto* const where =
      is_path ? reinterpret_cast<const sockaddr*>(&path) : reinterpret_cast<const sockaddr*>(&to);
  if (::connect(fd.get(), where, is_path ? sizeof path : sizeof to) != 0) {
    throw std::runtime_error("connect to " + address + ": " + std::strerror(errno));
  }
  return fd;
}

}  // namespace

ServerProcess::Response http_request(const std::string& address, std::string_view method,
                                     const std::string& path,
                                     const std::vector<std::string>& headers) {
  const UniqueFd fd = connect_to(address);
  std::string request = fmt::format("{} {} HTTP/1.1\r\n", method, path);
  const bool has_host = std::any_of(headers.begin(), headers.end(), [](const std::string& header) {
    return header.starts_with("Host:");
  });
  if (!has_host) {
    request += fmt::format("Host: {}\r\n", address.starts_with('/') ? "localhost" : address);
  }
  if (method == "POST") request += "Content-Length: 0\r\n";
  for (const std::string& header : headers) request += header + "\r\n";
  request += "\r\n";
  if (::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    throw std::runtime_error("send to " + address + " failed");
  }

  std::string answer;
  std::size_t wanted = std::string::npos;
  while (answer.size() < wanted) {
    char part[16384];
    const ssize_t count = ::recv(fd.get(), part, sizeof part, 0);
    if (count <= 0)
      throw std::runtime_error(fmt::format("no whole answer from {}: {}", address, answer));
    answer.append(part, static_cast<std::size_t>(count));
    const std::size_t body = answer.find("\r\n\r\n");
    if (wanted != std::string::npos || body == std::string::npos) continue;
    const std::size_t length = answer.find("Content-Length: ");
    if (length > body) throw std::runtime_error("an answer without a length: " + answer);
    wanted = body + 4 + std::stoul(answer.substr(length + 16));
  }
  return {.status = std::stoi(answer.substr(answer.find(' ') + 1)),
          .body = answer.substr(answer.find("\r\n\r\n") + 4)};
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
  std::vector<std::string> command = {ServerProcess::binary().string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const pid_t pid = spawn(command, environment, directory.path() / "log");
  const UniqueFd pidfd = open_pidfd(pid);
  const auto code = wait_for(pid, pidfd, limit);
  if (!code) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    throw std::runtime_error("pegaflow-server did not end:\n" +
                             read_file(directory.path() / "log"));
  }
  return {.exit_code = *code, .output = read_file(directory.path() / "log")};
}

}  // namespace pegaflow::testing
