#pragma once
/// \file
/// The Unix socket: its path, its lock for one server, and the users that may connect.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/os/unique_fd.h"
#include "base/runtime_directories.h"

namespace pegaflow::server {

/// The socket that `addr` names. With HOST:PORT it lies in the first directory that exists or can
/// be made, and that is writable. Errors: kInvalidArgument for an address of neither form or a path
/// too long for a socket; kRefused when there is no such directory.
Result<std::filesystem::path> socket_path(std::string_view addr,
                                          const RuntimeDirectories& directories);

/// The socket of the HTTP pages beside the engines' one: `50055.http` beside `50055.sock`.
std::filesystem::path http_socket_path(const std::filesystem::path& socket);

/// Holds a socket's name for one server, with flock() on NAME.lock, which the kernel releases
/// however the process ends. Movable; thread-bound.
class SocketLock {
 public:
  /// Makes the directory (0750, `group` unless empty) if it is missing.
  /// Errors: kRefused when another server holds it (its pid is in the detail) or permissions forbid
  /// it; kInvalidArgument for an unknown group.
  static Result<SocketLock> take(const std::filesystem::path& socket, const std::string& group);

  SocketLock(SocketLock&&) noexcept = default;
  SocketLock& operator=(SocketLock&&) = delete;
  /// Removes the lock's file and releases the name.
  ~SocketLock();

  [[nodiscard]] const std::filesystem::path& socket() const noexcept { return socket_; }

 private:
  SocketLock(std::filesystem::path socket, UniqueFd fd) noexcept;
  std::filesystem::path socket_;
  UniqueFd fd_;
};

/// The listening socket. Movable; thread-bound.
class Listener {
 public:
  /// Replaces what a dead server left under the name. The socket has 0660 before a process can
  /// connect. `lock` outlives the listener.
  /// Errors: kRefused when permissions forbid it; kIo for other errors of the kernel.
  static Result<Listener> open(const SocketLock& lock, const std::string& group);
  /// The same for http_socket_path().
  /// Errors: also kInvalidArgument for a path too long for a socket.
  static Result<Listener> open_http(const SocketLock& lock, const std::string& group);

  Listener(Listener&&) noexcept = default;
  Listener& operator=(Listener&&) = delete;
  /// Removes the socket.
  ~Listener();

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return socket_; }

 private:
  static Result<Listener> open_at(const std::filesystem::path& path, const std::string& group);
  Listener(std::filesystem::path socket, UniqueFd fd) noexcept;
  std::filesystem::path socket_;
  UniqueFd fd_;
};

/// The process at the other end of a connection, as the kernel reports it.
struct Peer {
  std::uint32_t uid = 0;
  std::int32_t pid = 0;   ///< 0 when it is in a PID namespace that is invisible here.
  std::string address{};  ///< IP address of the other end of a TCP connection.
};
/// Errors: kIo.
Result<Peer> peer_of(int connection);

/// Whether `uid` is root, the server's own user, or in `allowed`.
bool may_connect(std::uint32_t uid, const std::vector<std::uint32_t>& allowed);

/// A TCP socket that listens at HOST:PORT ([HOST]:PORT for IPv6), and its actual address.
struct TcpListener {
  UniqueFd fd;
  std::string address;
};
/// `option` names the option in error texts.
/// Errors: kInvalidArgument for an invalid address; kRefused when it is taken or forbidden.
Result<TcpListener> listen_tcp(const std::string& address, std::string_view option);

}  // namespace pegaflow::server
