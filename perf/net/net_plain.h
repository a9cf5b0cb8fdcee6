#pragma once
/// \file
/// The bound of `pegaflow-perf net`: plain sockets that carry the same bytes.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/os/event_fd.h"
#include "base/os/unique_fd.h"

namespace pegaflow::perf {

/// Serves bytes of `memory`: a connection sends an offset and a count, eight bytes each, and
/// receives that many bytes from the offset on, wrapping around at the end. One thread serves all
/// connections, as in the lane.
class PlainSender {
 public:
  /// `address` is numeric, with port 0. `memory` outlives it. Errors: the kernel's.
  static Result<std::unique_ptr<PlainSender>> start(const std::string& address,
                                                    std::span<const std::byte> memory);
  ~PlainSender();
  PlainSender(const PlainSender&) = delete;
  PlainSender& operator=(const PlainSender&) = delete;
  [[nodiscard]] const std::string& address() const noexcept { return address_; }

 private:
  struct Connection {
    UniqueFd socket;
    std::uint64_t at = 0;    // Offset in `memory`.
    std::uint64_t left = 0;  // Bytes still to send.
  };
  PlainSender(UniqueFd listener, std::string address, std::span<const std::byte> memory);
  void run();
  static bool turn(Connection& connection, std::span<const std::byte> memory);

  UniqueFd listener_;
  std::string address_;
  std::span<const std::byte> memory_;
  EventFd stop_;
  std::thread thread_;
};

/// Connections to a PlainSender. Thread-bound.
class PlainReceiver {
 public:
  /// Errors: the kernel's.
  static Result<PlainReceiver> connect(const std::string& address, std::size_t connections);

  /// Reads `bytes` in equal parts over all connections into `memory`. Each connection has its own
  /// part of the memory and the same part of the sender's, from `at` on; when its share is longer
  /// than the part, it wraps around.
  /// Errors: the kernel's; kPeerLost when the other side ends.
  Result<void> receive(std::span<std::byte> memory, std::uint64_t bytes, std::uint64_t at = 0);

 private:
  explicit PlainReceiver(std::vector<UniqueFd> sockets) : sockets_(std::move(sockets)) {}
  std::vector<UniqueFd> sockets_;
};

}  // namespace pegaflow::perf
