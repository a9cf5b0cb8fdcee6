#pragma once
/// \file
/// What both ends of an engine (its scheduler's CacheSession, its worker's Mover) need to reach the
/// server, and how patient they are.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"

namespace pegaflow {

/// What the worker's side reports about its engine's device, for people. The numbers of the values
/// are those of the wire.
struct DeviceReport {
  enum class Kernels : std::uint8_t { kUnknown, kMissing, kPresent, kNotNeeded };
  enum class CopyPath : std::uint8_t { kUnknown, kHost, kDirect, kStaged };
  std::string name{};  ///< Where the KV cache is, as "NVIDIA H200"; empty: unknown.
  Kernels kernels = Kernels::kUnknown;
  CopyPath copy_path = CopyPath::kUnknown;
};

/// How to reach the server of this node. Every deadline has its reason beside it; an engine never
/// waits longer than these for us.
struct LinkOptions {
  std::string socket_path;  ///< Of the server's Unix socket.
  std::string instance;     ///< The engine core's id; the same in its scheduler and its workers.
  std::string build;        ///< Program and version, for the server's log.
  Id128 scheduler{};        ///< What a CacheSession's side names its jobs after; none: not told.

  /// What this side is set up to do; reported to the server for people, and changes nothing here.
  bool offers_loads = true;
  bool offers_saves = true;

  Duration connect_deadline = std::chrono::seconds(1);       ///< Local; longer means stopped.
  Duration lookup_deadline = std::chrono::milliseconds(50);  ///< 100 x a loaded 8,192-key lookup.
  Duration open_deadline = std::chrono::milliseconds(50);
  /// GPU blocks stay pinned meanwhile. time_to_make_room() of the save's bytes comes on top.
  Duration reserve_deadline = std::chrono::milliseconds(20);
  Duration reconnect_interval = std::chrono::milliseconds(500);  ///< Back in use < 2 s.
  Duration refused_interval = std::chrono::seconds(10);  ///< A person has to change something.

  /// The breaker: so many missed deadlines within the window stop all calls but one probe at a
  /// time.
  int breaker_failures = 3;
  Duration breaker_window = std::chrono::seconds(1);
  Duration breaker_probe_interval = std::chrono::seconds(1);

  /// The versions of the wire that hello offers; 0: those that this build speaks. Only for tests of
  /// how versions are agreed on.
  std::uint16_t minimum_version = 0;
  std::uint16_t maximum_version = 0;
};

/// Errors: kInvalidArgument that names the option without sense: a socket path that is empty or
/// longer than the kernel takes, no instance, a time that is not positive, fewer than one failure.
Result<void> validate(const LinkOptions& options);

/// Where a link stands; for logs, metrics and `pegaflow doctor`.
enum class LinkState : std::uint8_t {
  kConnecting,  ///< No server yet, or not any more.
  kRefused,     ///< The server answered, and will not serve us: see the detail.
  kReady,
  kBroken,   ///< The breaker is open: connected, but too slow.
  kRetired,  ///< An invariant of ours broke, or it was closed: the cache stays off.
};

/// "connecting", "refused", "ready", "broken" or "retired".
std::string_view to_string(LinkState state) noexcept;

struct LinkStatus {
  LinkState state = LinkState::kConnecting;
  std::string detail;             ///< Why it is not ready, in the server's or the system's words.
  std::uint64_t connections = 0;  ///< How often it became ready.
  Id128 server;                   ///< Incarnation of the server last spoken to.
  std::string server_build;
  std::string namespace_hash;  ///< A worker's, once registered.
};

}  // namespace pegaflow
