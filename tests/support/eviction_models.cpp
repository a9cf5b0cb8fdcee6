#include "tests/support/eviction_models.h"

#include <algorithm>
#include <stdexcept>

namespace pegaflow::testing {

// ---- common to all

EvictionModel::Item& EvictionModel::find(std::uint32_t name) {
  const auto found = std::find_if(items_.begin(), items_.end(),
                                  [&](const Item& each) { return each.name == name; });
  if (found == items_.end()) throw std::logic_error("the model has no such block");
  return *found;
}

void EvictionModel::seal(std::uint32_t name, std::uint32_t hash) {
  items_.push_back({.name = name, .hash = hash, .released = ++now_});
}

void EvictionModel::take(std::uint32_t name) {
  find(name).is_taken = true;
  used(find(name));
}

void EvictionModel::release(std::uint32_t name) {
  find(name).is_taken = false;
  find(name).released = ++now_;
}

void EvictionModel::free(std::uint32_t name, Freed why) {
  freed(find(name), why);
  std::erase_if(items_, [&](const Item& each) { return each.name == name; });
}

// ---- SLRU

void SlruModel::seal(std::uint32_t name, std::uint32_t hash) {
  EvictionModel::seal(name, hash);
  order_.push_back(name);
  shrink();
}

void SlruModel::release(std::uint32_t name) {
  EvictionModel::release(name);
  std::erase(order_, name);
  order_.push_back(name);
  shrink();
}

void SlruModel::shrink() {
  for (;;) {
    std::vector<std::uint32_t> kept;
    for (const std::uint32_t name : order_) {
      if (!find(name).is_taken && find(name).is_special) kept.push_back(name);
    }
    if (kept.size() <= items_.size() / 5) return;
    find(kept.front()).is_special = false;
    std::erase(order_, kept.front());
    order_.push_back(kept.front());
  }
}

std::uint32_t SlruModel::victim() {
  for (const bool special : {false, true}) {
    for (const std::uint32_t name : order_) {
      if (!find(name).is_taken && find(name).is_special == special) return name;
    }
  }
  return engine::EvictionPolicy::kNone;
}

// ---- S3-FIFO

void S3FifoModel::seal(std::uint32_t name, std::uint32_t hash) {
  const bool is_known = ghosts_->take(hash);
  EvictionModel::seal(name, hash);
  find(name).uses = 0;
  find(name).is_special = is_known;
  (is_known ? main_ : small_).push_back(name);
}

void S3FifoModel::used(Item& item) { item.uses = std::min(item.uses + 1, 3U); }

void S3FifoModel::freed(const Item& item, Freed why) {
  std::erase(main_, item.name);
  if (std::erase(small_, item.name) != 0 && why == Freed::kEvicted) ghosts_->add(item.hash);
}

std::uint32_t S3FifoModel::victim() {
  const auto is_evictable = [&](std::uint32_t name) { return !find(name).is_taken; };
  if (std::none_of(items_.begin(), items_.end(), [](const Item& item) { return !item.is_taken; })) {
    return engine::EvictionPolicy::kNone;
  }
  for (;;) {
    const bool is_small =
        !small_.empty() && (std::none_of(main_.begin(), main_.end(), is_evictable) ||
                            small_.size() * 10 > small_.size() + main_.size());
    std::vector<std::uint32_t>& queue = is_small ? small_ : main_;
    Item& item = find(queue.front());
    if (item.uses == 0 && !item.is_taken) return item.name;
    if (!is_small && item.uses > 0) --item.uses;
    if (is_small) item.uses = 0;
    queue.erase(queue.begin());
    main_.push_back(item.name);
  }
}

// ---- an adapter for a policy

void PolicyModel::seal(std::uint32_t name, std::uint32_t hash) {
  EvictionModel::seal(name, hash);
  policy_->sealed(name, hash);
}

void PolicyModel::take(std::uint32_t name) {
  EvictionModel::take(name);
  policy_->taken(name);
}

std::uint32_t PolicyModel::claim_begins() {
  const std::uint32_t before = rows_.uses();
  policy_->claim_begins();
  return rows_.uses() - before;
}

std::uint32_t PolicyModel::save_begins(bool may_refuse) {
  const std::uint32_t before = rows_.uses();
  policy_->save_begins(may_refuse);
  return rows_.uses() - before;
}

void PolicyModel::use_again(std::uint32_t name) { policy_->used_again(name); }

void PolicyModel::release(std::uint32_t name) {
  EvictionModel::release(name);
  policy_->released(name);
}

void PolicyModel::free(std::uint32_t name, Freed why) {
  policy_->freed(name, find(name).hash, why);
  EvictionModel::free(name, why);
}

}  // namespace pegaflow::testing
