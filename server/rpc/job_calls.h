#pragma once
/// \file
/// Waits of engines for the jobs of others.

#include <kj/async.h>

#include "base/clock.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "capnp/wire/codec.h"
#include "server/cache/job_waits.h"
#include "server/rpc/session_context.h"

namespace pegaflow::server {

/// The answer to an awaitJob of `connection` for a job of an engine of this node.
kj::Promise<JobsReached> await_job_here(SessionContext& context, const Id128& connection,
                                        const JobId& job, Duration patience, JobWaits::Until until);
/// The same for the node `server`; `peers`: null without other nodes.
kj::Promise<JobsReached> await_job_there(SessionContext& context, const Id128& connection,
                                         cluster::Peers* peers, const Id128& server,
                                         const JobId& job, Duration patience,
                                         JobWaits::Until until);

}  // namespace pegaflow::server
