#include "server/http/http_turns.h"

#include <utility>

namespace pegaflow::server {

/// The promise's place in the queue, for as long as the promise exists.
class HttpTurns::Place {
 public:
  Place(kj::PromiseFulfiller<kj::Own<Turn>>& fulfiller, HttpTurns& all)
      : fulfiller_(fulfiller), all_(all), place_(all.waiting_.insert(all.waiting_.end(), this)) {}
  ~Place() noexcept(false) { leave(); }
  KJ_DISALLOW_COPY(Place);

  void start() {
    leave();
    fulfiller_.fulfill(kj::heap<Turn>(all_));
  }

 private:
  void leave() {
    if (std::exchange(is_waiting_, false)) all_.waiting_.erase(place_);
  }

  kj::PromiseFulfiller<kj::Own<Turn>>& fulfiller_;
  HttpTurns& all_;
  std::list<Place*>::iterator place_;
  bool is_waiting_ = true;
};

kj::Promise<kj::Own<HttpTurns::Turn>> HttpTurns::next() {
  if (!std::exchange(is_taken_, true)) return kj::heap<Turn>(*this);
  return kj::newAdaptedPromise<kj::Own<Turn>, Place>(*this);
}

void HttpTurns::start_next() {
  is_taken_ = !waiting_.empty();
  if (is_taken_) waiting_.front()->start();
}

}  // namespace pegaflow::server
