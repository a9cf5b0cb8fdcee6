#pragma once
/// \file
/// The two ends of `pegaflow-perf net` and what they tell each other: one line of JSON each way.

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

/// What the end that measures wants from the other.
struct NetRequest {
  std::string backend;  ///< The lane that it has.
  std::uint64_t memory_bytes = 0;
  std::uint64_t seed = 0;  ///< Of what the memory is filled with.
};

/// What it gets to know.
struct NetOffer {
  FabricDescriptor fabric;
  std::string plain;  ///< Where plain sockets are served; empty beside another lane than "tcp".
};

/// The byte at `offset` of the memory of the holder: tells places and seeds apart.
void fill_net_pattern(std::span<std::byte> memory, std::uint64_t seed);

/// Serves one reader after the other on `listener`, each until it closes its connection, and each
/// with memory of its own. Returns only with an error: the kernel's. What goes wrong with one
/// reader is logged, and ends only that: who asks for more memory than this machine has left is
/// told kOutOfCapacity, and who does not ask within ten seconds is closed. Beside "ucx" it runs
/// `ucx_perftest` for who asks for it.
Result<void> hold_net(int listener, const NetLane& lane);

/// Asks a holder. The connection is what keeps the offer: it ends with the returned descriptor.
/// Errors: the kernel's; kCorrupt when what answers is no holder; kRefused in the holder's words.
struct NetConnection {
  UniqueFd socket;
  NetOffer offer;
};
Result<NetConnection> ask_holder(const std::string& address, const NetRequest& request);

/// Has the holder start `ucx_perftest`; the port where it waits for one client.
/// Errors: kRefused in the holder's words; the kernel's.
Result<std::uint16_t> ask_perftest(const NetConnection& connection);

/// A holder in a process of its own: in a network namespace of its own, joined to another one that
/// this process moves to, where that may be; else on the loopback device. Cards stay where they
/// are.
class NetChild {
 public:
  /// Errors: the kernel's when not even loopback works.
  static Result<NetChild> start(const NetLane& lane);
  NetChild(NetChild&&) noexcept = default;
  NetChild& operator=(NetChild&&) = delete;
  ~NetChild();

  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Why there are no namespaces; empty: there are.
  [[nodiscard]] const std::string& loopback_because() const noexcept { return loopback_because_; }

 private:
  NetChild(harness::Child child, UniqueFd control)
      : control_(std::move(control)), child_(std::move(child)) {}
  UniqueFd control_;
  UniqueFd home_;  // The namespace that we came from.
  std::string address_;
  std::string loopback_because_;
  harness::Child child_;
};

}  // namespace pegaflow::perf
