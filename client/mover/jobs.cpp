#include "client/mover/jobs.h"

namespace pegaflow {

Error bad_slots(std::size_t slots, std::size_t blocks) {
  return {Errc::kInternal,
          fmt::format("{} slots for {} blocks, or one beyond the pool", slots, blocks)};
}

Error unanswered_error(bool lost) {
  return lost ? Error{Errc::kPeerLost, "the connection to the server was lost"}
              : Error{Errc::kCancelled, "the mover is closed"};
}

}  // namespace pegaflow
