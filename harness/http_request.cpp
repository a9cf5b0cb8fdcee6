#include "harness/http_request.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <optional>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/os/unique_fd.h"

namespace pegaflow::harness {
namespace {

Result<UniqueFd> connect_socket(int family, const sockaddr* to, socklen_t size,
                                const std::string& address) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "make a socket");
  const timeval limit{.tv_sec = 30, .tv_usec = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (::connect(socket.get(), to, size) != 0) {
    return fail(Errc::kPeerLost, "connect to {}: {}", address, std::strerror(errno));
  }
  return socket;
}

bool is_socket_path(const std::string& address) {
  return address.starts_with('/') || address.starts_with("./");
}

Result<UniqueFd> connect_to(const std::string& address) {
  if (is_socket_path(address)) {
    sockaddr_un path{};
    path.sun_family = AF_UNIX;
    if (address.size() >= sizeof path.sun_path) {
      return fail(Errc::kInvalidArgument, "the socket path {} is too long", address);
    }
    address.copy(path.sun_path, address.size());
    return connect_socket(AF_UNIX, reinterpret_cast<const sockaddr*>(&path), sizeof path, address);
  }
  const std::size_t colon = std::min(address.rfind(':'), address.size());
  const std::string port_text = address.substr(std::min(colon + 1, address.size()));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  std::uint16_t port = 0;
  std::from_chars(port_text.data(), port_text.data() + port_text.size(), port);
  to.sin_port = htons(port);
  if (port == 0 || ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1) {
    return fail(Errc::kInvalidArgument, "the HTTP address {} is not an IPv4 address and a port",
                address);
  }
  return connect_socket(AF_INET, reinterpret_cast<const sockaddr*>(&to), sizeof to, address);
}

std::string request_text(const std::string& address, std::string_view method,
                         const std::string& path, const std::vector<std::string>& headers,
                         const std::string& body) {
  std::string text = fmt::format("{} {} HTTP/1.1\r\n", method, path);
  const bool has_host = std::any_of(headers.begin(), headers.end(), [](const std::string& header) {
    return header.starts_with("Host:");
  });
  if (!has_host) {
    text += fmt::format("Host: {}\r\n", is_socket_path(address) ? "localhost" : address);
  }
  if (method == "POST") text += fmt::format("Content-Length: {}\r\n", body.size());
  for (const std::string& header : headers) text += header + "\r\n";
  return text + "\r\n" + body;
}

/// The length of a response with its headers; no value before the headers are complete.
/// Errors: kInternal without Content-Length.
Result<std::optional<std::size_t>> response_length(const std::string& response) {
  const std::size_t end = response.find("\r\n\r\n");
  if (end == std::string::npos) return std::nullopt;
  std::string headers = response.substr(0, end);
  for (char& letter : headers)
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  constexpr std::string_view kLength = "\r\ncontent-length:";
  const std::size_t at = headers.find(kLength);
  std::size_t length = 0;
  if (at != std::string::npos) {
    const std::size_t digit = headers.find_first_not_of(' ', at + kLength.size());
    if (digit != std::string::npos &&
        std::from_chars(headers.data() + digit, headers.data() + headers.size(), length).ec ==
            std::errc()) {
      return end + 4 + length;
    }
  }
  return fail(Errc::kInternal, "a response without Content-Length: {}", headers);
}

}  // namespace

Result<HttpResponse> http_request(const std::string& address, std::string_view method,
                                  const std::string& path, const std::vector<std::string>& headers,
                                  const std::string& body) {
  PEGA_TRY_LET(const UniqueFd socket, connect_to(address));
  const std::string request = request_text(address, method, path, headers, body);
  if (::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    return fail(Errc::kPeerLost, "send {} {} to {}: {}", method, path, address,
                std::strerror(errno));
  }
  std::string response;
  // KJ's server keeps the connection open in any case, so the length tells where the body ends.
  std::optional<std::size_t> whole;
  while (!whole || response.size() < *whole) {
    char piece[16384];
    const ssize_t got = ::recv(socket.get(), piece, sizeof piece, 0);
    if (got <= 0) {
      return fail(Errc::kPeerLost, "{} {} from {}: {}; received: {}", method, path, address,
                  got == 0 ? "the connection ended within the response" : std::strerror(errno),
                  response);
    }
    response.append(piece, static_cast<std::size_t>(got));
    if (!whole) {
      PEGA_TRY_LET(whole, response_length(response));
    }
  }
  HttpResponse parsed{.status = 0, .body = response.substr(response.find("\r\n\r\n") + 4)};
  const std::size_t status = response.find(' ') + 1;
  std::from_chars(response.data() + status, response.data() + response.size(), parsed.status);
  return parsed;
}

}  // namespace pegaflow::harness
