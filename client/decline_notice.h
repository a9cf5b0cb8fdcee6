#pragma once
/// \file
/// A light connection of an engine that is configured to use the cache and does not.

#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"
#include "client/link_options.h"

namespace pegaflow {

/// Reports to the node's server why one side of an engine does not use the cache, for as long as it
/// lives, so that /instances, metrics and `pegaflow doctor` show it.
/// A private thread connects and reconnects. It makes no other call and logs nothing above the
/// debug level: without a server, or with one that is too old for notices, it has no effect.
///
/// Thread-safe. Creating one in a process that forks afterwards is a mistake (threads do not fork).
class DeclineNotice {
 public:
  struct Options {
    LinkOptions link{};
    bool is_worker = false;  ///< False: the scheduler's side.
    std::uint32_t rank = 0;  ///< The worker's.
    /// "other", "configuration", "engine", "model", "weights", "device" or "failure".
    std::string reason = "other";
    std::string detail{};  ///< One sentence; the server keeps the first 512 bytes.
  };

  /// Starts the thread; it connects in the background.
  /// Errors: kInvalidArgument for an invalid option, kInternal when no thread can start.
  static Result<std::unique_ptr<DeclineNotice>> start(const Options& options);

  /// Ends the connection and joins the thread, within 1 s.
  ~DeclineNotice();

  [[nodiscard]] LinkStatus status() const;

 private:
  class Impl;
  explicit DeclineNotice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
