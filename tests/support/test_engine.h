#pragma once
/// \file
/// An engine for tests: a scheduler's CacheSession and a worker's Mover over some memory.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "client/cache_session.h"
#include "client/mover.h"
#include "tests/support/engine_memory.h"
#include "tests/support/patience.h"

namespace pegaflow::testing {

/// Key number `n`: what fills a block under it follows from the number.
BlockKey numbered_key(std::uint64_t n);
std::vector<BlockKey> numbered_keys(const std::vector<std::uint64_t>& numbers);
/// first, first + 1, ...
std::vector<std::uint64_t> numbers_from(std::uint64_t first, std::size_t count);
std::vector<std::uint32_t> blocks_from(std::uint32_t first, std::size_t count);

/// Shuts down every connection that this process has to a server's socket: both ends see it end,
/// and both live. How many there were.
std::size_t cut_connections(const std::string& socket_path);

/// Deadlines of kHang: a busy machine must not turn a hit into a miss, or a save into none.
LinkOptions patient_link();
Mover::Options patient_mover();

/// Owns session and mover. Thread-bound. Its waits are kHang; then std::runtime_error says for
/// what.
class TestEngine {
 public:
  struct Options {
    std::string socket;
    std::string instance = "engine";
    std::string model = "model";             ///< The namespace's only factor.
    Mover::Options mover = patient_mover();  ///< But for what stands above.
    LinkOptions session = patient_link();    ///< But for what stands above.
  };

  /// Memory and device outlive the engine. Does not wait for the server.
  TestEngine(Options options, EngineMemory& memory, Device& device);

  /// Until both sides are ready.
  void wait_ready();

  /// Fills block i with what belongs to numbers[i] and saves it under that key.
  Result<void> start_save(std::uint64_t job, const std::vector<std::uint64_t>& numbers,
                          const std::vector<std::uint32_t>& blocks);
  Mover::Finished save(const std::vector<std::uint64_t>& numbers,
                       const std::vector<std::uint32_t>& blocks);

  Result<CacheSession::Answer> lookup(const std::vector<std::uint64_t>& numbers);
  Result<CacheSession::Answer> claim(const std::vector<std::uint64_t>& numbers);

  /// Loads the first blocks of a claim.
  Mover::Finished load(const Id128& token, const std::vector<std::uint32_t>& blocks,
                       std::size_t first = 0);

  /// The next report, whatever it is of.
  Mover::Finished next_finished();

  /// How many of the blocks hold what belongs to the numbers, leaving out `failed`.
  [[nodiscard]] std::size_t wrong_blocks(const std::vector<std::uint64_t>& numbers,
                                         const std::vector<std::uint32_t>& blocks,
                                         const std::vector<std::uint32_t>& failed = {}) const;

  [[nodiscard]] CacheSession& session() { return *session_; }
  [[nodiscard]] Mover& mover() { return *mover_; }
  void close_session() { session_.reset(); }

  Id128 scheduler = Id128::random();
  std::uint64_t last_job = 0;
  /// Seed of its computation: the bytes of a block follow from its number and from this.
  std::uint64_t weights = 0;
  /// The bytes of a block, for EngineMemory.
  [[nodiscard]] static std::uint64_t seed_of(std::uint64_t number, std::uint64_t weights) {
    return number + (weights << 40);
  }

 private:
  EngineMemory& memory_;
  std::unique_ptr<CacheSession> session_;
  std::unique_ptr<Mover> mover_;
  std::vector<Mover::Finished> finished_;
};

}  // namespace pegaflow::testing
