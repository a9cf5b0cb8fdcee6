#include "harness/redis_process.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace pegaflow::harness {
namespace {

constexpr int kPatienceMs = 10'000;

/// The path of the server's program; `link` is made for one that is known by another name.
Result<std::string> find_server(const std::string& link) {
  const char* const path = std::getenv("PATH");
  for (const char* const name : {"redis-server", "valkey-server", "redis-check-rdb"}) {
    std::string_view rest = path != nullptr ? path : "/usr/bin:/bin";
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find(':'), rest.size());
      std::string program = std::string(rest.substr(0, end)) + "/" + name;
      rest.remove_prefix(std::min(end + 1, rest.size()));
      if (::access(program.c_str(), X_OK) != 0) continue;
      if (std::string_view(name) != "redis-check-rdb") return program;
      // One program, which looks at the name that it was started under.
      std::error_code problem;
      std::filesystem::create_symlink(program, link, problem);
      if (problem && problem.value() != EEXIST) return fail_errno(problem.value(), "link " + link);
      return link;
    }
  }
  return fail(Errc::kRefused, "start Redis: no redis-server in $PATH; install redis-tools");
}

Result<UniqueFd> connect_to(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  std::uint16_t port = 0;
  std::from_chars(address.data() + colon + 1, address.data() + address.size(), port);
  to.sin_port = htons(port);
  if (::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1) {
    return fail(Errc::kInvalidArgument, "{} is not IP:PORT", address);
  }
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    return fail_errno(errno, "connect to " + address);
  }
  return fd;
}

}  // namespace

Result<RedisProcess> RedisProcess::start(Options options) {
  PEGA_TRY_LET(TemporaryDirectory directory, TemporaryDirectory::create());
  RedisProcess made(std::move(options), std::move(directory));
  PEGA_TRY(made.launch());
  return made;
}

Result<void> RedisProcess::restart() { return launch(); }

Result<void> RedisProcess::launch() {
  PEGA_TRY_LET(const std::string program, find_server(directory_.path() + "/redis-server"));
  const std::size_t colon = options_.address.rfind(':');
  const std::string port = options_.address.substr(colon + 1);
  std::vector<std::string> command = options_.command_prefix;
  command.insert(command.end(), {program, "--bind", options_.address.substr(0, colon),
                                 options_.is_tls ? "--tls-port" : "--port", port, "--save", "",
                                 "--appendonly", "no", "--dir", directory_.path()});
  if (options_.is_tls) command.insert(command.end(), {"--port", "0"});
  command.insert(command.end(), options_.arguments.begin(), options_.arguments.end());
  const std::string log = directory_.path() + "/redis.log";
  PEGA_TRY_LET(Child child, Child::start({.command = std::move(command), .log_file = log}));
  child_.emplace(std::move(child));
  for (int waited = 0; waited < kPatienceMs; waited += 10) {
    if (connect_to(options_.address)) return {};
    if (!child_->running()) {
      const auto text = read_file(log);
      return fail(Errc::kInternal, "Redis at {} ended: {}", options_.address,
                  text ? *text : std::string());
    }
    ::poll(nullptr, 0, 10);
  }
  return fail(Errc::kTimeout, "Redis at {} does not listen", options_.address);
}

Result<pegaflow::directory::Reply> RedisProcess::call(
    std::initializer_list<std::string_view> arguments) const {
  PEGA_TRY_LET(const UniqueFd fd, connect_to(options_.address));
  std::string request = fmt::format("*{}\r\n", arguments.size());
  for (const std::string_view each : arguments) {
    request += fmt::format("${}\r\n", each.size());
    request += each;
    request += "\r\n";
  }
  if (::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    return fail_errno(errno, "send to " + options_.address);
  }
  pegaflow::directory::ReplyReader reader;
  std::array<char, 65536> bytes{};
  for (;;) {
    pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, kPatienceMs) != 1) {
      return fail(Errc::kTimeout, "{} does not answer", options_.address);
    }
    const ssize_t got = ::recv(fd.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) return fail(Errc::kPeerLost, "{} closed the connection", options_.address);
    reader.feed(std::span<const char>(bytes).first(static_cast<std::size_t>(got)));
    PEGA_TRY_LET(std::optional<pegaflow::directory::Reply> reply, reader.next());
    if (reply) return std::move(*reply);
  }
}

}  // namespace pegaflow::harness
