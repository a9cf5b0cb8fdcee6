#pragma once
/// \file
/// The counters of the RPC thread beside those of the cache.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "server/cache/histogram.h"

namespace pegaflow::server {

/// The calls of cache.capnp, for metrics.
enum class Method : std::uint8_t {
  kHello,
  kRegister,
  kAttach,
  kLookup,
  kClaim,
  kUnclaim,
  kOpen,
  kRelease,
  kReserve,
  kPublish,
  kAbandon,
  kResetCache,
  kGoodbye,
  kCorrupt,
  kJournal,
  kAwaitJob,
  kDescribe,
  kDecline,
  kBoundaries,
  kReportChain,
  kOpenNext,
  kAwaitReads,
  kReady,
  kConfirm,
  kAwaitReader,
};
inline constexpr std::size_t kMethodCount = static_cast<std::size_t>(Method::kAwaitReader) + 1;

constexpr std::string_view to_string(Method method) noexcept {
  constexpr std::array<std::string_view, kMethodCount> kNames = {
      "hello",     "register",    "attach",  "lookup",     "claim",
      "unclaim",   "open",        "release", "reserve",    "publish",
      "abandon",   "reset_cache", "goodbye", "corrupt",    "journal",
      "await_job", "describe",    "decline", "boundaries", "report_chain",
      "open_next", "await_reads", "ready",   "confirm",    "await_reader"};
  return kNames[static_cast<std::size_t>(method)];
}

/// A plain value: the RPC thread owns one and passes copies on.
struct RpcCounters {
  struct PerMethod {
    std::uint64_t ok = 0;
    std::array<std::uint64_t, kErrcCount> failed{};  ///< By Errc.
    Histogram duration;
  };
  std::array<PerMethod, kMethodCount> methods{};

  /// Event-loop iterations, from one poll of the descriptors to the next; see main_loop.h.
  Histogram turns;
  Histogram turns_cpu;  ///< The same in processor time.

  std::uint64_t connections = 0;  ///< Now.
  std::uint64_t accepted = 0;
  std::uint64_t refused_limit = 0;    ///< Beyond --max-connections.
  std::uint64_t refused_peer = 0;     ///< Another user.
  std::uint64_t closed_no_hello = 0;  ///< No hello in time, or closed to make room.
  std::uint64_t closed_protocol = 0;  ///< An invalid message, or one beyond a limit.

  PerMethod& of(Method method) noexcept { return methods[static_cast<std::size_t>(method)]; }
};

/// The calls of other nodes. A plain value.
struct PeerGateCounters {
  std::uint64_t greetings = 0;  ///< Peers that entered.
  std::uint64_t replaced = 0;   ///< Connections ended by a newer greeting of the same link.
  std::uint64_t refused_version = 0;
  std::uint64_t refused_secret = 0;
  std::uint64_t locates = 0;
  std::uint64_t leases = 0;  ///< Leases of at least one block.
  std::uint64_t awaits = 0;  ///< Waits for jobs of engines here.
};

}  // namespace pegaflow::server
