#include "router/request/held_bodies.h"

#include <utility>

#include "router/request/client_request.h"

namespace pegaflow::router {

void HeldBodies::hold_continuation(std::string body) {
  drop_continuation();
  continuation_ = std::move(body);
  request_.shared().metrics.body_bytes += continuation_.size();
}

void HeldBodies::drop_continuation() {
  request_.shared().metrics.body_bytes -= continuation_.size();
  std::string().swap(continuation_);
}

void HeldBodies::count_text(std::size_t bytes) {
  request_.shared().metrics.body_bytes += bytes;
  request_.shared().metrics.body_bytes -= std::exchange(text_bytes_, bytes);
}

void HeldBodies::release() {
  // Swapped: an assignment of an empty string keeps the memory, here and elsewhere.
  request_.client().release_body();
  std::string().swap(client_);
  drop_continuation();
  count_text(0);
}

}  // namespace pegaflow::router
