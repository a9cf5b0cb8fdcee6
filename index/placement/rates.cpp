#include "index/placement/rates.h"

#include <algorithm>
#include <cmath>

namespace pegaflow::index {

namespace {

constexpr double kThousand = 1000;
/// Samples are weighted by 1 / (predicted time)^2, so that a fit of times from 20 ms to 10 s is not
/// one of the longest alone. Below this, clocks and network weigh more than the engine.
constexpr double kLeastScale = 0.02;
constexpr double kLongest = 3600;
constexpr double kMostTimesPredicted = 8;
/// Requests that a prediction error remembers.
constexpr double kMemory = 32;

/// The weight of the newest of `count` samples: their plain mean until kMemory, then exponential.
double weight(std::uint64_t count) { return 1.0 / std::min(static_cast<double>(count), kMemory); }

}  // namespace

PrefillRate::PrefillRate(const Options& options)
    : options_(options),
      floor_(options.start_floor_seconds),
      slope_(kThousand / options.start_tokens_per_second),
      // The start values are guesses: the first samples replace them nearly at once.
      p00_(0.1),
      p11_(10) {
  publish();
}

void PrefillRate::add(double uncached_tokens, double seconds) noexcept {
  if (!std::isfinite(uncached_tokens) || !std::isfinite(seconds) || uncached_tokens <= 0 ||
      seconds <= 0 || seconds > kLongest) {
    return;
  }
  const double thousands = uncached_tokens / kThousand;
  const double predicted = floor_ + slope_ * thousands;
  if (samples_ > 0) seconds = std::min(seconds, kMostTimesPredicted * std::max(predicted, 1e-3));
  const double scale = 1.0 / std::max(predicted, kLeastScale);
  const double x0 = scale;
  const double x1 = scale * thousands;
  const double error = scale * (seconds - predicted);

  const double px0 = p00_ * x0 + p01_ * x1;
  const double px1 = p01_ * x0 + p11_ * x1;
  const double gain = 1.0 / (options_.forgetting + x0 * px0 + x1 * px1);
  floor_ += gain * px0 * error;
  slope_ += gain * px1 * error;
  p00_ = (p00_ - gain * px0 * px0) / options_.forgetting;
  p01_ = (p01_ - gain * px0 * px1) / options_.forgetting;
  p11_ = (p11_ - gain * px1 * px1) / options_.forgetting;
  // Equal prompts excite one direction only, and forgetting would let the other grow for ever. The
  // correlation shrinks with the diagonal, so that the matrix stays positive.
  const double too_wide = std::max(p00_ / 0.1, p11_ / 10);
  if (too_wide > 1) {
    p00_ /= too_wide;
    p01_ /= too_wide;
    p11_ /= too_wide;
  }
  ++samples_;
  publish();
}

void PrefillRate::publish() noexcept {
  floor_ = std::clamp(floor_, 0.0, options_.most_floor_seconds);
  slope_ = std::clamp(slope_, kThousand / options_.most_tokens_per_second,
                      kThousand / options_.least_tokens_per_second);
  floor_seconds_ = floor_;
  tokens_per_second_ = kThousand / slope_;
}

LinkRate LinkRate::start(Lane lane) noexcept {
  if (lane == Lane::kRdma) return {.latency_seconds = 0.0002, .bytes_per_second = 20e9};
  return {.latency_seconds = 0.001, .bytes_per_second = 3e9};
}

void PredictionError::add_cached(double prompt_tokens, double predicted, double reported) noexcept {
  if (!(prompt_tokens > 0)) return;
  const double bias = std::clamp((predicted - reported) / prompt_tokens, -1.0, 1.0);
  const double share = weight(++requests_);
  cached_bias_ += share * (bias - cached_bias_);
  cached_error_ += share * (std::abs(bias) - cached_error_);
}

void PredictionError::add_time(double predicted, double measured) noexcept {
  if (!(measured > 0) || !std::isfinite(predicted)) return;
  const double error = std::min(std::abs(predicted - measured) / measured, 10.0);
  time_error_ += weight(++times_) * (error - time_error_);
}

}  // namespace pegaflow::index
