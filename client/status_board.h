#pragma once
/// \file
/// The state of a link, for readers on other threads.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>

#include "client/link_options.h"

namespace pegaflow {

/// The latest LinkStatus. Thread-safe; written by the link's thread.
class StatusBoard {
 public:
  /// True if the state or the reason changed.
  bool set(LinkState state, std::string detail);
  void set_server(const Id128& server, std::string build);
  void set_namespace(std::string hash);

  [[nodiscard]] LinkState state() const noexcept { return state_.load(std::memory_order_acquire); }
  [[nodiscard]] LinkStatus get() const;

  /// Waits at most `patience` for `state`; whether it was reached.
  bool wait_for(LinkState state, Duration patience) const;

 private:
  std::atomic<LinkState> state_{
      LinkState::kConnecting};  ///< Equal to status_.state; no lock needed.
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  LinkStatus status_;
};

}  // namespace pegaflow
