#include "index/events/adoption.h"

#include <algorithm>
#include <utility>

namespace pegaflow::index {

void Adoption::begin(std::vector<Key> keys) {
  stop();
  keys_ = std::move(keys);
}

void Adoption::stop() {
  // An assignment would keep the memory.
  std::vector<Key>().swap(keys_);
  std::vector<Key>().swap(slice_);
  std::unordered_set<Key>().swap(removed_);
  at_ = 0;
}

void Adoption::removed(std::span<const Key> keys) {
  if (is_active()) removed_.insert(keys.begin(), keys.end());
}

void Adoption::stored(std::span<const Key> keys) {
  if (removed_.empty()) return;
  for (const Key key : keys) removed_.erase(key);
}

std::span<const Key> Adoption::next() {
  const std::size_t count = std::min(kSlice, keys_.size() - at_);
  slice_.clear();
  for (const Key key : std::span(keys_).subspan(at_, count)) {
    if (!removed_.contains(key)) slice_.push_back(key);
  }
  at_ += count;
  return slice_;
}

}  // namespace pegaflow::index
