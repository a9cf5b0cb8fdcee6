#pragma once
/// \file
/// Calls that end what a job holds at the server.

#include <cstdint>
#include <span>

#include "base/clock.h"
#include "base/job_id.h"
#include "client/link.h"
#include "client/loop.h"

namespace pegaflow {

/// Sends calls for which no job waits. A failure is logged at the debug level only: a slow server
/// executes the call later, and after a lost connection the next hello replaces it.
///
/// Bound to the mover's KJ thread.
class CleanupCalls {
 public:
  /// `link` and `tasks` outlive it.
  CleanupCalls(Link& link, LoopTasks& tasks, Duration deadline)
      : link_(link), tasks_(tasks), deadline_(deadline) {}

  /// Drops the reservation of a save.
  void abandon(const JobId& job);
  /// Ends this rank's share of a save for which it has no block to write.
  void publish_nothing(const JobId& job);
  void release(std::uint64_t pin);
  /// Invalidates the blocks at these places of a pin.
  void report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places);

 private:
  template <typename Params, typename Results>
  void send_and_log(capnp::Request<Params, Results>&& request, const char* what);

  Link& link_;
  LoopTasks& tasks_;
  const Duration deadline_;
};

}  // namespace pegaflow
