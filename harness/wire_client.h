#pragma once
/// \file
/// The wire without the client library: for what a user's client would never do, and for exact
/// control over what is timed.

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

/// Bytes asked for on both sides of a measured socket, as server and client ask for them.
inline constexpr int kSocketBufferBytes = 1 << 20;

/// Connects a Unix socket with our buffers. Errors: kPeerLost, kInvalidArgument for a long path.
Result<UniqueFd> connect_unix(const std::string& path);

/// One connection to a pegaflow-server, for one rank that is also its scheduler. Every call waits
/// for its answer. An instance is complete once it has registered.
/// Thread-bound: to the thread of `io`, which outlives it.
class WireClient {
 public:
  /// Says hello. Errors: kPeerLost, kRefused in the server's words.
  static Result<std::unique_ptr<WireClient>> connect(kj::AsyncIoContext& io,
                                                     const std::string& socket_path);

  struct Registered {
    UniqueFd pool;
    std::uint64_t pool_bytes = 0;
  };
  /// Registers rank 0 of 1 of `instance`, in the one namespace that all of pegaflow-perf shares.
  /// Errors: the server's.
  Result<Registered> register_worker(const std::string& instance, std::uint64_t page_bytes,
                                     std::uint64_t block_count);

  /// How many of `keys` are sealed. Errors: kPeerLost; kRefused while the instance is not complete.
  Result<std::uint32_t> lookup(std::span<const std::byte> keys);
  /// How many are claimed. Errors: the server's.
  Result<std::uint32_t> claim(const Id128& token, std::span<const std::byte> keys);
  /// Pins `count` blocks of a claim, each under a name of its own from `first_pin` on.
  /// Errors: the server's first one.
  Result<void> open_each(const Id128& token, std::uint32_t count, std::uint64_t first_pin);
  /// Pins blocks `first` to `first + count` of a claim under one name; returns a slot for each.
  /// Errors: the server's.
  Result<std::vector<std::uint32_t>> open(const Id128& token, std::uint32_t first,
                                          std::uint32_t count, std::uint64_t pin);
  /// Says at once that the copies out of a pin have ended and that its claim is not needed any
  /// more. Errors: the server's first one.
  Result<void> end_load(std::uint64_t pin, const Id128& token);
  /// A slot a key; kNoFrame where the server says skip it. Errors: the server's.
  Result<std::vector<std::uint32_t>> reserve(std::uint64_t job, std::span<const std::byte> keys);
  /// Errors: the server's.
  Result<void> publish(std::uint64_t job);
  /// Errors: the server's.
  Result<void> abandon(std::uint64_t job);

  static constexpr std::uint32_t kNoFrame = 0xFFFFFFFF;

 private:
  WireClient(kj::AsyncIoContext& io, UniqueFd socket);

  /// Runs `call`, and makes a lost connection our error.
  template <typename Call>
  auto guarded(Call&& call) -> decltype(call());

  kj::AsyncIoContext& io_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyClient rpc_;
  ::pegaflow::wire::Session::Client session_;
  Id128 scheduler_;
};

}  // namespace pegaflow::harness
