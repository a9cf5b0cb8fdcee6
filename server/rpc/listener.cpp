#include "server/rpc/listener.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <grp.h>
#include <netdb.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace pegaflow::server {
namespace {

namespace fs = std::filesystem;

constexpr int kBacklog = 1024;  // The default of --max-connections.

/// Parses the port in `whole`, the value of `option`.
Result<std::uint16_t> parse_port(std::string_view text, std::string_view option,
                                 std::string_view whole) {
  std::uint16_t port = 0;
  const auto [rest, status] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || status != std::errc() || rest != text.data() + text.size()) {
    return fail(Errc::kInvalidArgument, "{} {}: \"{}\" is not a port", option, whole, text);
  }
  return port;
}

/// kRefused for errors that the operator has to fix, else as fail_errno().
tl::unexpected<Error> refuse_errno(int number, const std::string& what) {
  auto error = fail_errno(number, what);
  if (number == EACCES || number == EPERM || number == EROFS || number == ENOENT ||
      number == ENOTDIR || number == EADDRINUSE || number == EADDRNOTAVAIL || number == EISDIR) {
    error.value().code = Errc::kRefused;
  }
  return error;
}

Result<std::optional<gid_t>> find_group(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const struct group* const found = ::getgrnam(name.c_str());
  if (found != nullptr) return found->gr_gid;
  gid_t gid = 0;
  const auto [rest, status] = std::from_chars(name.data(), name.data() + name.size(), gid);
  if (status == std::errc() && rest == name.data() + name.size()) return gid;
  return fail(Errc::kInvalidArgument, "--socket-group: there is no group \"{}\"", name);
}

Result<void> give_to_group(const fs::path& path, const std::optional<gid_t>& group) {
  if (group && ::chown(path.c_str(), static_cast<uid_t>(-1), *group) != 0) {
    return refuse_errno(errno, "give " + path.string() + " to the group");
  }
  return {};
}

Result<void> make_directory(const fs::path& directory, const std::optional<gid_t>& group) {
  std::error_code ignored;
  if (fs::is_directory(directory, ignored)) return {};
  if (directory.has_parent_path() && directory.parent_path() != directory) {
    fs::create_directories(directory.parent_path(), ignored);  // mkdir below reports the error.
  }
  if (::mkdir(directory.c_str(), 0750) != 0) {
    return refuse_errno(errno, "make the socket's directory " + directory.string());
  }
  // The umask may have removed bits; it never adds one.
  if (::chmod(directory.c_str(), 0750) != 0) {
    return refuse_errno(errno, "set the permissions of " + directory.string());
  }
  return give_to_group(directory, group);
}

bool usable(const fs::path& directory) {
  std::error_code ignored;
  if (fs::is_directory(directory, ignored)) return ::access(directory.c_str(), W_OK | X_OK) == 0;
  return fs::is_directory(directory.parent_path(), ignored) &&
         ::access(directory.parent_path().c_str(), W_OK | X_OK) == 0;
}

std::string read_pid(int fd) {
  char text[32] = {};
  const ssize_t length = ::pread(fd, text, sizeof text - 1, 0);
  std::string pid(text, length > 0 ? static_cast<std::size_t>(length) : 0);
  std::erase(pid, '\n');
  return pid.empty() ? "unknown" : pid;
}

/// Whether `path` still names the file behind `fd`: a server that ended may have removed it.
bool is_same_file(const fs::path& path, int fd) {
  struct stat named {};
  struct stat open {};
  return ::stat(path.c_str(), &named) == 0 && ::fstat(fd, &open) == 0 &&
         named.st_ino == open.st_ino && named.st_dev == open.st_dev;
}

fs::path lock_path(const fs::path& socket) { return socket.string() + ".lock"; }

Result<void> check_length(const fs::path& socket) {
  constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
  if (socket.string().size() <= kLongest) return {};
  return fail(Errc::kInvalidArgument, "{} is too long for a socket: the limit is {} bytes",
              socket.string(), kLongest);
}

struct AddressListDeleter {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};

std::string describe(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
    return fmt::format("[{}]:{}", text, ntohs(v6.sin6_port));
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
  return fmt::format("{}:{}", text, ntohs(v4.sin_port));
}

}  // namespace

Result<fs::path> socket_path(std::string_view addr, const RuntimeDirectories& directories) {
  constexpr std::string_view kUnix = "unix:";
  fs::path path;
  if (addr.starts_with(kUnix)) {
    path = fs::path(addr.substr(kUnix.size()));
    if (!path.is_absolute() || !path.has_filename()) {
      return fail(Errc::kInvalidArgument, "--addr {}: a socket needs an absolute path", addr);
    }
  } else {
    const std::size_t colon = addr.rfind(':');
    if (colon == std::string_view::npos || colon == 0) {
      return fail(Errc::kInvalidArgument,
                  "--addr {}: neither HOST:PORT (as 127.0.0.1:50055) nor unix:/path/x.sock", addr);
    }
    PEGA_TRY_LET(const std::uint16_t port, parse_port(addr.substr(colon + 1), "--addr", addr));
    const std::string name = fmt::format("{}.sock", port);
    const fs::path user = directories.user;
    if (!directories.explicit_directory.empty()) {
      path = fs::path(directories.explicit_directory) / name;
    } else if (usable(directories.system)) {
      path = fs::path(directories.system) / name;
    } else if (!user.empty() && usable(user)) {
      path = user / name;
    } else {
      return fail(Errc::kRefused,
                  "--addr {}: no place for the socket: {}{} cannot be written to; make that "
                  "directory for this user, or set PEGAFLOW_RUNTIME_DIR",
                  addr, directories.system, user.empty() ? std::string() : " and " + user.string());
    }
  }
  PEGA_TRY(check_length(path));
  return path;
}

