#pragma once
/// \file
/// A server's connection to its keeper.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "server/pool/keeper_wire.h"

namespace pegaflow::server {

/// A pool that a former server left, and the clients of that server that may access it.
struct KeptPool {
  struct Client {
    Id128 process;
    UniqueFd pidfd;
  };
  UniqueFd pool;
  UniqueFd tables;
  std::uint64_t pool_bytes = 0;
  std::vector<Client> clients;
};

/// Movable; thread-bound, and may be passed to another thread.
class KeeperLink {
 public:
  /// Connects to the keeper at `path`, or starts one, which goes on when this process ends. Each
  /// call, this one too, waits for the keeper for at most `patience`.
  /// Errors: kTimeout; kRefused when its program is not beside this one's, or a socket cannot be
  /// made there; kIo.
  static Result<KeeperLink> open(const std::filesystem::path& path,
                                 std::chrono::milliseconds patience = kAnswerPatience);
  /// Connects to one that runs; none when no keeper listens there.
  /// Errors: kTimeout, kRefused, kIo.
  static Result<std::optional<KeeperLink>> connect(
      const std::filesystem::path& path, std::chrono::milliseconds patience = kAnswerPatience);

  struct Patience {
    TimePoint deadline;
    const std::atomic<bool>& stop;
    std::function<void(std::int32_t pid)> waiting;  ///< Called once when it has to wait.
  };
  /// Becomes the owner, once the former one has ended, and returns what is kept.
  /// Errors: kTimeout, with the pid, when the former owner has not ended; kCancelled; kPeerLost;
  /// kIo.
  Result<std::optional<KeptPool>> take(const Clock& clock, const Patience& patience);
  /// The keeper keeps these instead of what it has, or nothing. Errors: kPeerLost, kIo.
  Result<void> put(int pool, int tables, std::uint64_t pool_bytes);
  Result<void> drop();

  /// That client may access the pool from now on. Does not wait.
  /// Errors: kBusy when the keeper does not read, kPeerLost, kIo.
  Result<void> add_client(const Id128& process, int pidfd);
  /// It may no longer. A client that the keeper is not informed of only delays the next server.
  void forget_client(const Id128& process);

  /// Readable once the keeper has ended: it sends nothing on its own.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] bool is_lost() const;

 private:
  KeeperLink(UniqueFd fd, std::chrono::milliseconds patience)
      : fd_(std::move(fd)), patience_(patience) {}
  Result<ReceivedMessage> receive();
  Result<void> expect_done(const char* what);

  UniqueFd fd_;
  std::chrono::milliseconds patience_;
};

/// The content of a keeper.
struct KeeperState {
  std::uint64_t pool_bytes = 0;
  std::int32_t keeper_pid = 0;
  std::int32_t server_pid = 0;  ///< 0 without one.
  std::uint32_t clients = 0;
};
/// None when no keeper listens there. Errors: kRefused, kIo.
Result<std::optional<KeeperState>> keeper_state(const std::filesystem::path& path);
/// Ends the keeper, and with it the memory that it holds. None when there is no keeper.
/// Errors: kRefused, with the pid, while a server uses it; kIo.
Result<std::optional<KeeperState>> release_keeper(const std::filesystem::path& path);

}  // namespace pegaflow::server
