#pragma once
/// \file
/// The messages between a server and its keeper: fixed records with descriptors over a Unix socket.

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"

namespace pegaflow::server {

/// One message. Its descriptors travel beside it.
struct KeeperMessage {
  enum class Kind : std::uint32_t {
    kTake = 1,  ///< Server, with its pidfd: it becomes the owner, and gets what is kept.
    kPut,       ///< Owner, with the pool and its tables: keeps these instead.
    kDrop,      ///< Owner: keeps nothing from now on.
    kProcess,   ///< Both ways, with a pidfd: a client that may access the pool.
    kForget,    ///< Owner: that client can no longer access it.
    kStatus,    ///< Anyone: answered by kState.
    kRelease,   ///< Anyone: the keeper ends, unless a server uses it.
    kPool,      ///< Keeper, with the pool and its tables: what is kept; kProcess and kEnd follow.
    kNothing,   ///< Keeper: the caller is the owner, and nothing is kept.
    kEnd,       ///< Keeper: there are no further clients.
    kBusy,      ///< Keeper: the server `pid` owns the pool and has not ended.
    kDone,      ///< Keeper: the answer to kPut, kDrop and kRelease.
    kState,     ///< Keeper: the answer to kStatus.
    kInvalid,   ///< Keeper: a message that the caller may not send; it is ignored.
  };
  static constexpr std::uint32_t kMagic = 0x50474B31;  ///< "PGK1"; another layout has another one.
  static constexpr std::size_t kMostFds = 2;

  std::uint32_t magic = kMagic;
  Kind kind{};
  Id128 process{};               ///< kProcess, kForget.
  std::uint64_t pool_bytes = 0;  ///< kPut, kPool, kState, kDone: bytes of the pool that is kept.
  std::int32_t pid = 0;          ///< kBusy, kState: the owner; 0 without one.
  std::uint32_t processes = 0;   ///< kState: the clients that may access the pool.
  std::int32_t keeper_pid = 0;   ///< kState, kDone: of the keeper.
  std::uint32_t reserved = 0;
};
static_assert(sizeof(KeeperMessage) == 48);

struct ReceivedMessage {
  KeeperMessage message;
  std::array<UniqueFd, KeeperMessage::kMostFds> fds;
};

/// Sends one message with up to two descriptors, -1 for none. Does not wait.
/// Errors: kPeerLost when the other end is gone, kBusy when it does not read, kIo.
Result<void> send_message(int socket, const KeeperMessage& message, int first = -1,
                          int second = -1);
/// Receives one message; none once the other end is closed. Blocks unless the socket does not.
/// Errors: kBusy when there is none now; kInvalidArgument for bytes that are no message; kIo.
Result<std::optional<ReceivedMessage>> receive_message(int socket);

/// `50055.keeper` beside `50055.sock`.
std::filesystem::path keeper_path(const std::filesystem::path& socket);
/// A socket that listens at that path, for this user alone. Replaces one whose process is gone.
/// Errors: kRefused when another keeper listens there or permissions forbid it; kInvalidArgument
/// for a path too long for a socket; kIo.
Result<UniqueFd> listen_as_keeper(const std::filesystem::path& path);
/// How long a call waits for a keeper, unless its caller has less patience.
inline constexpr std::chrono::milliseconds kAnswerPatience{5000};
/// A connection to the keeper at that path; none when no keeper listens there.
/// Errors: kTimeout when it accepts none, kRefused when permissions forbid it; kInvalidArgument,
/// kIo.
Result<std::optional<UniqueFd>> connect_to_keeper(
    const std::filesystem::path& path, std::chrono::milliseconds patience = kAnswerPatience);

}  // namespace pegaflow::server
