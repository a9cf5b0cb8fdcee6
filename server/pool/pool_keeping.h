#pragma once
/// \file
/// The keeper of a running server: which clients may access the pool, and a new one if it ends.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>

#include <kj/async-unix.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "engine/kept/kept_tables.h"
#include "engine/pool/pool.h"
#include "server/pool/keeper_link.h"
#include "server/pool/kept_report.h"
#include "server/pool/pool_preparation.h"

namespace pegaflow::server {

/// Passes the keeper the pidfd of each client before it gets the pool, and all of it once more to
/// another keeper. Thread-bound: the RPC thread.
class PoolKeeping {
 public:
  /// `pool` and `tables` outlive it.
  PoolKeeping(PoolPreparation::Keep keep, std::filesystem::path socket, const engine::Pool& pool,
              engine::KeptTables& tables, std::optional<KeeperLink> keeper, const Clock& clock);

  /// A connection of this process, whose pidfd it is, may get the pool. False when the keeper
  /// cannot be informed: then it must not.
  bool admit(const Id128& connection, const Id128& process, int pidfd);
  /// Nothing that began under that connection can access the pool any longer. Ignores unknown ones.
  void forget(const Id128& connection);

  /// Looks whether the keeper lives, and finds another one if it does not. Call it when until_due()
  /// resolves.
  void tend();
  /// Resolves once the keeper has ended or does not answer, and a second later without a keeper.
  /// No timer runs while there is one. One call at a time; destroy the promise before `port`.
  kj::Promise<void> until_due(kj::UnixEventPort& port, kj::Timer& timer);
  /// The kept pool has other tables from now on.
  Result<void> replace_tables(engine::KeptTables& tables);
  /// The name of the pool while it is kept; none without a keeper.
  [[nodiscard]] Id128 pool() const;
  /// Its part of the report.
  [[nodiscard]] KeptReport report() const;

 private:
  struct Client {
    UniqueFd pidfd;
    std::uint32_t connections = 0;
  };
  Result<void> find_keeper();
  void lose(const std::string& why);

  PoolPreparation::Keep keep_;
  std::filesystem::path socket_;
  const engine::Pool& pool_;
  engine::KeptTables* tables_;
  std::optional<KeeperLink> keeper_;
  const Clock& clock_;
  std::unordered_map<Id128, Id128> connections_;  ///< To the process of each.
  std::unordered_map<Id128, Client> clients_;     ///< By process.
  std::string why_not_;
  TimePoint next_try_{};
  kj::Own<kj::PromiseFulfiller<void>> lost_;  ///< That of until_due().
};

}  // namespace pegaflow::server
