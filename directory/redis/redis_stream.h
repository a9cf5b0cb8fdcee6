#pragma once
/// \file
/// A connection to a Redis server that never waits, with TLS where the address asks for it.

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "base/os/unique_fd.h"
#include "directory/redis/host_lookup.h"
#include "directory/redis/redis_url.h"

namespace pegaflow::directory {

/// The part that all TLS connections share: the trusted certificates. Immutable once made.
class TlsContext {
 public:
  /// Trusts the certificates in `ca_file`; empty: those of the system. Errors: kRefused when they
  /// cannot be read.
  static Result<std::shared_ptr<TlsContext>> create(const std::string& ca_file);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class RedisStream;
  struct Hidden;
  TlsContext();
  std::unique_ptr<Hidden> hidden_;
};

/// Bytes to and from one server. With TLS the server's certificate has to be valid for the host of
/// the address. Thread-bound; no call waits.
class RedisStream {
 public:
  /// Begins to connect to one address of the host of `url`. `tls` is needed for an address with
  /// TLS. Errors: kPeerLost when the system refuses.
  static Result<std::unique_ptr<RedisStream>> connect(const RedisUrl& url,
                                                      const HostAddress& address,
                                                      std::shared_ptr<TlsContext> tls);
  ~RedisStream();
  RedisStream(const RedisStream&) = delete;
  RedisStream& operator=(const RedisStream&) = delete;

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// Whether the next step needs room to write, besides bytes to send.
  [[nodiscard]] bool wants_write() const noexcept { return wants_write_; }

  /// Goes on with connecting. True once bytes can be sent. Errors: kPeerLost; kRefused for a
  /// certificate that is not trusted.
  Result<bool> establish();
  /// Bytes sent; 0: there is no room now. Errors: kPeerLost.
  Result<std::size_t> send(std::span<const char> bytes);
  /// Bytes received; 0: none have arrived. Errors: kPeerLost, also at the end of the stream.
  Result<std::size_t> receive(std::span<char> into);

 private:
  struct Session;
  explicit RedisStream(UniqueFd fd);
  Result<void> begin_tls(const std::string& host, TlsContext& tls);
  Result<std::size_t> tls_result(int result, const char* what);

  UniqueFd fd_;
  std::shared_ptr<TlsContext> tls_;
  std::unique_ptr<Session> session_;  ///< Null without TLS.
  bool is_connected_ = false;
  bool wants_write_ = true;
};

}  // namespace pegaflow::directory
