#pragma once
/// \file
/// A queue in which HTTP requests are served one at a time.

#include <cstddef>
#include <list>

#include <kj/async.h>
#include <kj/memory.h>

namespace pegaflow::server {

/// Serializes the requests that cost more than /health: first come, first served. One /metrics page
/// takes about as long to build as fifty /health responses, so the delay of a /health response must
/// not grow with the number of clients that request pages.
///
/// The queue is bounded by the number of connections, since each waits for one request at a time.
/// Thread-bound: the HTTP thread. It outlives its turns and the promises of turns.
class HttpTurns {
 public:
  HttpTurns() = default;
  HttpTurns(const HttpTurns&) = delete;
  HttpTurns& operator=(const HttpTurns&) = delete;

  /// The right to be served. Destroying it starts the next turn.
  class Turn {
   public:
    explicit Turn(HttpTurns& all) : all_(all) {}
    ~Turn() { all_.start_next(); }
    KJ_DISALLOW_COPY(Turn);

   private:
    HttpTurns& all_;
  };

  /// The caller's turn, once all earlier ones have ended. A dropped promise gives up its place.
  kj::Promise<kj::Own<Turn>> next();
  /// Number of promises of next() that still wait.
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }

 private:
  class Place;
  void start_next();

  std::list<Place*> waiting_;
  bool is_taken_ = false;
};

}  // namespace pegaflow::server
