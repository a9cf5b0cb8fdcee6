#include "index/placement/turns.h"

#include <algorithm>
#include <limits>

namespace pegaflow::index {

namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

}  // namespace

Turns::Turns(std::uint32_t max_routers) : newest_(max_routers), last_placed_(kNever) {
  for (Newest& each : newest_) each.times.fill(kNever);
  before_.reserve(max_routers);
  after_.reserve(max_routers);
}

void Turns::take(std::span<const RouterId> routers, std::vector<RouterId>& kept) const {
  kept.clear();
  for (const RouterId router : routers) {
    if (router != 0 && router < newest_.size() && kept.size() < newest_.size()) {
      kept.push_back(router);
    }
  }
}

void Turns::set_others(std::span<const RouterId> before, std::span<const RouterId> after) {
  take(before, before_);
  take(after, after_);
}

void Turns::placed(RouterId router, double now) {
  if (router >= newest_.size()) return;
  Newest& newest = newest_[router];
  newest.times[newest.next] = now;
  newest.next = (newest.next + 1) % kCounted;
  // Own placements say nothing about the others: many of them would never let the wait end.
  if (router != 0) last_placed_ = now;
}

std::size_t Turns::count(RouterId router, double arrived) const {
  const auto& times = newest_[router].times;
  return static_cast<std::size_t>(std::count_if(
      times.begin(), times.end(), [&](double time) { return time >= arrived - kInstant; }));
}

std::size_t Turns::missing(double arrived) const {
  if (before_.empty() && after_.empty()) return 0;
  const std::size_t own = std::min(count(0, arrived), kCounted - 1);
  const auto have_less = [&](const std::vector<RouterId>& routers, std::size_t than) {
    return static_cast<std::size_t>(
        std::count_if(routers.begin(), routers.end(),
                      [&](RouterId router) { return count(router, arrived) < than; }));
  };
  return have_less(before_, own + 1) + have_less(after_, own);
}

double Turns::end(double arrived, double limit) const {
  const std::size_t routers = missing(arrived);
  if (routers == 0) return arrived;
  const double silence = kFirst + kFurther * static_cast<double>(routers - 1);
  return std::min(std::max(arrived, last_placed_) + silence, arrived + limit);
}

double Turns::limit(double prefill_seconds) const {
  return std::min(kEach * static_cast<double>(before_.size() + after_.size()),
                  kShare * prefill_seconds);
}

}  // namespace pegaflow::index
