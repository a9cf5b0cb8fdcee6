#pragma once
/// \file
/// Addresses of a host, looked up without waiting for a name server.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/socket.h>

#include "base/error.h"

namespace pegaflow::directory {

/// An address of a server, as the kernel takes it. A value.
struct HostAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

/// Looks up one host, as often as its owner wants, one lookup at a time. A numeric address is known
/// at once. For a name a thread `pega-resolve` is started, since getaddrinfo() waits for as long as
/// the name servers do; it ends by itself when they have answered, also after this object.
/// Thread-bound.
class HostLookup {
 public:
  using Addresses = std::vector<HostAddress>;

  HostLookup(std::string host, std::uint16_t port);

  /// Begins a lookup, unless the former one is still in progress or its result was not taken.
  /// Errors: kInternal when the system refuses the thread.
  Result<void> begin();
  /// Readable when a thread has left a result.
  [[nodiscard]] int fd() const noexcept;
  /// The addresses, at least one, in the order in which to try them; no value before they are
  /// there. Errors: kPeerLost when the host is unknown.
  std::optional<Result<Addresses>> take();

 private:
  struct Shared;
  std::string host_;
  std::uint16_t port_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace pegaflow::directory
