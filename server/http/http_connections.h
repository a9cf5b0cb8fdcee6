#pragma once
/// \file
/// The limits of HTTP connections: their number, and the time that a response may take.

#include <cstddef>
#include <cstdint>
#include <list>

#include <kj/async-io.h>
#include <kj/timer.h>

#include "base/clock.h"
#include "server/http/http_counters.h"

namespace pegaflow::server {

class HttpConnection;

/// Counts the connections and closes the idlest when a place is needed, so that one more is always
/// served: orchestrators request /health and restart a server that does not respond.
///
/// Thread-bound: the HTTP thread. It outlives its connections.
class HttpConnections {
 public:
  struct Options {
    std::size_t places = 128;  ///< 1 or more. Many more than scrapers, probes and operators need.
    Duration take_timeout =
        std::chrono::seconds(10);  ///< From a request until its last byte is read.
  };

  HttpConnections(const Options& options, kj::Timer& timer) : options_(options), timer_(timer) {}

  /// Takes a place for `stream`. With all places taken, it displaces the oldest connection whose
  /// client does not read its response, or else the oldest without a request for a second, or else
  /// the oldest that has received a response, or else the oldest: a client that sends requests
  /// without a pause has one pending all the time, and a new client, such as a probe of /health,
  /// has had no time to send one.
  kj::Own<HttpConnection> add(kj::Own<kj::AsyncIoStream> stream, bool is_socket);

  [[nodiscard]] const HttpCounters& counters() const noexcept { return counters_; }
  void note_refused_user() noexcept { ++counters_.refused_user; }

 private:
  friend class HttpConnection;
  /// The connection that makes room for the next one.
  [[nodiscard]] HttpConnection* displaced() const;

  Options options_;
  kj::Timer& timer_;
  std::list<HttpConnection*> open_;  ///< Oldest first, without those that are being closed.
  HttpCounters counters_;
};

/// One client's stream. kj-http reads and writes through it, and owns it.
class HttpConnection final : public kj::AsyncIoStream {
 public:
  HttpConnection(HttpConnections& all, kj::Own<kj::AsyncIoStream> stream, bool is_socket);
  ~HttpConnection() noexcept(false);
  KJ_DISALLOW_COPY(HttpConnection);

  /// Whether it came through the Unix socket, from an allowed user.
  [[nodiscard]] bool is_socket() const noexcept { return is_socket_; }
  /// Resolves when the connection has to be closed. To be called once.
  kj::Promise<void> on_end() { return kj::mv(end_.promise); }

  /// A request was read, and its response, if any, is written. Between the two the connection
  /// waits for the server, and the response's deadline counts from the first.
  void begin_request();
  void end_request() noexcept;

  kj::Promise<std::size_t> tryRead(void* buffer, std::size_t min, std::size_t max) override {
    return stream_->tryRead(buffer, min, max);
  }
  kj::Promise<void> write(const void* buffer, std::size_t size) override {
    return in_time(stream_->write(buffer, size));
  }
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override {
    return in_time(stream_->write(pieces));
  }
  kj::Promise<void> whenWriteDisconnected() override { return stream_->whenWriteDisconnected(); }
  void shutdownWrite() override { stream_->shutdownWrite(); }
  void abortRead() override { stream_->abortRead(); }

 private:
  friend class HttpConnections;
  kj::Promise<void> in_time(kj::Promise<void> writing);
  void close();

  HttpConnections& all_;
  kj::Own<kj::AsyncIoStream> stream_;
  kj::PromiseFulfillerPair<void> end_;
  std::list<HttpConnection*>::iterator place_;
  kj::TimePoint due_ = kj::origin<kj::TimePoint>();  ///< Deadline of a pending request's response.
  kj::TimePoint idle_since_;                         ///< When the last request ended.
  std::uint32_t writing_ = 0;
  bool is_socket_;
  bool is_pending_ = false;
  bool was_answered_ = false;
  bool is_closing_ = false;
};

}  // namespace pegaflow::server
