#pragma once
/// \file
/// Lets HTTP requests be answered one at a time.

#include <cstddef>
#include <list>

#include <kj/async.h>
#include <kj/memory.h>

namespace pegaflow::server {

/// Serializes the requests that cost more than /health: first come, first served. One /metrics page
/// takes about as long to build as fifty /health responses, so what a /health response waits for
/// must not grow with the number of clients that ask for pages.
///
/// The queue is bounded by the number of connections, since each waits for one request at a time.
/// Thread-bound: the HTTP thread. It outlives its turns and the promises of turns.
class HttpTurns {
 public:
  HttpTurns() = default;
  HttpTurns(const HttpTurns&) = delete;
  HttpTurns& operator=(const HttpTurns&) = delete;

  /// Destroying it starts the next turn.
  class Turn {
   public:
    explicit Turn(HttpTurns& all) : all_(all) {}
    ~Turn() { all_.start_next(); }
    KJ_DISALLOW_COPY(Turn);

   private:
    HttpTurns& all_;
  };

  /// The caller's turn, once all earlier ones have ended. A dropped promise gives its place up.
  kj::Promise<kj::Own<Turn>> next();
  /// Promises of next() that still wait.
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }

 private:
  class Place;
  void start_next();

  std::list<Place*> waiting_;
  bool is_taken_ = false;
};

}  // namespace pegaflow::server
