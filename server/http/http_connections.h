#pragma once
/// \file
/// The places of HTTP clients: a limit to their number, and to the time that a response may take.

#include <cstddef>
#include <cstdint>
#include <list>

#include <kj/async-io.h>
#include <kj/timer.h>

#include "base/clock.h"
#include "server/http/snapshot.h"

namespace pegaflow::server {

class HttpConnection;

/// Counts the connections and closes those that keep a place for nothing, so that one more is
/// always served: /health is asked by orchestrators that restart what does not answer.
///
/// Thread-bound: the HTTP thread. It outlives its connections.
class HttpConnections {
 public:
  struct Options {
    std::size_t places = 128;  ///< 1 or more. A scraper, a probe and a person, many times over.
    Duration take_timeout = std::chrono::seconds(10);  ///< From a request to its last byte taken.
  };

  HttpConnections(const Options& options, kj::Timer& timer) : options_(options), timer_(timer) {}

  /// Takes a place for `stream`. With all places taken, it displaces the oldest connection whose
  /// client does not take its response, or else the oldest that has asked for nothing for a second,
  /// or else the oldest that was answered before, or else the oldest: a client that sends its
  /// requests without a pause has one pending all the time, and one that has just come, like
  /// /health's, had no time to ask.
  kj::Own<HttpConnection> add(kj::Own<kj::AsyncIoStream> stream, bool is_socket);

  [[nodiscard]] const HttpCounters& counters() const noexcept { return counters_; }
  void note_refused_user() noexcept { ++counters_.refused_user; }

 private:
  friend class HttpConnection;
  /// The connection that makes room for the next one.
  [[nodiscard]] HttpConnection* displaced() const;

  Options options_;
  kj::Timer& timer_;
  std::list<HttpConnection*> open_;  ///< The oldest first; those that are being closed are not in.
  HttpCounters counters_;
};

/// One client's stream. kj-http reads and writes through it, and owns it.
class HttpConnection final : public kj::AsyncIoStream {
 public:
  HttpConnection(HttpConnections& all, kj::Own<kj::AsyncIoStream> stream, bool is_socket);
  ~HttpConnection() noexcept(false);
  KJ_DISALLOW_COPY(HttpConnection);

  /// Came through the Unix socket, from an allowed user.
  [[nodiscard]] bool is_socket() const noexcept { return is_socket_; }
  /// Fulfilled when the connection has to be closed. To be called once.
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
  kj::TimePoint due_ = kj::origin<kj::TimePoint>();  ///< Of a pending request's response.
  kj::TimePoint idle_since_;                         ///< Without a pending request.
  std::uint32_t writing_ = 0;
  bool is_socket_;
  bool is_pending_ = false;
  bool was_answered_ = false;
  bool is_closing_ = false;
};

}  // namespace pegaflow::server
