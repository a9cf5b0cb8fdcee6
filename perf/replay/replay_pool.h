#pragma once
/// \file
/// Replay of a trace through one pool: its server, and an engine in front of it.

#include <cstdint>
#include <memory>
#include <optional>
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

/// The least blocks of kSmallPageBytes in a server's pool: its minimum is 1 MiB.
inline constexpr std::uint64_t kLeastPoolBlocks = 256;

/// A server with a pool of exactly so many blocks of 4 KiB, and the connection of one engine that
/// has no cache of its own.
///
/// Each request makes the calls of the connector, one after the other: lookup; if it finds blocks,
/// claim, open, copy the pages out, release; for all other blocks reserve, copy the pages in,
/// publish. Blocks that come from the server's disk are opened as they arrive. Every page contains
/// the key of its block, which each load checks.
///
/// Thread-bound to the thread of `io`, which outlives it.
class ReplayPool {
 public:
  struct Options {
    std::string program;  ///< As in ServerProcess::Options.
    std::uint64_t blocks = 0;
    std::string eviction;    ///< Name of a policy.
    std::uint64_t seed = 0;  ///< Seed of the keys.
    /// Blocks that the server's disk takes, in whole segments; 0: it has no disk.
    std::uint64_t ssd_blocks = 0;
    std::uint64_t ssd_write_budget = 0;  ///< The server's option; 0: no limit.
    Duration pause{};                    ///< After each request.
  };
  /// Errors: as ServerProcess::start(); the server's; kRefused when its pool has another size, as
  /// where huge pages are reserved and the pool is not a multiple of them.
  static Result<std::unique_ptr<ReplayPool>> start(kj::AsyncIoContext& io, const Options& options);

  /// Looks up the blocks of these prompts and saves the missing ones.
  /// Errors: the server's; kCorrupt when a page holds the bytes of another block.
  Result<void> replay(std::span<const Prompt> prompts);

  /// The server's socket, for tests.
  [[nodiscard]] std::string socket_path() const { return server_.socket_path(); }

  /// Processor time of the server so far. Errors: the kernel's.
  [[nodiscard]] Result<Duration> cpu_time() const { return server_.process().cpu_time(); }

  /// The engine's counts of all requests so far. Times are in microseconds.
  struct Seen {
    std::uint64_t requests = 0;
    std::uint64_t asked = 0;          ///< Blocks requested.
    std::uint64_t found = 0;          ///< Blocks loaded, as prefixes.
    std::uint64_t saved = 0;          ///< Blocks that got a slot and were published.
    std::uint64_t shortened = 0;      ///< Blocks found and not claimed, at the limit of a share.
    std::uint64_t lost = 0;           ///< Claimed blocks in flight from the disk that did not come.
    std::vector<double> question_us;  ///< Lookup, and claim if blocks were found.
    std::vector<double> load_us;      ///< Open and release, without the copies.
    std::vector<double> save_us;      ///< Reserve and publish, without the copies.
  };
  [[nodiscard]] const Seen& seen() const noexcept { return seen_; }

  /// The server's counts.
  struct Counted {
    std::uint64_t evictions = 0;
    std::uint64_t resident = 0;  ///< Blocks in the pool now.
    std::uint64_t saved_bytes = 0;
    std::uint64_t loaded_bytes = 0;
    // Of the disk.
    std::uint64_t ssd_written = 0;    ///< Blocks, those written again included.
    std::uint64_t ssd_restored = 0;   ///< Blocks that were read into the pool.
    std::uint64_t ssd_unwritten = 0;  ///< Blocks evicted before they were written.
    std::uint64_t ssd_blocks = 0;     ///< Blocks on the disk now.
  };
  /// Reads the server's counts and compares them with the engine's. Errors: kInternal when they
  /// differ or a claim, a pin or a reservation is left; kPeerLost.
  [[nodiscard]] Result<Counted> count() const;

 private:
  ReplayPool(std::optional<harness::TemporaryDirectory> disk, harness::ServerProcess server,
             std::unique_ptr<harness::WireClient> client, harness::Mapping pool,
             const Options& options);
  Result<void> serve(const Prompt& prompt);
  /// Loads a prefix of `prompt` and returns its length.
  Result<std::size_t> load(const Prompt& prompt, std::span<const BlockKey> keys);
  Result<void> read(const Prompt& prompt, std::uint32_t first,
                    std::span<const std::uint32_t> slots);
  Result<void> save(const Prompt& prompt, std::size_t first, std::span<const BlockKey> keys);
  [[nodiscard]] Result<std::span<std::byte>> page(std::uint32_t slot) const;

  std::optional<harness::TemporaryDirectory> disk_;
  harness::ServerProcess server_;  // Outlives its client.
  std::unique_ptr<harness::WireClient> client_;
  harness::Mapping pool_;
  std::uint64_t blocks_;
  Duration pause_;
  KeySource keys_;
  std::vector<std::byte> page_;  ///< One block of the engine.
  std::uint64_t next_pin_ = 1;
  std::uint64_t next_job_ = 1;
  Seen seen_;
};

}  // namespace pegaflow::perf
