// Conformance of the simulated lane, here in real time.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/unit/transport/fabric_conformance.h"
#include "transport/sim/sim_fabric.h"

namespace pegaflow::testing {
namespace {

/// A network with a thread that runs its events at their times.
class LiveNetwork {
 public:
  LiveNetwork() : network_(clock_, seed()) {
    network_.on_schedule_change([this] {
      const std::lock_guard lock(mutex_);
      has_news_ = true;
      news_.notify_one();
    });
    thread_ = std::thread([this] { run(); });
  }
  ~LiveNetwork() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      news_.notify_one();
    }
    thread_.join();
  }
  LiveNetwork(const LiveNetwork&) = delete;
  LiveNetwork& operator=(const LiveNetwork&) = delete;
  SimNetwork& network() { return network_; }

 private:
  void run() {
    for (;;) {
      network_.run();
      const TimePoint next = network_.next_time();
      std::unique_lock lock(mutex_);
      const auto woken = [this] { return stop_ || has_news_; };
      if (next == TimePoint::max()) {
        news_.wait(lock, woken);
      } else {
        news_.wait_until(lock, next, woken);
      }
      if (stop_) return;
      has_news_ = false;
    }
  }

  SteadyClock clock_;
  SimNetwork network_;
  std::mutex mutex_;
  std::condition_variable news_;
  bool has_news_ = false;
  bool stop_ = false;
  std::thread thread_;
};

std::unique_ptr<Fabric> make_sim(const SimFabric::Options& options, Fabric::CompletionSink sink) {
  static LiveNetwork live;
  auto made = SimFabric::create(options, live.network(), std::move(sink));
  REQUIRE_MESSAGE(made, to_string(made.error()));
  return std::move(*made);
}

struct SimBackend {
  static std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
    return make_sim({}, std::move(sink));
  }
};

/// Three rails of different speeds, small pieces, and windows that are hardly larger than a piece.
struct NarrowSimBackend {
  static std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
    return make_sim({.rails_bytes_per_s = {4e9, 2e9, 1e8},
                     .piece_bytes = 5000,
                     .window_bytes = 12000,
                     .window_operations = 3},
                    std::move(sink));
  }
};

TEST_CASE_TEMPLATE_INVOKE(fabric_conformance, SimBackend, NarrowSimBackend);

}  // namespace
}  // namespace pegaflow::testing
