#pragma once
/// \file
/// The protocol spoken by hand, for tests of the server: no deadlines, no breaker, no manners.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "base/os/unique_fd.h"
#include "base/page_layout.h"
#include "capnp/cache.capnp.h"
#include "capnp/wire/codec.h"

namespace pegaflow::testing {

/// The pool as a client has it.
struct MappedPool {
  MappedPool() = default;
  MappedPool(MappedPool&& other) noexcept;
  MappedPool& operator=(MappedPool&& other) noexcept;
  ~MappedPool();

  UniqueFd fd;
  std::span<std::byte> bytes;
  std::uint64_t page_bytes = 0;
  std::string namespace_hash;

  [[nodiscard]] std::span<std::byte> slot(std::uint32_t index) const {
    return bytes.subspan(index * kSlotAlignment, page_bytes);
  }
};

/// One connection. Every call waits for its answer; what is an exception on the wire is thrown as
/// kj::Exception. Thread-bound to `io`.
class WireClient {
 public:
  enum class Handle { kOwnPidfd, kNone, kNoDescriptor, kNoPidfd };

  struct HelloOptions {
    std::uint16_t minimum = kWireMinimum;
    std::uint16_t maximum = kWireMaximum;
    Id128 process{};  ///< None: a fresh one.
    Id128 previous_connection{};
    bool quiesced = false;
    Handle handle = Handle::kOwnPidfd;
  };

  /// Connects, and says nothing yet.
  WireClient(kj::AsyncIoContext& io, const std::string& socket);

  struct Greeting {
    std::uint16_t version = 0;
    std::uint16_t minimum = 0;
    std::uint16_t maximum = 0;
    Id128 server;
    Id128 connection;
    std::optional<Error> refused;
  };
  Greeting hello(const HelloOptions& options);
  Greeting hello() { return hello(HelloOptions()); }

  /// The default factors and one rank.
  Result<MappedPool> register_rank(const std::string& instance, std::uint64_t page_bytes);
  Result<MappedPool> register_rank(const Registration& registration);
  /// `scheduler` names its jobs; none: the process does.
  Result<void> attach(const std::string& instance, const Id128& scheduler = {});
  kj::Promise<Result<void>> await_job(const Id128& server, const JobId& job,
                                      std::uint32_t patience_ms);

  struct Found {
    std::size_t blocks = 0;
    bool complete = false;
  };
  Found lookup(std::span<const BlockKey> keys);
  Result<Found> claim(const Id128& token, std::span<const BlockKey> keys);
  Result<void> unclaim(const Id128& token);
  Result<std::vector<std::uint32_t>> open(const Id128& token, std::uint32_t first,
                                          std::uint32_t count, std::uint64_t pin);
  Result<void> release(std::uint64_t pin);
  Result<std::vector<std::uint32_t>> reserve(const JobId& job, std::span<const BlockKey> keys,
                                             std::uint32_t first = 0);
  Result<void> publish(const JobId& job);
  Result<void> abandon(const JobId& job);
  Result<std::uint64_t> reset_cache();
  Result<void> goodbye();

  /// reserve, fill each slot with its key's first byte, publish. Returns how many were written.
  Result<std::size_t> save(const MappedPool& pool, const JobId& job,
                           std::span<const BlockKey> keys);

  wire::Gate::Client& gate() noexcept { return gate_; }
  wire::Session::Client& session() noexcept { return session_; }
  [[nodiscard]] const Id128& process() const noexcept { return process_; }

 private:
  kj::AsyncIoContext& io_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyClient rpc_;
  wire::Gate::Client gate_;
  wire::Session::Client session_;
  Id128 process_;
};

/// 32-byte keys of a chain: equal `chain` and number give equal keys.
std::vector<BlockKey> make_keys(std::uint64_t chain, std::size_t count, std::size_t first = 0);

}  // namespace pegaflow::testing
