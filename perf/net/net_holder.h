#pragma once
/// \file
/// The two ends of `pegaflow-perf net` and their messages: one line of JSON in each direction.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "base/os/unique_fd.h"
#include "harness/child.h"
#include "perf/net/net_lane.h"
#include "transport/region.h"

namespace pegaflow::perf {

/// The request of the measuring end.
struct NetRequest {
  std::string backend;  ///< The lane of the measuring end.
  std::uint64_t memory_bytes = 0;
  std::uint64_t seed = 0;  ///< Seed of the bytes in the memory.
};

/// The response of the holder.
struct NetOffer {
  FabricDescriptor fabric;
  std::string plain;   ///< Address of the plain sockets; empty unless the lane is "tcp".
  std::string memory;  ///< NetLane::memory of that end.
};

/// Serves one reader after the other on `listener`, each with its own memory until it closes its
/// connection. Returns only with an error: the kernel's. The error of one reader is logged and ends
/// only its connection: a request for more memory than this machine has left receives
/// kOutOfCapacity, and a reader without a request within ten seconds is disconnected. With "ucx" it
/// runs `ucx_perftest` on request.
Result<void> hold_net(int listener, const NetLane& lane);

/// Connects to a holder and sends a request. The offer is valid while the returned descriptor is
/// open. Errors: the kernel's; kCorrupt when the response is not a holder's; kRefused with the
/// holder's text.
struct NetConnection {
  UniqueFd socket;
  NetOffer offer;
};
Result<NetConnection> ask_holder(const std::string& address, const NetRequest& request);

/// Makes the holder start `ucx_perftest`; returns the port where it waits for one client.
/// Errors: kRefused with the holder's text; the kernel's.
Result<std::uint16_t> ask_perftest(const NetConnection& connection);

/// A holder in a child process: in its own network namespace, joined to another one that this
/// process enters, if the kernel permits it; else on the loopback device. NICs stay in their
/// namespace.
class NetChild {
 public:
  /// Errors: the kernel's when not even loopback works.
  static Result<NetChild> start(const NetLane& lane);
  NetChild(NetChild&&) noexcept = default;
  NetChild& operator=(NetChild&&) = delete;
  ~NetChild();

  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Why the ends use loopback; empty: they use namespaces.
  [[nodiscard]] const std::string& loopback_because() const noexcept { return loopback_because_; }

 private:
  NetChild(harness::Child child, UniqueFd control)
      : control_(std::move(control)), child_(std::move(child)) {}
  UniqueFd control_;
  UniqueFd home_;  // The original namespace of this process.
  std::string address_;
  std::string loopback_because_;
  harness::Child child_;
};

}  // namespace pegaflow::perf