fs::path http_socket_path(const fs::path& socket) {
  fs::path path = socket;
  if (path.extension() == ".sock") path.replace_extension();
  return path += ".http";
}

Result<SocketLock> SocketLock::take(const fs::path& socket, const std::string& group) {
  PEGA_TRY_LET(const std::optional<gid_t> gid, find_group(group));
  PEGA_TRY(make_directory(socket.parent_path(), gid));
  const fs::path path = lock_path(socket);
  for (;;) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd) return refuse_errno(errno, "open the lock " + path.string());
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        return fail(Errc::kRefused, "another pegaflow-server (pid {}) serves {}",
                    read_pid(fd.get()), socket.string());
      }
      return refuse_errno(errno, "lock " + path.string());
    }
    if (!is_same_file(path, fd.get())) continue;  // Its last owner removed it meanwhile.
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(fd.get(), 0) != 0 || ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
      return fail_errno(errno, "write our pid to " + path.string());
    }
    return SocketLock(socket, std::move(fd));
  }
}

SocketLock::SocketLock(fs::path socket, UniqueFd fd) noexcept
    : socket_(std::move(socket)), fd_(std::move(fd)) {}

SocketLock::~SocketLock() {
  // While this process holds the lock, so that no other server can have taken the file.
  if (fd_) ::unlink(lock_path(socket_).c_str());
}

Result<Listener> Listener::open(const SocketLock& lock, const std::string& group) {
  return open_at(lock.socket(), group);
}

Result<Listener> Listener::open_http(const SocketLock& lock, const std::string& group) {
  const fs::path path = http_socket_path(lock.socket());
  PEGA_TRY(check_length(path));
  return open_at(path, group);
}

Result<Listener> Listener::open_at(const fs::path& path, const std::string& group) {
  PEGA_TRY_LET(const std::optional<gid_t> gid, find_group(group));
  struct stat there {};
  if (::lstat(path.c_str(), &there) == 0) {
    if (!S_ISSOCK(there.st_mode)) {
      return fail(Errc::kRefused, "{} exists and is not a socket", path.string());
    }
    if (::unlink(path.c_str()) != 0) return refuse_errno(errno, "remove the old " + path.string());
  }
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(errno, "create a socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.string().size());
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return refuse_errno(errno, "bind " + path.string());
  }
  Listener listener(path, std::move(fd));
  PEGA_TRY(give_to_group(path, gid));
  if (::chmod(path.c_str(), 0660) != 0) {
    return refuse_errno(errno, "set the permissions of " + path.string());
  }
  if (::listen(listener.fd(), kBacklog) != 0)
    return fail_errno(errno, "listen at " + path.string());
  return listener;
}

Listener::Listener(fs::path socket, UniqueFd fd) noexcept
    : socket_(std::move(socket)), fd_(std::move(fd)) {}

Listener::~Listener() {
  if (fd_) ::unlink(socket_.c_str());
}

Result<Peer> peer_of(int connection) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return fail_errno(errno, "read the credentials of a connection");
  }
  return Peer{.uid = credentials.uid, .pid = credentials.pid};
}

bool may_connect(std::uint32_t uid, const std::vector<std::uint32_t>& allowed) {
  return uid == 0 || uid == ::geteuid() ||
         std::find(allowed.begin(), allowed.end(), uid) != allowed.end();
}

Result<TcpListener> listen_tcp(const std::string& address, std::string_view option) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) {
    return fail(Errc::kInvalidArgument, "{} {}: not HOST:PORT", option, address);
  }
  const std::string port = address.substr(colon + 1);
  PEGA_TRY(parse_port(port, option, address));
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int status = ::getaddrinfo(host.c_str(), port.c_str(), &wanted, &found); status != 0) {
    return fail(Errc::kInvalidArgument, "{} {}: {}", option, address, ::gai_strerror(status));
  }
  const std::unique_ptr<addrinfo, AddressListDeleter> list(found);

  TcpListener listener;
  listener.fd = UniqueFd(
      ::socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, list->ai_protocol));
  if (!listener.fd) return fail_errno(errno, "create a socket");
  const int on = 1;  // A restarted server finds its port free.
  ::setsockopt(listener.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(listener.fd.get(), list->ai_addr, list->ai_addrlen) != 0 ||
      ::listen(listener.fd.get(), kBacklog) != 0) {
    return refuse_errno(errno, fmt::format("{} {}", option, address));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(listener.fd.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return fail_errno(errno, "read the address of a listening socket");
  }
  listener.address = describe(bound);
  return listener;
}

}  // namespace pegaflow::server
