#pragma once
/// \file
/// The common end of several jobs.

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

namespace pegaflow::server {

/// Calls `done` once every job that was begun has ended: true if all of them were good. Also
/// without a job. Thread-bound.
class AllDone {
 public:
  explicit AllDone(std::function<void(bool)> done)
      : state_(std::make_shared<State>(State{.done = std::move(done)})) {}

  /// Begins a job; its end is reported to the result, exactly once.
  std::function<void(bool)> begin() {
    ++state_->left;
    return [state = state_](bool is_good) { state->ended(is_good); };
  }
  /// No further job is begun. To be called once.
  void close() { state_->ended(true); }

 private:
  struct State {
    std::function<void(bool)> done;
    std::size_t left = 1;  ///< With close().
    bool is_good = true;
    void ended(bool good) {
      is_good = is_good && good;
      if (--left == 0) done(is_good);
    }
  };
  std::shared_ptr<State> state_;
};

}  // namespace pegaflow::server
