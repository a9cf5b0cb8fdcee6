#include "index/placement/turns.h"

#include <algorithm>
#include <limits>

namespace pegaflow::index {

Turns::Turns(std::uint32_t max_routers)
    : placed_(max_routers, -std::numeric_limits<double>::infinity()) {
  before_.reserve(max_routers);
}

void Turns::set_before(std::span<const RouterId> routers) {
  before_.clear();
  for (const RouterId router : routers) {
    if (router != 0 && router < placed_.size() && before_.size() < placed_.size()) {
      before_.push_back(router);
    }
  }
}

void Turns::placed(RouterId router, double now) {
  if (router < placed_.size()) placed_[router] = now;
}

bool Turns::is_next(double arrived) const {
  return std::all_of(before_.begin(), before_.end(),
                     [&](RouterId router) { return placed_[router] >= arrived - kInstant; });
}

double Turns::limit(double prefill_seconds) const {
  return std::min(kEach * static_cast<double>(before_.size()), kShare * prefill_seconds);
}

}  // namespace pegaflow::index
