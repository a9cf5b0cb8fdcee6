#pragma once
/// \file
/// The protocol without the client library: for requests that the library never sends, and for
/// exact control over what is timed.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <kj/io.h>

#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "capnp/cache.capnp.h"

namespace pegaflow::harness {

/// Buffer size of both sides of a measured socket: that of server and client.
inline constexpr int kSocketBufferBytes = 1 << 20;

/// Connects a Unix socket with these buffers. Errors: kPeerLost; kInvalidArgument when the path is
/// too long.
Result<UniqueFd> connect_unix(const std::string& path);

/// One connection to a pegaflow-server, for one rank that is its own scheduler. Every call waits
/// for its response. An instance is complete once this rank has registered.
/// Thread-bound to the thread of `io`, which outlives it.
class WireClient {
 public:
  /// Connects and sends hello. Errors: kPeerLost; kRefused with the server's text.
  static Result<std::unique_ptr<WireClient>> connect(kj::AsyncIoContext& io,
                                                     const std::string& socket_path);

  struct Registered {
    UniqueFd pool;
    std::uint64_t pool_bytes = 0;
  };
  /// Registers rank 0 of 1 of `instance` in the namespace of pegaflow-perf.
  /// Errors: the server's.
  Result<Registered> register_worker(const std::string& instance, std::uint64_t page_bytes,
                                     std::uint64_t block_count);

  /// The length of the sealed prefix of `keys`. Errors: kPeerLost; kRefused while the instance is
  /// not complete.
  Result<std::uint32_t> lookup(std::span<const std::byte> keys);
  /// Claims a prefix of `keys` and returns its length. Errors: the server's.
  Result<std::uint32_t> claim(const Id128& token, std::span<const std::byte> keys);
  /// Opens `count` blocks of a claim with one pin each, numbered from `first_pin` on.
  /// Errors: the first of the server's.
  Result<void> open_each(const Id128& token, std::uint32_t count, std::uint64_t first_pin);
  /// Opens blocks `first` to `first + count` of a claim with one pin; returns a slot for each.
  /// Errors: the server's.
  Result<std::vector<std::uint32_t>> open(const Id128& token, std::uint32_t first,
                                          std::uint32_t count, std::uint64_t pin);
  /// Releases a pin and its claim, both requests at once. Errors: the first of the server's.
  Result<void> end_load(std::uint64_t pin, const Id128& token);
  /// Returns a slot per key; kNoFrame where the server skips the key. Errors: the server's.
  Result<std::vector<std::uint32_t>> reserve(std::uint64_t job, std::span<const std::byte> keys);
  /// Errors: the server's.
  Result<void> publish(std::uint64_t job);
  /// Errors: the server's.
  Result<void> abandon(std::uint64_t job);

  static constexpr std::uint32_t kNoFrame = 0xFFFFFFFF;

 private:
  WireClient(kj::AsyncIoContext& io, UniqueFd socket);

  /// Runs `call` and returns kPeerLost when it throws.
  template <typename Call>
  auto guarded(Call&& call) -> decltype(call());

  kj::AsyncIoContext& io_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyClient rpc_;
  ::pegaflow::wire::Session::Client session_;
  Id128 scheduler_;
};

}  // namespace pegaflow::harness
