#include "harness/server_process.h"

#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/os/unique_fd.h"

namespace pegaflow::harness {
namespace {

constexpr auto kStartPatience = std::chrono::seconds(60);

std::string log_tail(const std::string& log_file) {
  const Result<std::string> text = read_file(log_file);
  if (!text) return "(no log)";
  constexpr std::size_t kShown = 2000;
  return text->size() <= kShown ? *text : "... " + text->substr(text->size() - kShown);
}

/// Waits, without polling, until `file` was written and closed or moved into place.
Result<void> wait_for_file(int watch_fd, const std::string& file, const Child& child,
                           const std::string& log_file) {
  const auto deadline = std::chrono::steady_clock::now() + kStartPatience;
  while (!std::filesystem::exists(file) || std::filesystem::file_size(file) == 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd entries[] = {{.fd = watch_fd, .events = POLLIN, .revents = 0},
                        {.fd = child.pidfd(), .events = POLLIN, .revents = 0}};
    if (left.count() <= 0 || ::poll(entries, 2, static_cast<int>(left.count())) == 0) {
      return fail(Errc::kTimeout, "the server was not ready within {} s; its log:\n{}",
                  kStartPatience.count(), log_tail(log_file));
    }
    if (entries[1].revents != 0) {
      return fail(Errc::kInternal, "the server ended before it was ready; its log:\n{}",
                  log_tail(log_file));
    }
    alignas(inotify_event) char events[4096];
    if (::read(watch_fd, events, sizeof events) < 0) return fail_errno(errno, "watch a directory");
  }
  return {};
}

/// The length of a response with its headers; no value before the headers are complete.
/// Errors: kInternal without Content-Length, for example for a chunked response.
Result<std::optional<std::size_t>> answer_length(const std::string& answer) {
  const std::size_t end = answer.find("\r\n\r\n");
  if (end == std::string::npos) return std::nullopt;
  std::string headers = answer.substr(0, end);
  for (char& letter : headers)
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  constexpr std::string_view kLength = "\r\ncontent-length:";
  const std::size_t at = headers.find(kLength);
  std::size_t length = 0;
  if (at != std::string::npos) {
    const std::size_t digit = headers.find_first_not_of(' ', at + kLength.size());
    if (std::from_chars(headers.data() + digit, headers.data() + headers.size(), length).ec ==
        std::errc()) {
      return end + 4 + length;
    }
  }
  return fail(Errc::kInternal, "a response without Content-Length: {}", headers);
}

Result<UniqueFd> connect_tcp(const std::string& host, std::uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "make a TCP socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (::inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) {
    return fail(Errc::kInternal, "the HTTP address {} of the server is not an IPv4 address", host);
  }
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return fail(Errc::kPeerLost, "connect to http://{}:{}: {}", host, port, std::strerror(errno));
  }
  return socket;
}

Result<UniqueFd> connect_socket(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "make a Unix socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return fail(Errc::kInternal, "the socket path {} is too long", path);
  }
  path.copy(address.sun_path, path.size());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return fail(Errc::kPeerLost, "connect to {}: {}", path, std::strerror(errno));
  }
  return socket;
}

