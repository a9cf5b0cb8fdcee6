#pragma once
/// \file
/// Random draws that are the same for one seed on every machine, unlike those of <random>.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pegaflow::perf {

/// A sequence of random numbers, the same for one seed. Thread-bound; copies are independent.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed) {}

  /// SplitMix64.
  std::uint64_t next() noexcept;
  /// In [0, 1).
  double uniform() noexcept;
  /// In [0, limit); `limit` is above 0.
  std::uint64_t below(std::uint64_t limit) noexcept { return next() % limit; }
  /// In [low, high].
  std::uint64_t between(std::uint64_t low, std::uint64_t high) noexcept {
    return low + below(high - low + 1);
  }
  bool with_chance(double chance) noexcept { return uniform() < chance; }
  /// Times between independent events that are `mean` apart.
  double exponential(double mean) noexcept;
  /// exp(N(mu, sigma)), for sizes and pauses; the median is exp(mu).
  double lognormal(double mu, double sigma) noexcept;

 private:
  std::uint64_t state_;
};

/// Draws 0, 1, 2 ... with given weights. Immutable.
class Weighted {
 public:
  /// `weights` is not empty, none is negative, and their sum is above 0.
  explicit Weighted(std::span<const double> weights);
  /// Rank i of `count` with the weight 1 / (i + 1)^exponent.
  static Weighted zipf(std::size_t count, double exponent);

  [[nodiscard]] std::size_t draw(Draws& draws) const noexcept;

 private:
  std::vector<double> sums_;
};

}  // namespace pegaflow::perf
