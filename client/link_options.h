#pragma once
/// \file
/// The address of the server and the deadlines of calls, for an engine's scheduler (CacheSession)
/// and its workers (Mover).

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"

namespace pegaflow {

/// The worker's report about its engine's device, shown to operators. The values have the numbers
/// of the wire.
struct DeviceReport {
  enum class Kernels : std::uint8_t { kUnknown, kMissing, kPresent, kNotNeeded };
  enum class CopyPath : std::uint8_t { kUnknown, kHost, kDirect, kStaged };
  std::string name{};  ///< The device of the KV cache, as "NVIDIA H200"; empty: unknown.
  Kernels kernels = Kernels::kUnknown;
  CopyPath copy_path = CopyPath::kUnknown;
};

/// Options of the link to this node's server. Every deadline has its reason beside it; an engine
/// never waits longer than these for the cache.
struct LinkOptions {
  std::string socket_path;  ///< The server's Unix socket.
  std::string instance;     ///< The engine core's id; the same in its scheduler and its workers.
  std::string build;        ///< Program and version, for the server's log.
  Id128 scheduler{};        ///< A CacheSession's name for its jobs; none: not reported.

  /// The configuration of this side; reported to the server for operators, without effect here.
  bool offers_loads = true;
  bool offers_saves = true;

  Duration connect_deadline = std::chrono::seconds(1);  ///< Longer: the local server has stopped.
  Duration lookup_deadline = std::chrono::milliseconds(50);  ///< 100 x a loaded 8,192-key lookup.
  Duration open_deadline = std::chrono::milliseconds(50);
  /// GPU blocks stay pinned meanwhile. time_to_make_room() of the save's bytes comes on top.
  Duration reserve_deadline = std::chrono::milliseconds(20);
  Duration reconnect_interval = std::chrono::milliseconds(500);  ///< Reconnects within 2 s.
  Duration refused_interval = std::chrono::seconds(10);  ///< The configuration must be fixed first.

  /// The breaker: this number of missed deadlines within the window stops all calls but one probe
  /// at a time.
  int breaker_failures = 3;
  Duration breaker_window = std::chrono::seconds(1);
  Duration breaker_probe_interval = std::chrono::seconds(1);

  /// The versions of the wire that hello offers; 0: those that this build speaks. Only for tests of
  /// version negotiation.
  std::uint16_t minimum_version = 0;
  std::uint16_t maximum_version = 0;
  /// Those of the wire's features that it may use; fewer only to test other builds.
  std::uint64_t features = ~std::uint64_t{0};
};

/// Errors: kInvalidArgument that names the invalid option: a socket path that is empty or longer
/// than the kernel takes, no instance, a time that is not positive, fewer than one failure.
Result<void> validate(const LinkOptions& options);

/// The state of a link; for logs, metrics and `pegaflow doctor`.
enum class LinkState : std::uint8_t {
  kConnecting,  ///< There is no connection.
  kRefused,     ///< The server rejected this client: see the detail.
  kReady,
  kBroken,   ///< The breaker is open: connected, but too slow.
  kRetired,  ///< Closed, or an invariant broke: the cache stays off.
};

/// "connecting", "refused", "ready", "broken" or "retired".
std::string_view to_string(LinkState state) noexcept;

struct LinkStatus {
  LinkState state = LinkState::kConnecting;
  std::string detail;             ///< The reason if it is not ready, from the server or the kernel.
  std::uint64_t connections = 0;  ///< The number of times it became ready.
  Id128 server;                   ///< Incarnation of the server of the last connection.
  std::string server_build;
  std::string namespace_hash;  ///< A worker's, once registered.
};

}  // namespace pegaflow
