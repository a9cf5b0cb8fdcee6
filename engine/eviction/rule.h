#pragma once
/// \file
/// An eviction rule: which block leaves, and which new one is refused.

#include <array>
#include <cmath>
#include <cstdint>

namespace pegaflow::engine {

/// Evicts the block with the greatest age / uses^exponent, unless that is less than
/// patience * rows / (uses of the new block)^exponent: then the new block is refused. Ages count
/// uses of blocks.
class EvictionRule {
 public:
  static constexpr std::uint32_t kMaxUses = 8;

  EvictionRule() = default;
  EvictionRule(double exponent, double patience) : exponent_(exponent), patience_(patience) {
    for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
      weights_[uses] = std::pow(uses, -exponent);
    }
  }

  [[nodiscard]] double exponent() const noexcept { return exponent_; }
  [[nodiscard]] double patience() const noexcept { return patience_; }
  [[nodiscard]] bool may_refuse() const noexcept { return patience_ > 0; }
  /// uses^-exponent
  [[nodiscard]] double weight(std::uint32_t uses) const noexcept { return weights_[uses]; }
  /// Whether a new block with so many uses is refused, when `age` is the greatest weighted one.
  [[nodiscard]] bool refuses(std::uint32_t uses, double age, std::uint32_t rows) const noexcept {
    return age < patience_ * weights_[uses] * rows;
  }

 private:
  double exponent_ = 0;
  double patience_ = 0;
  std::array<double, kMaxUses + 1> weights_{1, 1, 1, 1, 1, 1, 1, 1, 1};
};

}  // namespace pegaflow::engine
