#pragma once
/// \file
/// Allocates the pool's memory, or takes over that of a former server, while the server already
/// answers /health.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/event_fd.h"
#include "base/os/mailbox.h"
#include "engine/kept/kept_tables.h"
#include "engine/pool/pool.h"
#include "server/pool/keeper_link.h"

namespace pegaflow::server {

/// A pool that is ready, with what belongs to it.
struct PreparedPool {
  std::unique_ptr<engine::Pool> pool;
  std::unique_ptr<engine::KeptTables> tables;  ///< Null: nothing outlives this server.
  std::optional<KeeperLink> keeper;            ///< None also while an external one is missing.
  std::vector<KeptPool::Client> clients;       ///< Clients of the former server.
  bool is_adopted = false;                     ///< `tables` are the former server's.
};

/// Progress of the preparation. The last report has the pool or the error.
struct PoolNews {
  std::string status;  ///< For /health.
  std::uint64_t done_bytes = 0;
  std::unique_ptr<PreparedPool> prepared;
  std::optional<Error> error;
};

/// Creates a Pool on a thread of its own, and tries again while memory is short: the pool of a
/// previous server is freed only when its last client has unmapped it.
///
/// Constructor and destructor belong to the thread that drains news().
class PoolPreparation {
 public:
  enum class Keep : std::uint8_t {
    kNo,
    kYes,       ///< Starts a keeper where there is none.
    kExternal,  ///< Uses one that runs already, and serves without where there is none.
  };
  struct Options {
    engine::Pool::Options pool;
    /// Adopts a kept pool of any size: the operator chose none.
    bool any_size = false;
    Duration patience = std::chrono::seconds(30);  ///< Time for retries after kOutOfCapacity.
    Duration retry_interval = std::chrono::milliseconds(250);
    Keep keep = Keep::kNo;
    std::filesystem::path keeper{};  ///< Its socket.
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
  Result<void> prepare(PreparedPool& prepared);
  /// Logs that another pool takes memory, which this server will not use.
  void warn_of_keeper() const;
  Result<void> connect(PreparedPool& prepared);
  /// Takes over the kept pool, if there is one that fits; else the keeper drops it.
  Result<void> take_over(PreparedPool& prepared);
  Result<void> adopt(KeptPool&& kept, PreparedPool& prepared);
  Result<void> create(PreparedPool& prepared);
  Result<engine::Pool> allocate();
  Result<void> make_tables(PreparedPool& prepared);
  /// Waits until no disk writes to the pool any longer for a server that is gone.
  Result<void> wait_for_disks(const engine::KeptTables& tables);
  void report_status(std::string status);
  void report(PoolNews news);

  Options options_;
  const Clock& clock_;
  TimePoint deadline_;
  Mailbox<PoolNews> news_;
  std::atomic<bool> stop_{false};
  EventFd stopped_;
  std::thread thread_;
};

/// The files whose reads may write to the pool, for the server after this one.
Result<void> record_disks(engine::KeptTables& tables, const std::vector<std::string>& paths);

}  // namespace pegaflow::server
