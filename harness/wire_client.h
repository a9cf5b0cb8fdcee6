#pragma once
/// \file
/// The protocol without the client library: for requests that the library never sends, and for
/// exact control over what is timed.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <kj/io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "base/os/unique_fd.h"
#include "capnp/cache.capnp.h"
#include "capnp/wire/codec.h"

namespace pegaflow::harness {

/// Buffer size of both sides of a measured socket: that of server and client.
inline constexpr int kSocketBufferBytes = 1 << 20;

/// Connects a Unix socket with these buffers. Errors: kPeerLost; kInvalidArgument when the path is
/// too long.
Result<UniqueFd> connect_unix(const std::string& path);

/// One connection to a pegaflow-server, without deadlines, retries or checks of what the caller
/// sends. Every call waits for its response. Errors: the server's; besides them, as OnLoss says.
/// Thread-bound to the thread of `io`, which outlives it.
class WireClient {
 public:
  /// The result of a call that ends in an exception instead of a response.
  enum class OnLoss {
    kReturn,  ///< kPeerLost.
    kThrow,   ///< The kj::Exception is thrown on.
  };

  /// Takes a connected socket and sends nothing.
  WireClient(kj::AsyncIoContext& io, UniqueFd socket, OnLoss on_loss);

  /// Connects and sends hello as pegaflow-perf. Errors: kPeerLost; kRefused with the server's text.
  static Result<std::unique_ptr<WireClient>> connect(kj::AsyncIoContext& io,
                                                     const std::string& socket_path);

  /// The descriptor by which the server detects the end of this process, or an invalid one.
  enum class Handle { kOwnPidfd, kNone, kNoDescriptor, kNoPidfd };

  struct HelloOptions {
    std::uint16_t minimum = kWireMinimum;
    std::uint16_t maximum = kWireMaximum;
    Id128 process{};  ///< None: a fresh one.
    Id128 previous_connection{};
    bool quiesced = false;
    Handle handle = Handle::kOwnPidfd;
    std::string build{};
  };
  struct Greeting {
    std::uint16_t version = 0;
    std::uint16_t minimum = 0;
    std::uint16_t maximum = 0;
    Id128 server;
    Id128 connection;
    std::optional<Error> refused;
  };
  /// A rejection is a Greeting as well. Errors: the kernel's.
  Result<Greeting> hello(const HelloOptions& options);

  struct Registered {
    UniqueFd pool;
    std::uint64_t pool_bytes = 0;
    std::string namespace_hash;
  };
  /// Errors: also kInternal when the pool has no descriptor.
  Result<Registered> register_rank(const Registration& registration);
  /// `scheduler` names the jobs of the instance; if it is none, they cannot be awaited.
  Result<void> attach(const std::string& instance, const Id128& scheduler = {});
  /// Registers rank 0 of 1 of `instance` in the namespace of pegaflow-perf and attaches as its
  /// scheduler, so that the instance is complete.
  Result<Registered> register_worker(const std::string& instance, std::uint64_t page_bytes,
                                     std::uint64_t block_count);

  /// Consecutive blocks of one kind.
  struct Range {
    std::uint32_t kind = 0;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    bool operator==(const Range&) const = default;
  };
  /// A prefix of the keys of a call: blocks, or units where there are several kinds of blocks.
  struct Found {
    std::uint32_t blocks = 0;
    std::uint32_t elsewhere = 0;  ///< Further ones, `reachable` of a lookup or `coming` of a claim.
    bool complete = false;        ///< Whether the instance is complete; if not, nothing is found.
    std::vector<Range> ranges{};  ///< The claimed blocks where there are several kinds.
  };
  /// Returns the sealed or, with several kinds, the restorable prefix. `local_units` has a meaning
  /// only there.
  Result<Found> lookup(std::span<const BlockKey> keys, std::uint32_t local_units = 0);
  /// Claims a prefix and returns it.
  Result<Found> claim(const Id128& token, std::span<const BlockKey> keys,
                      std::uint32_t local_units = 0);
  Result<void> unclaim(const Id128& token);
  struct Boundaries {
    std::vector<std::uint32_t> multiples;  ///< The restorable lengths / the alignment.
    bool complete = false;
  };
  Result<Boundaries> boundaries(std::span<const BlockKey> keys, std::uint32_t local_units = 0);
  /// Opens blocks `first` to `first + count` of a claim's range of that kind with one pin; returns
  /// a slot for each. Of those in flight it waits up to `patience` for the first, and returns the
  /// slots of the blocks that have arrived.
  Result<std::vector<std::uint32_t>> open(const Id128& token, std::uint32_t first,
                                          std::uint32_t count, std::uint64_t pin,
                                          std::uint8_t kind = 0, Duration patience = {});
  /// Opens `count` blocks of a claim with one pin each, numbered from `first_pin` on, several at
  /// once. Errors: the first of the server's.
  Result<void> open_each(const Id128& token, std::uint32_t count, std::uint64_t first_pin);
  Result<void> release(std::uint64_t pin);
  /// Releases a pin and its claim, both requests at once. Errors: the first of the server's.
  Result<void> end_load(std::uint64_t pin, const Id128& token);

  static constexpr std::uint32_t kNoFrame = 0xFFFFFFFF;
  /// Returns a slot per key; kNoFrame where the server skips the key.
  Result<std::vector<std::uint32_t>> reserve(const JobId& job, std::span<const BlockKey> keys,
                                             std::uint32_t first = 0, std::uint8_t kind = 0,
                                             std::span<const std::uint8_t> depths = {},
                                             bool may_refuse = false);
  Result<void> publish(const JobId& job);
  Result<void> abandon(const JobId& job);
  /// The name of a job whose scheduler is this process.
  [[nodiscard]] JobId job(std::uint64_t number) const { return {process_, number}; }

  struct JournalEntry {
    BlockKey key;
    std::uint32_t kind = 0;
    bool is_present = false;
  };
  struct Journal {
    std::uint64_t space = 0;
    std::uint64_t position = 0;
    bool lost = false;
    bool has_kinds = false;  ///< The answer names the kind of each entry.
    std::vector<JournalEntry> entries;
  };
  static constexpr std::uint64_t kJournalEnd = ~std::uint64_t{0};
  Result<Journal> journal(std::uint64_t space, std::uint64_t position);

  /// Returns whether routers want chains.
  Result<bool> report_chain(std::uint64_t session, std::span<const std::uint64_t> keys,
                            std::uint32_t block_tokens);

  /// Returns the new generation of the namespace.
  Result<std::uint64_t> reset_cache();
  Result<void> goodbye();

  /// For requests with other fields, or several at once.
  wire::Gate::Client& gate() noexcept { return gate_; }
  wire::Session::Client& session() noexcept { return session_; }
  /// The name of this process in the last hello.
  [[nodiscard]] const Id128& process() const noexcept { return process_; }

 private:
  /// Runs `call`, and treats its exceptions as OnLoss says.
  template <typename Call>
  auto guarded(Call&& call) -> decltype(call());

  kj::AsyncIoContext& io_;
  OnLoss on_loss_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyClient rpc_;
  wire::Gate::Client gate_;
  wire::Session::Client session_;
  Id128 process_;
};

}  // namespace pegaflow::harness
