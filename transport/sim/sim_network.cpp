#include "transport/sim/sim_network.h"

#include <algorithm>

#include "base/assert.h"
#include "transport/sim/sim_fabric.h"

namespace pegaflow {
namespace {

std::pair<std::uint64_t, std::uint64_t> between(std::uint64_t one, std::uint64_t other) {
  return std::minmax(one, other);
}

}  // namespace

SimNetwork::~SimNetwork() {
  PEGA_ASSERT(fabrics_.empty(), "a network is destroyed before {} of its fabrics", fabrics_.size());
}

TimePoint SimNetwork::next_time() const {
  const std::lock_guard lock(mutex_);
  return events_.empty() ? TimePoint::max() : events_.top().at;
}

void SimNetwork::run() {
  const std::lock_guard lock(mutex_);
  const TimePoint now = clock_.now();
  while (!events_.empty() && events_.top().at <= now) {
    const std::function<void()> act = events_.top().act;
    events_.pop();
    act();
  }
}

void SimNetwork::set_faults(const Faults& faults) {
  const std::lock_guard lock(mutex_);
  faults_ = faults;
}

void SimNetwork::cut(const SimFabric& one, const SimFabric& other) {
  const std::lock_guard lock(mutex_);
  cuts_.insert(between(one.number_, other.number_));
}

void SimNetwork::heal(const SimFabric& one, const SimFabric& other) {
  const std::lock_guard lock(mutex_);
  cuts_.erase(between(one.number_, other.number_));
}

void SimNetwork::at(TimePoint time, std::function<void()> act) {
  events_.push({.at = time, .order = ++last_order_, .act = std::move(act)});
  wake_();
}

SimFabric* SimNetwork::find(std::uint64_t number) const {
  const auto found = fabrics_.find(number);
  return found == fabrics_.end() ? nullptr : found->second;
}

bool SimNetwork::is_cut(std::uint64_t one, std::uint64_t other) const {
  return cuts_.contains(between(one, other));
}

bool SimNetwork::chance(double probability) {
  return probability > 0 && std::uniform_real_distribution<>(0, 1)(random_) < probability;
}

Duration SimNetwork::some(Duration longest) {
  return Duration(std::uniform_int_distribution<Duration::rep>(0, longest.count())(random_));
}

}  // namespace pegaflow
