#include "directory/redis/redis_stream.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

namespace pegaflow::directory {
namespace {

/// The oldest error of OpenSSL on this thread, which is then forgotten with all others.
std::string tls_error() {
  char text[256] = "unknown error";
  if (const unsigned long code = ::ERR_get_error(); code != 0) {
    ::ERR_error_string_n(code, text, sizeof text);
  }
  ::ERR_clear_error();
  return text;
}

Result<UniqueFd> begin_to_connect(const HostAddress& address) {
  UniqueFd fd(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fail(Errc::kPeerLost, "connect: {}", std::strerror(errno));
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  const auto* const to = reinterpret_cast<const sockaddr*>(&address.bytes);
  if (::connect(fd.get(), to, address.size) != 0 && errno != EINPROGRESS) {
    return fail(Errc::kPeerLost, "connect: {}", std::strerror(errno));
  }
  return fd;
}

}  // namespace

struct TlsContext::Hidden {
  std::unique_ptr<SSL_CTX, decltype(&::SSL_CTX_free)> context{nullptr, &::SSL_CTX_free};
};

struct RedisStream::Session {
  std::unique_ptr<SSL, decltype(&::SSL_free)> ssl{nullptr, &::SSL_free};
};

TlsContext::TlsContext() : hidden_(std::make_unique<Hidden>()) {}
TlsContext::~TlsContext() = default;

Result<std::shared_ptr<TlsContext>> TlsContext::create(const std::string& ca_file) {
  std::shared_ptr<TlsContext> made(new TlsContext());
  auto& context = made->hidden_->context;
  context.reset(::SSL_CTX_new(::TLS_client_method()));
  if (context == nullptr) return fail(Errc::kRefused, "TLS does not start: {}", tls_error());
  ::SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  ::SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  ::SSL_CTX_set_mode(context.get(),
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  const int loaded = ca_file.empty()
                         ? ::SSL_CTX_set_default_verify_paths(context.get())
                         : ::SSL_CTX_load_verify_locations(context.get(), ca_file.c_str(), nullptr);
  if (loaded != 1) {
    return fail(Errc::kRefused, "--directory-ca-file {}: cannot be used: {}", ca_file, tls_error());
  }
  return made;
}

RedisStream::RedisStream(UniqueFd fd) : fd_(std::move(fd)) {}
RedisStream::~RedisStream() = default;

Result<std::unique_ptr<RedisStream>> RedisStream::connect(const RedisUrl& url,
                                                          const HostAddress& address,
                                                          std::shared_ptr<TlsContext> tls) {
  PEGA_TRY_LET(UniqueFd fd, begin_to_connect(address));
  std::unique_ptr<RedisStream> stream(new RedisStream(std::move(fd)));
  if (url.is_tls) {
    PEGA_TRY(stream->begin_tls(url.host, *tls));
    stream->tls_ = std::move(tls);
  }
  return stream;
}

Result<void> RedisStream::begin_tls(const std::string& host, TlsContext& tls) {
  session_ = std::make_unique<Session>();
  session_->ssl.reset(::SSL_new(tls.hidden_->context.get()));
  SSL* const ssl = session_->ssl.get();
  if (ssl == nullptr || ::SSL_set_fd(ssl, fd_.get()) != 1) {
    return fail(Errc::kPeerLost, "begin TLS: {}", tls_error());
  }
  in6_addr ignored{};
  const bool is_address = ::inet_pton(AF_INET, host.c_str(), &ignored) == 1 ||
                          ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
  const bool is_set =
      is_address ? ::X509_VERIFY_PARAM_set1_ip_asc(::SSL_get0_param(ssl), host.c_str()) == 1
                 : ::SSL_set1_host(ssl, host.c_str()) == 1 &&
                       ::SSL_set_tlsext_host_name(ssl, host.c_str()) == 1;
  if (!is_set) return fail(Errc::kPeerLost, "begin TLS with {}: {}", host, tls_error());
  return {};
}

Result<bool> RedisStream::establish() {
  if (!is_connected_) {
    int problem = 0;
    socklen_t size = sizeof problem;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &problem, &size);
    if (problem != 0) return fail(Errc::kPeerLost, "connect: {}", std::strerror(problem));
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd_.get(), reinterpret_cast<sockaddr*>(&peer), &length) != 0) return false;
    is_connected_ = true;
    wants_write_ = false;
  }
  if (session_ == nullptr) return true;
  SSL* const ssl = session_->ssl.get();
  ::ERR_clear_error();
  const int result = ::SSL_connect(ssl);
  if (result == 1) {
    wants_write_ = false;
    return true;
  }
  const int why = ::SSL_get_error(ssl, result);
  wants_write_ = why == SSL_ERROR_WANT_WRITE;
  if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE) return false;
  if (const long verified = ::SSL_get_verify_result(ssl); verified != X509_V_OK) {
    ::ERR_clear_error();
    return fail(Errc::kRefused, "the certificate is not trusted: {}",
                ::X509_verify_cert_error_string(verified));
  }
  return fail(Errc::kPeerLost, "TLS handshake: {}", tls_error());
}

Result<std::size_t> RedisStream::tls_result(int result, const char* what) {
  if (result > 0) return static_cast<std::size_t>(result);
  const int why = ::SSL_get_error(session_->ssl.get(), result);
  wants_write_ = why == SSL_ERROR_WANT_WRITE;
  if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE) return std::size_t{0};
  return fail(Errc::kPeerLost, "{} over TLS: {}", what, tls_error());
}

Result<std::size_t> RedisStream::send(std::span<const char> bytes) {
  if (session_ != nullptr) {
    ::ERR_clear_error();
    return tls_result(
        ::SSL_write(session_->ssl.get(), bytes.data(), static_cast<int>(bytes.size())), "send");
  }
  const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (sent >= 0) return static_cast<std::size_t>(sent);
  if (errno == EAGAIN || errno == EINTR) return std::size_t{0};
  return fail(Errc::kPeerLost, "send: {}", std::strerror(errno));
}

Result<std::size_t> RedisStream::receive(std::span<char> into) {
  if (session_ != nullptr) {
    ::ERR_clear_error();
    return tls_result(::SSL_read(session_->ssl.get(), into.data(), static_cast<int>(into.size())),
                      "receive");
  }
  const ssize_t got = ::recv(fd_.get(), into.data(), into.size(), 0);
  if (got > 0) return static_cast<std::size_t>(got);
  if (got == 0) return fail(Errc::kPeerLost, "the server closed the connection");
  if (errno == EAGAIN || errno == EINTR) return std::size_t{0};
  return fail(Errc::kPeerLost, "receive: {}", std::strerror(errno));
}

}  // namespace pegaflow::directory
