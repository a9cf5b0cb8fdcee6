#pragma once
/// \file
/// SIGTERM and SIGINT with their default effect, for a step that waits without an event loop.

#include <array>
#include <csignal>

namespace pegaflow {

/// While it lives, SIGTERM and SIGINT end the process at once, also one that was sent before. Its
/// destructor restores what they did. Lives on the thread that receives signals.
class DefaultSignals {
 public:
  DefaultSignals() noexcept {
    struct sigaction fallback {};
    fallback.sa_handler = SIG_DFL;
    sigset_t both;
    sigemptyset(&both);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &fallback, &former_[i]);
      sigaddset(&both, kSignals[i]);
    }
    ::pthread_sigmask(SIG_UNBLOCK, &both, &former_mask_);
  }
  ~DefaultSignals() {
    ::pthread_sigmask(SIG_SETMASK, &former_mask_, nullptr);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &former_[i], nullptr);
    }
  }
  DefaultSignals(const DefaultSignals&) = delete;
  DefaultSignals& operator=(const DefaultSignals&) = delete;

 private:
  static constexpr std::array<int, 2> kSignals = {SIGTERM, SIGINT};
  std::array<struct sigaction, 2> former_{};
  sigset_t former_mask_{};
};

}  // namespace pegaflow
