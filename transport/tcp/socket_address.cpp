#include "transport/tcp/socket_address.h"

#include <cerrno>
#include <charconv>
#include <memory>

#include <arpa/inet.h>
#include <netdb.h>

namespace pegaflow::tcp {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};

}  // namespace

Result<SocketAddress> SocketAddress::parse(std::string_view text, bool numeric) {
  const std::size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    host = {};  // An IPv6 address without brackets: the port is ambiguous.
  }
  const std::string port(host.empty() ? std::string_view() : text.substr(colon + 1));
  std::uint16_t number = 0;
  const auto read = std::from_chars(port.data(), port.data() + port.size(), number);
  if (port.empty() || read.ec != std::errc() || read.ptr != port.data() + port.size()) {
    return fail(Errc::kInvalidArgument, "\"{}\" is not HOST:PORT or [HOST]:PORT", text);
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(std::string(host).c_str(), port.c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, FreeAddresses> list(found);
  if (error != 0 || found->ai_addrlen > sizeof(sockaddr_storage)) {
    return fail(Errc::kInvalidArgument, "\"{}\" is not an address: {}", text,
                ::gai_strerror(error));
  }
  SocketAddress address;
  std::memcpy(&address.storage_, found->ai_addr, found->ai_addrlen);
  address.size_ = found->ai_addrlen;
  return address;
}

Result<SocketAddress> SocketAddress::near_end(int socket) {
  SocketAddress address;
  address.size_ = sizeof address.storage_;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage_), &address.size_) != 0) {
    return fail_errno(errno, "get a socket's address");
  }
  return address;
}

bool SocketAddress::is_wildcard() const noexcept {
  if (family() == AF_INET6) {
    const in6_addr& host = reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_addr;
    const in6_addr any = IN6ADDR_ANY_INIT;
    constexpr std::uint8_t kMappedAny[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    return std::memcmp(&host, &any, sizeof host) == 0 ||
           std::memcmp(&host, kMappedAny, sizeof host) == 0;
  }
  return reinterpret_cast<const sockaddr_in*>(&storage_)->sin_addr.s_addr == INADDR_ANY;
}

SocketAddress SocketAddress::with_port(std::uint16_t port) const noexcept {
  SocketAddress other = *this;
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&other.storage_)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(&other.storage_)->sin_port = htons(port);
  }
  return other;
}

std::string to_string(const SocketAddress& address) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  const int error = ::getnameinfo(address.data(), address.size(), host, sizeof host, port,
                                  sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) return fmt::format("({})", ::gai_strerror(error));
  return address.family() == AF_INET6 ? fmt::format("[{}]:{}", host, port)
                                      : fmt::format("{}:{}", host, port);
}

}  // namespace pegaflow::tcp