/// Sends one request over its own connection.
Result<std::string> request(const UniqueFd& socket, std::string_view method,
                            const std::string& path) {
  const timeval patience{.tv_sec = 30, .tv_usec = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const std::string question = fmt::format(
      "{} {} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", method,
      path);
  if (::send(socket.get(), question.data(), question.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(question.size())) {
    return fail(Errc::kPeerLost, "send {} {}: {}", method, path, std::strerror(errno));
  }
  std::string answer;
  // KJ's server keeps the connection open in any case, so the length tells where the body ends.
  std::optional<std::size_t> whole;
  while (!whole || answer.size() < *whole) {
    char piece[16384];
    const ssize_t got = ::recv(socket.get(), piece, sizeof piece, 0);
    if (got <= 0) {
      return fail(Errc::kPeerLost, "{} {}: {}", method, path,
                  got == 0 ? "the connection ended within the response" : std::strerror(errno));
    }
    answer.append(piece, static_cast<std::size_t>(got));
    if (!whole) {
      PEGA_TRY_LET(whole, answer_length(answer));
    }
  }
  if (!answer.starts_with("HTTP/1.1 200")) {
    return fail(Errc::kInternal, "{} {}: the response was {}", method, path, answer.substr(0, 300));
  }
  return answer.substr(answer.find("\r\n\r\n") + 4);
}

}  // namespace

Result<std::string> find_server() {
  PEGA_TRY_LET(const std::string own, own_path());
  const std::filesystem::path directory = std::filesystem::path(own).parent_path();
  const std::filesystem::path places[] = {directory / "pegaflow-server",
                                          directory.parent_path() / "server" / "pegaflow-server"};
  for (const std::filesystem::path& place : places) {
    if (std::filesystem::is_regular_file(place)) return place.string();
  }
  return fail(Errc::kIo, "there is no pegaflow-server at {} or {}; name one with --server",
              places[0].string(), places[1].string());
}

Result<ServerProcess> ServerProcess::start(const Options& options) {
  std::string program = options.program;
  if (program.empty()) {
    PEGA_TRY_LET(program, find_server());
  }
  PEGA_TRY_LET(TemporaryDirectory directory, TemporaryDirectory::create());
  const std::string socket_path = directory.path() + "/pega.sock";
  const std::string ready_file = directory.path() + "/ready.json";
  const std::string log_file = directory.path() + "/server.log";
  const UniqueFd watch(::inotify_init1(IN_CLOEXEC));
  if (!watch || ::inotify_add_watch(watch.get(), directory.path().c_str(),
                                    IN_CLOSE_WRITE | IN_MOVED_TO) < 0) {
    return fail_errno(errno, "watch " + directory.path());
  }
  std::vector<std::string> command = {
      program,       "--addr",      "unix:" + socket_path,
      "--http-addr", "127.0.0.1:0", "--ready-file",
      ready_file,    "--pool-size", std::to_string(options.pool_bytes)};
  command.insert(command.end(), options.arguments.begin(), options.arguments.end());

  const auto begin = std::chrono::steady_clock::now();
  PEGA_TRY_LET(Child child, Child::start({.command = std::move(command), .log_file = log_file}));
  PEGA_TRY(wait_for_file(watch.get(), ready_file, child, log_file));
  const Duration start_time = std::chrono::steady_clock::now() - begin;

  PEGA_TRY_LET(const std::string ready, read_file(ready_file));
  const nlohmann::json object = nlohmann::json::parse(ready, nullptr, false);
  const std::string http = object.is_object() ? object.value("http", "") : "";
  const std::size_t colon = http.rfind(':');
  std::uint16_t port = 0;
  if (colon != std::string::npos) {
    std::from_chars(http.data() + colon + 1, http.data() + http.size(), port);
  }
  if (port == 0) return fail(Errc::kInternal, "the ready file has no HTTP address: {}", ready);

  ServerProcess server(std::move(directory), std::move(child));
  server.socket_path_ = socket_path;
  server.http_host_ = http.substr(0, colon);
  server.http_port_ = port;
  server.http_socket_ = object.value("http_socket", "");
  server.start_time_ = start_time;
  return server;
}

Result<std::string> ServerProcess::get(const std::string& path) const {
  PEGA_TRY_LET(const UniqueFd connection, connect_tcp(http_host_, http_port_));
  return request(connection, "GET", path);
}

Result<std::string> ServerProcess::post(const std::string& path) const {
  // Releases without the Unix socket accepted POST over loopback.
  PEGA_TRY_LET(const UniqueFd connection, http_socket_.empty() ? connect_tcp(http_host_, http_port_)
                                                               : connect_socket(http_socket_));
  return request(connection, "POST", path);
}

Result<ServerProcess::Metrics> ServerProcess::metrics() const {
  PEGA_TRY_LET(const std::string page, get("/metrics"));
  return parse_metrics(page);
}

Result<void> ServerProcess::stop() { return child_.stop(std::chrono::seconds(20)); }

ServerProcess::Metrics parse_metrics(std::string_view page) {
  ServerProcess::Metrics metrics;
  while (!page.empty()) {
    const std::size_t end = std::min(page.find('\n'), page.size());
    const std::string line(page.substr(0, end));
    page.remove_prefix(std::min(end + 1, page.size()));
    if (line.empty() || line[0] == '#') continue;
    // After the labels, because the value of a label may contain a space.
    const std::size_t labels_end = line.rfind('}');
    const std::size_t space = line.find(' ', labels_end == std::string::npos ? 0 : labels_end);
    if (space == std::string::npos) continue;
    char* rest = nullptr;
    const double value = std::strtod(line.c_str() + space, &rest);  // Parses +Inf and NaN too.
    if (rest != line.c_str() + space) metrics[line.substr(0, space)] = value;
  }
  return metrics;
}

}  // namespace pegaflow::harness
