#pragma once
/// \file
/// Allocates the pool's memory while the server already answers /health.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/event_fd.h"
#include "base/os/mailbox.h"
#include "engine/pool/pool.h"

namespace pegaflow::server {

/// Progress of the preparation. The last report has the pool or the error.
struct PoolNews {
  std::string status;  ///< For /health.
  std::uint64_t done_bytes = 0;
  std::unique_ptr<engine::Pool> pool;
  std::optional<Error> error;
};

/// Creates a Pool on a thread of its own, and tries again while memory is short: the pool of a
/// previous server is freed only when its last client has unmapped it.
///
/// Constructor and destructor belong to the thread that drains news().
class PoolPreparation {
 public:
  struct Options {
    engine::Pool::Options pool;
    Duration patience = std::chrono::seconds(30);  ///< Time for retries after kOutOfCapacity.
    Duration retry_interval = std::chrono::milliseconds(250);
  };

  /// Starts the thread. `clock` outlives it.
  /// Errors: kInternal when no thread can start.
  static Result<std::unique_ptr<PoolPreparation>> start(const Options& options, const Clock& clock);
  /// Ends it early if it is not done, within tens of milliseconds.
  ~PoolPreparation();

  /// Receives at most 100 reports of progress in each attempt, so that it is never full.
  [[nodiscard]] Mailbox<PoolNews>& news() noexcept { return news_; }

 private:
  PoolPreparation(const Options& options, const Clock& clock);
  void run();
  void report(PoolNews news);

  Options options_;
  const Clock& clock_;
  Mailbox<PoolNews> news_;
  std::atomic<bool> stop_{false};
  EventFd stopped_;
  std::thread thread_;
};

}  // namespace pegaflow::server
