#pragma once
/// \file
/// The address of a socket, in IPv4 or IPv6.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include <netinet/in.h>
#include <sys/socket.h>

#include "base/error.h"

namespace pegaflow::tcp {

/// An IP address and a port. A plain value.
class SocketAddress {
 public:
  SocketAddress() noexcept { std::memset(&storage_, 0, sizeof storage_); }

  /// Parses "127.0.0.1:7000" or "[::1]:0". A name is looked up, which may take seconds, unless
  /// `numeric`. Errors: kInvalidArgument, with the text and its error.
  static Result<SocketAddress> parse(std::string_view text, bool numeric = true);
  /// Returns the local address of a socket. Errors: the kernel's.
  static Result<SocketAddress> near_end(int socket);

  [[nodiscard]] const sockaddr* data() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  [[nodiscard]] socklen_t size() const noexcept { return size_; }
  [[nodiscard]] int family() const noexcept { return storage_.ss_family; }
  /// Whether it is "0.0.0.0" or "[::]": all addresses of a machine, and so none to connect to.
  [[nodiscard]] bool is_wildcard() const noexcept;
  /// The same address with another port.
  [[nodiscard]] SocketAddress with_port(std::uint16_t port) const noexcept;

 private:
  sockaddr_storage storage_;
  socklen_t size_ = 0;
};

/// Formats the address as parse() reads it: "127.0.0.1:7000", "[fe80::1%eth0]:7000".
std::string to_string(const SocketAddress& address);

}  // namespace pegaflow::tcp
