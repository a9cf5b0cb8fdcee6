#pragma once
/// \file
/// The client library as an engine uses it, for a run that waits for every job.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/block_key.h"
#include "base/error.h"
#include "client/cache_session.h"
#include "client/mover.h"

namespace pegaflow::perf {

/// A mover over an engine's memory and the session of its scheduler, both connected. Every deadline
/// is kPatience, so that a busy machine slows a round down and does not change its result.
///
/// Thread-bound; mover and session have threads of their own.
class LinkedEngine {
 public:
  static constexpr std::chrono::seconds kPatience{30};

  struct Options {
    std::string socket;    ///< The server's.
    std::string instance;  ///< Name of the instance.
    std::string program;   ///< The only factor of its namespace.
  };
  /// `device` and the memory of `layout` outlive the engine.
  /// Errors: those of Mover and CacheSession; kPeerLost when the server does not respond.
  static Result<std::unique_ptr<LinkedEngine>> connect(const Options& options,
                                                       const PageLayout& layout, Device& device);
  /// Afterwards no copy touches the memory.
  ~LinkedEngine();
  LinkedEngine(const LinkedEngine&) = delete;
  LinkedEngine& operator=(const LinkedEngine&) = delete;

  Result<void> save(std::uint64_t job, std::span<const BlockKey> keys,
                    std::span<const std::uint32_t> blocks) {
    return mover_->save(scheduler_, job, keys, blocks, Device::Event::kNow);
  }
  /// Claims all of `keys`. Errors: the server's; kInternal when some are missing.
  Result<CacheSession::Answer> claim(std::span<const BlockKey> keys);
  Result<void> load(std::uint64_t job, const Id128& token, std::span<const std::uint32_t> blocks) {
    return mover_->load(job, token, 0, blocks);
  }
  void unclaim(const Id128& token) { session_->unclaim(token); }

  /// Waits for the reports of `jobs` jobs, each with `blocks` copied.
  /// Errors: a job's; kTimeout; kInternal when a job copied less.
  Result<void> finish(std::size_t jobs, std::size_t blocks);

 private:
  LinkedEngine() = default;

  Id128 scheduler_ = Id128::random();
  std::unique_ptr<Mover> mover_;
  std::unique_ptr<CacheSession> session_;
};

}  // namespace pegaflow::perf
