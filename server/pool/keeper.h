#pragma once
/// \file
/// The process that holds the descriptors of a pool while no server does.

#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <vector>

#include "base/error.h"
#include "server/pool/keeper_wire.h"

namespace pegaflow::server {

/// Holds a pool, its tables and the pidfds of the clients that may access it, for one server at a
/// time: the next one gets them once the former one's process has ended and all that it sent was
/// read. Maps and touches nothing. Only this user and root may connect. Thread-bound.
class Keeper {
 public:
  /// Serves the listening socket until SIGTERM, SIGINT or a kRelease; the memory goes with the
  /// process.
  /// Errors: kIo when the kernel rejects an operation that it needs.
  static Result<void> run(UniqueFd listener);

 private:
  struct Connection {
    UniqueFd fd;
    std::int32_t pid = 0;
  };
  struct Process {
    Id128 id;
    UniqueFd pidfd;
  };
  struct Owner {
    int connection = -1;  ///< -1 once it is closed.
    UniqueFd pidfd;
    std::int32_t pid = 0;
  };

  explicit Keeper(UniqueFd listener) : listener_(std::move(listener)) {}
  Result<void> serve(int signals);
  void accept_one();
  /// Returns false when the connection is over.
  bool read_one(Connection& connection);
  void handle(Connection& connection, ReceivedMessage&& received);
  void take(Connection& connection, UniqueFd pidfd);
  void release(const Connection& connection);
  [[nodiscard]] bool owner_has_ended() const;
  /// Reads what a dead owner sent before it ended.
  void drain_owner();
  [[nodiscard]] KeeperMessage state(KeeperMessage::Kind kind) const;

  UniqueFd listener_;
  std::list<Connection> connections_;
  std::optional<Owner> owner_;
  UniqueFd pool_;
  UniqueFd tables_;
  std::uint64_t pool_bytes_ = 0;
  std::vector<Process> processes_;
  bool is_released_ = false;
};

}  // namespace pegaflow::server
