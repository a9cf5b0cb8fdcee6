#include "index/placement/waiting_blocks.h"

#include <algorithm>

namespace pegaflow::index {

void WaitingBlocks::add(std::uint64_t request, HolderId engine, std::span<const Key> keys) {
  if (keys.empty() || engines_.size() >= kMaxRequests || block_count_ + keys.size() > kMaxBlocks ||
      !engines_.emplace(request, engine).second) {
    return;
  }
  block_count_ += keys.size();
  waiting_[engine].push_back({.request = request, .keys = {keys.begin(), keys.end()}});
}

std::span<const WaitingBlocks::Loss> WaitingBlocks::removed(HolderId engine) {
  losses_.clear();
  const auto found = waiting_.find(engine);
  if (found == waiting_.end()) return losses_;
  for (Waiting& each : found->second) {
    std::uint32_t lost = 0;
    while (!each.keys.empty()) {
      blocks_.match(std::span(each.keys).last(1), match_);
      if (match_.local(engine) == 1) break;
      each.keys.pop_back();
      ++lost;
    }
    if (lost == 0) continue;
    block_count_ -= lost;
    each.lost += lost;
    losses_.push_back({.request = each.request, .lost = lost});
  }
  return losses_;
}

WaitingBlocks::Waiting* WaitingBlocks::find(std::uint64_t request) {
  const auto found = engines_.find(request);
  if (found == engines_.end()) return nullptr;
  Requests& all = waiting_.at(found->second);
  return &*std::find_if(all.begin(), all.end(),
                        [request](const Waiting& each) { return each.request == request; });
}

void WaitingBlocks::begun(std::uint64_t request) {
  Waiting* const one = find(request);
  if (one == nullptr) return;
  block_count_ -= one->keys.size();
  std::vector<Key>().swap(one->keys);
}

std::uint32_t WaitingBlocks::lost(std::uint64_t request) {
  const Waiting* const one = find(request);
  return one == nullptr ? 0 : one->lost;
}

void WaitingBlocks::remove(std::uint64_t request) {
  Waiting* const one = find(request);
  if (one == nullptr) return;
  block_count_ -= one->keys.size();
  const auto engine = waiting_.find(engines_.extract(request).mapped());
  Requests& all = engine->second;
  if (one != &all.back()) *one = std::move(all.back());
  all.pop_back();
  if (all.empty()) waiting_.erase(engine);
}

void WaitingBlocks::forget(HolderId engine) {
  const auto found = waiting_.find(engine);
  if (found == waiting_.end()) return;
  for (const Waiting& each : found->second) {
    block_count_ -= each.keys.size();
    engines_.erase(each.request);
  }
  waiting_.erase(found);
}

}  // namespace pegaflow::index
