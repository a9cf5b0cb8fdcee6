#include "engine/demand/sliding_sketch.h"

#include <cmath>
#include <utility>

namespace pegaflow::engine {
namespace {

/// Sums over powers of x that converge after few terms; Ertl's sigma and tau.
double sigma(double x) noexcept {
  if (x == 1.0) return HUGE_VAL;
  double power = x;
  double weight = 1;
  double sum = x;
  for (double before = -1; sum != before; weight *= 2) {
    power *= power;
    before = sum;
    sum += power * weight;
  }
  return sum;
}

double tau(double x) noexcept {
  if (x == 0.0 || x == 1.0) return 0;
  double root = x;
  double weight = 1;
  double sum = 1 - x;
  for (double before = -1; sum != before;) {
    root = std::sqrt(root);
    before = sum;
    weight /= 2;
    sum -= (1 - root) * (1 - root) * weight;
  }
  return sum / 3;
}

}  // namespace

Result<SlidingSketch> SlidingSketch::create(std::size_t windows) {
  if (windows == 0 || windows > kMaxWindows) {
    return fail(Errc::kInvalidArgument, "a sketch has 1 to {} windows, not {}", kMaxWindows,
                windows);
  }
  PEGA_TRY_LET(auto last_seen, ZeroPages<std::int32_t>::create(kRanks * kRegisters));
  PEGA_TRY_LET(auto tops, (ZeroPages<std::array<std::uint8_t, kMaxWindows>>::create(kRegisters)));
  // Fewer page faults in the first calls.
  last_seen.touch();
  return SlidingSketch(std::move(last_seen), std::move(tops), windows);
}

SlidingSketch::SlidingSketch(ZeroPages<std::int32_t> last_seen,
                             ZeroPages<std::array<std::uint8_t, kMaxWindows>> tops,
                             std::size_t windows) noexcept
    : last_seen_(std::move(last_seen)), tops_(std::move(tops)), windows_(windows) {
  chance_.fill(1);
}

void SlidingSketch::slide(std::size_t window, std::uint32_t since_s) noexcept {
  // No rank above the current highest can be in it.
  std::uint32_t highest = 0;
  for (std::uint32_t at = 0; at < kRegisters; ++at) {
    highest = std::max<std::uint32_t>(highest, tops_[at][window]);
    tops_[at][window] = 0;
  }
  // Numbers of one signed width, so that the compiler processes several registers at a time.
  const auto since = static_cast<std::int32_t>(std::max<std::uint32_t>(since_s, 1));
  std::array<std::int32_t, kRegisters> tops{};
  for (std::uint32_t rank = 1; rank <= highest; ++rank) {
    const std::int32_t* const row = &last_seen_[(rank - 1) * kRegisters];
    const auto top = static_cast<std::int32_t>(rank);
    for (std::uint32_t at = 0; at < kRegisters; ++at) {
      tops[at] = row[at] >= since ? top : tops[at];
    }
  }
  std::array<std::uint32_t, kRanks + 1> with_top{};
  for (std::uint32_t at = 0; at < kRegisters; ++at) {
    tops_[at][window] = static_cast<std::uint8_t>(tops[at]);
    ++with_top[static_cast<std::uint32_t>(tops[at])];
  }
  double chance = 0;
  for (std::uint32_t top = 0; top <= kRanks; ++top) chance += with_top[top] * chance_of(top);
  chance_[window] = chance;
}

double SlidingSketch::count(std::size_t window) const noexcept {
  std::array<std::uint32_t, kRanks + 1> with_top{};
  for (std::uint32_t at = 0; at < kRegisters; ++at) ++with_top[tops_[at][window]];
  const auto registers = static_cast<double>(kRegisters);
  double sum = registers * tau(1 - with_top[kRanks] / registers);
  for (std::uint32_t rank = kRanks - 1; rank > 0; --rank) sum = (sum + with_top[rank]) / 2;
  sum += registers * sigma(with_top[0] / registers);
  return registers * registers / (2 * std::log(2.0) * sum);
}

}  // namespace pegaflow::engine
