#pragma once
/// \file
/// One pool that requests of a trace go through: a server of its own, and an engine in front of it.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "harness/engine_memory.h"
#include "harness/server_process.h"
#include "harness/wire_client.h"
#include "perf/lib/keys.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// The fewest blocks of kSmallPageBytes that a server's pool may have: it takes no less than 1 MiB.
inline constexpr std::uint64_t kLeastPoolBlocks = 256;

/// A server with a pool of exactly so many blocks of 4 KiB, and the connection of one engine that
/// has no cache of its own.
///
/// Each request does what the connector does, one call after the other: lookup; where something is
/// found claim, open, copy the pages out, release; reserve of all other blocks, copy the pages in,
/// publish. Every page carries the name of its block, and every page that is loaded is looked at.
///
/// Thread-bound: to the thread of `io`, which outlives it.
class ReplayPool {
 public:
  struct Options {
    std::string program;  ///< As ServerProcess::Options.
    std::uint64_t blocks = 0;
    std::string eviction;    ///< The name of a policy.
    std::uint64_t seed = 0;  ///< Of the keys.
  };
  /// Errors: as ServerProcess::start(); the server's; kRefused when its pool has another size, as
  /// where huge pages are reserved and the pool is not a multiple of them.
  static Result<std::unique_ptr<ReplayPool>> start(kj::AsyncIoContext& io, const Options& options);

  /// Asks for the blocks of these prompts, and saves those that were not found.
  /// Errors: the server's; kCorrupt when a page has another block's bytes.
  Result<void> replay(std::span<const Prompt> prompts);

  /// Where others can talk to the same server, for tests.
  [[nodiscard]] const std::string& socket_path() const noexcept { return server_.socket_path(); }

  /// Processor time of the server so far. Errors: the kernel's.
  [[nodiscard]] Result<Duration> cpu_time() const { return server_.process().cpu_time(); }

  /// What we saw, of all requests so far. Times are in microseconds.
  struct Seen {
    std::uint64_t requests = 0;
    std::uint64_t asked = 0;      ///< Blocks.
    std::uint64_t found = 0;      ///< Blocks loaded: as a prefix, each request's.
    std::uint64_t saved = 0;      ///< Blocks that got a slot and were published.
    std::uint64_t shortened = 0;  ///< Blocks found and not claimed: a share's limit was reached.
    std::vector<double> question_us;  ///< Lookup, and claim where something was found.
    std::vector<double> load_us;      ///< Open, and release; without our copies.
    std::vector<double> save_us;      ///< Reserve, and publish; without our copies.
  };
  [[nodiscard]] const Seen& seen() const noexcept { return seen_; }

  /// What the server counted.
  struct Counted {
    std::uint64_t evictions = 0;
    std::uint64_t resident = 0;  ///< Blocks that are there now.
    std::uint64_t saved_bytes = 0;
    std::uint64_t loaded_bytes = 0;
  };
  /// Holds what the server counted against what we saw. Errors: kInternal when they differ, or when
  /// a claim, a pin or a reservation is left; kPeerLost.
  [[nodiscard]] Result<Counted> count() const;

 private:
  ReplayPool(harness::ServerProcess server, std::unique_ptr<harness::WireClient> client,
             harness::Mapping pool, const Options& options);
  Result<void> serve(const Prompt& prompt);
  /// Loads the first blocks of `prompt`; returns how many.
  Result<std::size_t> load(const Prompt& prompt, std::span<const std::byte> keys);
  Result<void> save(const Prompt& prompt, std::size_t first, std::span<const std::byte> keys);
  [[nodiscard]] Result<std::span<std::byte>> page(std::uint32_t slot) const;

  harness::ServerProcess server_;  // Goes after the client that talks to it.
  std::unique_ptr<harness::WireClient> client_;
  harness::Mapping pool_;
  std::uint64_t blocks_;
  KeySource keys_;
  std::vector<std::byte> page_;  ///< A block of the engine.
  std::uint64_t next_pin_ = 1;
  std::uint64_t next_job_ = 1;
  Seen seen_;
};

}  // namespace pegaflow::perf
