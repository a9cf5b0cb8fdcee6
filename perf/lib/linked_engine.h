#pragma once
/// \file
/// The client library as an engine has it, for a run that waits for every job.

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

/// A mover over an engine's memory and the session of its scheduler, both connected. A busy machine
/// makes a round slow and not another one: every deadline is kPatience.
///
/// Belongs to one thread; its parts have threads of their own.
class LinkedEngine {
 public:
  static constexpr std::chrono::seconds kPatience{30};

  struct Options {
    std::string socket;    ///< Of the server.
    std::string instance;  ///< Its name there.
    std::string program;   ///< The one factor of its namespace.
  };
  /// `device` and the memory of `layout` outlive it.
  /// Errors: those of Mover and CacheSession; kPeerLost when the server does not answer.
  static Result<std::unique_ptr<LinkedEngine>> connect(const Options& options,
                                                       const PageLayout& layout, Device& device);
  /// Nothing touches the memory any more.
  ~LinkedEngine();
  LinkedEngine(const LinkedEngine&) = delete;
  LinkedEngine& operator=(const LinkedEngine&) = delete;

  Result<void> save(std::uint64_t job, std::span<const BlockKey> keys,
                    std::span<const std::uint32_t> blocks) {
    return mover_->save(scheduler_, job, keys, blocks, Device::Event::kNow);
  }
  /// Claims all of `keys`. Errors: the server's; kInternal when it has not all of them.
  Result<CacheSession::Answer> claim(std::span<const BlockKey> keys);
  Result<void> load(std::uint64_t job, const Id128& token, std::span<const std::uint32_t> blocks) {
    return mover_->load(job, token, 0, blocks);
  }
  void unclaim(const Id128& token) { session_->unclaim(token); }

  /// Waits until so many jobs were reported, each with `blocks` copied.
  /// Errors: a job's own; kTimeout; kInternal when one has copied less.
  Result<void> finish(std::size_t jobs, std::size_t blocks);

 private:
  LinkedEngine() = default;

  Id128 scheduler_ = Id128::random();
  std::unique_ptr<Mover> mover_;
  std::unique_ptr<CacheSession> session_;
};

}  // namespace pegaflow::perf
