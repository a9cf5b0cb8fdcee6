#include "client/mover/jobs.h"

#include "base/assert.h"

namespace pegaflow {

void check_completion(const MoverJob& job, const Device::Completion& completion) {
  PEGA_ASSERT(job.phase == MoverJob::Phase::kCopying,
              "the device completed batch {}, which is not in flight", completion.ticket);
  PEGA_ASSERT(
      completion.copied <= job.copies && (completion.copied == job.copies) == !completion.error,
      "the device copied {} of {} pages", completion.copied, job.copies);
}

Error bad_slots(std::size_t slots, std::size_t blocks) {
  return {Errc::kInternal,
          fmt::format("{} slots for {} blocks, or one beyond the pool", slots, blocks)};
}

Error unanswered_error(bool lost) {
  return lost ? Error{Errc::kPeerLost, "the connection to the server was lost"}
              : Error{Errc::kCancelled, "the mover is closed"};
}

}  // namespace pegaflow
