#include "perf/lib/random_draws.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace pegaflow::perf {

std::uint64_t Draws::next() noexcept {
  state_ += 0x9E3779B97F4A7C15ULL;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

double Draws::uniform() noexcept {
  constexpr double kStep = 1.0 / static_cast<double>(std::uint64_t{1} << 53);
  return static_cast<double>(next() >> 11) * kStep;
}

double Draws::exponential(double mean) noexcept { return -mean * std::log1p(-uniform()); }

double Draws::lognormal(double mu, double sigma) noexcept {
  // Box-Muller transform. Its second value is unused, so every draw takes two steps.
  const double radius = std::sqrt(-2 * std::log1p(-uniform()));
  return std::exp(mu + sigma * radius * std::cos(2 * std::numbers::pi * uniform()));
}

Weighted::Weighted(std::span<const double> weights) {
  double sum = 0;
  for (const double weight : weights) sums_.push_back(sum += weight);
}

Weighted Weighted::zipf(std::size_t count, double exponent) {
  std::vector<double> weights;
  for (std::size_t i = 0; i < count; ++i) {
    weights.push_back(std::pow(static_cast<double>(i + 1), -exponent));
  }
  return Weighted(weights);
}

std::size_t Weighted::draw(Draws& draws) const noexcept {
  const auto found = std::upper_bound(sums_.begin(), sums_.end(), draws.uniform() * sums_.back());
  return std::min(static_cast<std::size_t>(found - sums_.begin()), sums_.size() - 1);
}

}  // namespace pegaflow::perf
