#include "harness/server_process.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <poll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/os/unique_fd.h"
#include "harness/http_request.h"

namespace pegaflow::harness {
namespace {

Result<std::string> body_of(const std::string& address, std::string_view method,
                            const std::string& path) {
  PEGA_TRY_LET(HttpResponse response, http_request(address, method, path));
  if (response.status == 200) return std::move(response.body);
  return fail(Errc::kInternal, "{} {}: the response was {} {}", method, path, response.status,
              response.body.substr(0, 300));
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

Result<ServerProcess> ServerProcess::start(Options options) {
  PEGA_TRY_LET(ServerProcess server, launch(std::move(options)));
  PEGA_TRY(server.wait_until_ready());
  return server;
}

Result<ServerProcess> ServerProcess::launch(Options options) {
  if (options.program.empty()) {
    PEGA_TRY_LET(options.program, find_server());
  }
  PEGA_TRY_LET(TemporaryDirectory directory, TemporaryDirectory::create());
  ServerProcess server(std::move(options), std::move(directory));
  PEGA_TRY(server.relaunch());
  return server;
}

Result<void> ServerProcess::relaunch() {
  std::error_code ignored;
  std::filesystem::remove(ready_file(), ignored);
  std::vector<std::string> command = options_.command_prefix;
  command.insert(command.end(), {options_.program, "--addr", "unix:" + socket_path(), "--http-addr",
                                 options_.http_host + ":0", "--ready-file", ready_file(),
                                 "--pool-size", options_.pool_size});
  command.insert(command.end(), options_.arguments.begin(), options_.arguments.end());
  launched_ = std::chrono::steady_clock::now();
  PEGA_TRY_LET(Child child, Child::start({.command = std::move(command), .log_file = log_file()}));
  child_.emplace(std::move(child));
  return {};
}

/// Watches first and checks then, so that no event is lost in between.
template <typename IsThere>
Result<void> ServerProcess::wait_for(const std::string& watched, std::uint32_t events,
                                     Duration limit, std::string_view what,
                                     const IsThere& is_there) const {
  const UniqueFd watch(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!watch || ::inotify_add_watch(watch.get(), watched.c_str(), events) < 0) {
    return fail_errno(errno, "watch " + watched);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!is_there()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd entries[] = {{.fd = watch.get(), .events = POLLIN, .revents = 0},
                        {.fd = child_->pidfd(), .events = POLLIN, .revents = 0}};
    if (left.count() <= 0 || ::poll(entries, 2, static_cast<int>(left.count())) == 0) {
      return fail(Errc::kTimeout, "the server was not {} within {} s; its log:\n{}", what,
                  std::chrono::duration<double>(limit).count(), log_tail());
    }
    if (entries[1].revents != 0) {
      return fail(Errc::kInternal, "the server ended before it was {}; its log:\n{}", what,
                  log_tail());
    }
    alignas(inotify_event) char read_events[4096];
    while (::read(watch.get(), read_events, sizeof read_events) > 0) {
    }
  }
  return {};
}

Result<void> ServerProcess::wait_until_ready(Duration limit) {
  PEGA_TRY(wait_for(directory(), IN_CLOSE_WRITE | IN_MOVED_TO, limit, "ready", [this] {
    std::error_code error;
    const auto size = std::filesystem::file_size(ready_file(), error);
    return !error && size != 0;
  }));
  start_time_ = std::chrono::steady_clock::now() - launched_;
  return read_ready_file();
}

Result<void> ServerProcess::read_ready_file() {
  PEGA_TRY_LET(const std::string ready, read_file(ready_file()));
  const nlohmann::json object = nlohmann::json::parse(ready, nullptr, false);
  http_ = object.is_object() ? object.value("http", "") : "";
  if (http_.empty()) return fail(Errc::kInternal, "the ready file has no HTTP address: {}", ready);
  http_socket_ = object.value("http_socket", "");
  return {};
}

Result<std::string> ServerProcess::wait_for_http_address(Duration limit) const {
  constexpr std::string_view kField = "http address=";
  std::string address;
  PEGA_TRY(wait_for(log_file(), IN_MODIFY, limit, "listening for HTTP", [&] {
    const std::string text = log().value_or("");
    const std::size_t found = text.find(kField);
    const std::size_t line_end = text.find('\n', found);
    if (found == std::string::npos || line_end == std::string::npos) return false;
    const std::size_t start = found + kField.size();
    address = text.substr(start, line_end - start);
    return true;
  }));
  return address;
}

std::string ServerProcess::log_tail() const {
  const std::string text = log().value_or("(no log)");
  constexpr std::size_t kShown = 2000;
  return text.size() <= kShown ? text : "... " + text.substr(text.size() - kShown);
}

Result<std::string> ServerProcess::get(const std::string& path) const {
  return body_of(http_, "GET", path);
}

Result<std::string> ServerProcess::post(const std::string& path) const {
  // Releases without the Unix socket accepted POST over loopback.
  return body_of(http_socket_.empty() ? http_ : http_socket_, "POST", path);
}

Result<ServerProcess::Metrics> ServerProcess::metrics() const {
  PEGA_TRY_LET(const std::string page, get("/metrics"));
  return parse_metrics(page);
}

Result<void> ServerProcess::stop() { return child_->stop(std::chrono::seconds(20)); }

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
