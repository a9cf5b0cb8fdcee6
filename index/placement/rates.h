#pragma once
/// \file
/// Rates that the router learns while it runs: the prefill speed of each engine, the links between
/// nodes, and the error of its own predictions. Nothing is calibrated and nothing needs a setting.

#include <cstdint>

namespace pegaflow::index {

/// The time of a prefill as floor + tokens / rate, fitted to what an engine did: recursive least
/// squares with forgetting, so that a change of the engine's speed shows after some 50 requests.
///
/// Thread-bound; copies are independent. O(1) memory.
class PrefillRate {
 public:
  struct Options {
    double start_tokens_per_second = 8000;  ///< Until the first sample.
    double start_floor_seconds = 0.01;
    double forgetting = 0.98;  ///< Weight of the older samples at each new one; in (0, 1].
    // The estimate never leaves these limits, whatever the samples are.
    double least_tokens_per_second = 200;
    double most_tokens_per_second = 2e6;
    double most_floor_seconds = 0.5;
  };
  PrefillRate() : PrefillRate(Options{}) {}
  explicit PrefillRate(const Options& options);

  /// One prefill: `uncached_tokens` were computed in `seconds`, the time to the first token without
  /// the wait in the queue. Samples that are negative, not finite or beyond an hour are ignored;
  /// one that is more than 8 times longer than predicted is cut to that, so that a stall does not
  /// look like a slow engine.
  void add(double uncached_tokens, double seconds) noexcept;

  [[nodiscard]] double tokens_per_second() const noexcept { return tokens_per_second_; }
  [[nodiscard]] double floor_seconds() const noexcept { return floor_seconds_; }
  /// The predicted time of a prefill of so many tokens, without queue; 0 for no token.
  [[nodiscard]] double seconds(double uncached_tokens) const noexcept {
    return uncached_tokens <= 0 ? 0 : floor_seconds_ + uncached_tokens / tokens_per_second_;
  }
  [[nodiscard]] std::uint64_t samples() const noexcept { return samples_; }

 private:
  void publish() noexcept;

  Options options_;
  // Of seconds = floor + slope * (thousands of tokens): the estimate, and its covariance.
  double floor_ = 0;
  double slope_ = 0;
  double p00_ = 0;
  double p01_ = 0;
  double p11_ = 0;
  double tokens_per_second_ = 0;
  double floor_seconds_ = 0;
  std::uint64_t samples_ = 0;
};

/// The transport between two nodes, for the rates that are assumed until a transfer was measured.
enum class Lane : std::uint8_t { kTcp, kRdma };

/// A path of bytes: seconds = latency + bytes / rate.
struct LinkRate {
  double latency_seconds = 0.001;
  double bytes_per_second = 3e9;

  /// The assumption for a link without a measurement: 3 GB/s over sockets, 20 GB/s with RDMA.
  static LinkRate start(Lane lane) noexcept;
  [[nodiscard]] double seconds(double bytes) const noexcept {
    return bytes <= 0 ? 0 : latency_seconds + bytes / bytes_per_second;
  }
};

/// Predicted against reported numbers of one engine, for its trust state, for metrics and for
/// `/routes`. Exponentially weighted over some 32 requests. Thread-bound.
class PredictionError {
 public:
  /// One finished request: the tokens of its prompt, the cached tokens that were predicted and
  /// those that the engine reported.
  void add_cached(double prompt_tokens, double predicted, double reported) noexcept;
  /// The predicted and the measured time to the first token, in seconds.
  void add_time(double predicted, double measured) noexcept;

  /// Mean of |predicted - reported| as a share of the prompt, in [0, 1].
  [[nodiscard]] double cached_error() const noexcept { return cached_error_; }
  /// Mean of (predicted - reported) as a share of the prompt: above 0 the index claims too much.
  [[nodiscard]] double cached_bias() const noexcept { return cached_bias_; }
  /// Mean of |predicted - measured| / measured.
  [[nodiscard]] double time_error() const noexcept { return time_error_; }
  [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }
  /// Forgets all, as after a resynchronization.
  void reset() noexcept { *this = PredictionError(); }

 private:
  double cached_error_ = 0;
  double cached_bias_ = 0;
  double time_error_ = 0;
  std::uint64_t requests_ = 0;
  std::uint64_t times_ = 0;
};

}  // namespace pegaflow::index
