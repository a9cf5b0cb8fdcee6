#include "server/rpc/job_calls.h"

#include <memory>
#include <utility>

#include "cluster/peers.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/direct/direct_reads.h"

namespace pegaflow::server {

kj::Promise<JobsReached> await_job_here(SessionContext& context, const Id128& connection,
                                        const JobId& job, Duration patience,
                                        JobWaits::Until until) {
  // The fulfiller outlives the promise where the connection ends first.
  auto answered = kj::newPromiseAndFulfiller<Result<void>>();
  CacheService& service = context.service;
  service.await_job(
      connection, job, patience,
      [fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<Result<void>>>>(kj::mv(
           answered.fulfiller))](Result<void> result) { (*fulfiller)->fulfill(std::move(result)); },
      until);
  context.background.poke();  // There is a new deadline.
  return answered.promise.then([&service, name = job.scheduler, until](Result<void>&& result) {
    return JobsReached{.ended = kj::mv(result), .up_to = service.jobs_reached(name, until)};
  });
}

kj::Promise<JobsReached> await_job_there(SessionContext& context, const Id128& connection,
                                         cluster::Peers* peers, const Id128& server,
                                         const JobId& job, Duration patience,
                                         JobWaits::Until until) {
  if (auto caller = context.service.check_member(connection); !caller) {
    return JobsReached{.ended = kj::mv(caller)};
  }
  if (peers == nullptr) {
    return JobsReached{.ended = fail(Errc::kGone, "job {} belongs to another server", job.number)};
  }
  const bool begun = until == JobWaits::Until::kBegun;
  if (begun && !context.direct.may_read_from(server, connection)) {
    return JobsReached{.ended = fail(Errc::kRefused,
                                     "job {} is one of another node, whose engines' memory this "
                                     "engine cannot read",
                                     job.number)};
  }
  return peers->await_job(server, job, patience, begun);
}

}  // namespace pegaflow::server
