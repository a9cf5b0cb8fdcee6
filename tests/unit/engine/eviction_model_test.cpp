// Every policy beside a model of it in plain words, on random events.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "engine/eviction.h"
#include "engine/eviction_weighted.h"
#include "tests/support/seed.h"

namespace pegaflow {

namespace {

using Freed = EvictionPolicy::Freed;
constexpr std::uint32_t kRows = 24;
constexpr std::uint32_t kNames = 60;

/// Blocks are names here; everything is a vector that is searched.
struct Item {
  std::uint32_t name = 0;
  bool is_taken = false;
  std::uint32_t uses = 1;   ///< Of which each model makes its own.
  bool is_special = false;  ///< Protected, or in the main queue.
  std::uint64_t rested = 0;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual void sealed(std::uint32_t name) { items.push_back({.name = name, .rested = ++now}); }
  virtual void used(Item& item) = 0;
  virtual void freed(std::uint32_t /*name*/, Freed /*why*/) {}
  /// The name that goes next; some item is at rest.
  virtual std::uint32_t victim() = 0;

  Item& find(std::uint32_t name) {
    return *std::find_if(items.begin(), items.end(), [&](auto& each) { return each.name == name; });
  }
  void take(std::uint32_t name) {
    find(name).is_taken = true;
    used(find(name));
  }
  virtual void rest(std::uint32_t name) {
    find(name).is_taken = false;
    find(name).rested = ++now;
  }
  void free(std::uint32_t name, Freed why) {
    freed(name, why);
    std::erase_if(items, [&](auto& each) { return each.name == name; });
  }
  /// The item at rest that is first by `key`, the smallest.
  template <typename Key>
  std::uint32_t least(Key&& key) {
    Item* best = nullptr;
    for (Item& item : items) {
      if (!item.is_taken && (best == nullptr || key(item) < key(*best))) best = &item;
    }
    return best->name;
  }

  std::vector<Item> items;
  std::uint64_t now = 0;
};

class LruModel final : public Model {
  void used(Item& /*item*/) override {}
  std::uint32_t victim() override {
    return least([](const Item& item) { return item.rested; });
  }
};

class SlruModel final : public Model {
  void used(Item& item) override { item.is_special = true; }
  void sealed(std::uint32_t name) override {
    Model::sealed(name);
    order_.push_back(name);
    shrink();
  }
  void rest(std::uint32_t name) override {
    Model::rest(name);
    std::erase(order_, name);
    order_.push_back(name);
    shrink();
  }
  void freed(std::uint32_t name, Freed /*why*/) override { std::erase(order_, name); }
  void shrink() {
    for (;;) {
      std::vector<std::uint32_t> kept;
      for (const std::uint32_t name : order_) {
        if (!find(name).is_taken && find(name).is_special) kept.push_back(name);
      }
      if (kept.size() <= items.size() / 5) return;
      find(kept.front()).is_special = false;
      std::erase(order_, kept.front());
      order_.push_back(kept.front());
    }
  }
  std::uint32_t victim() override {
    for (const bool special : {false, true}) {
      for (const std::uint32_t name : order_) {
        if (!find(name).is_taken && find(name).is_special == special) return name;
      }
    }
    return 0;
  }
  std::vector<std::uint32_t> order_;
};

class S3FifoModel final : public Model {
  void sealed(std::uint32_t name) override {
    const bool is_known = std::erase(ghosts_, name) != 0;
    Model::sealed(name);
    find(name).uses = 0;
    find(name).is_special = is_known;
    (is_known ? main_ : small_).push_back(name);
  }
  void used(Item& item) override { item.uses = std::min(item.uses + 1, 3U); }
  void freed(std::uint32_t name, Freed why) override {
    std::erase(main_, name);
    if (std::erase(small_, name) != 0 && why == Freed::kEvicted) ghosts_.push_back(name);
  }
  std::uint32_t victim() override {
    for (;;) {
      const bool is_small =
          !small_.empty() && (std::none_of(main_.begin(), main_.end(),
                                           [&](auto name) { return !find(name).is_taken; }) ||
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
  std::vector<std::uint32_t> small_;
  std::vector<std::uint32_t> main_;
  std::vector<std::uint32_t> ghosts_;
};

class WeightedModel final : public Model {
 public:
  explicit WeightedModel(const WeightedLruPolicy& tested) : tested_(tested) {}

 private:
  void sealed(std::uint32_t name) override {
    Model::sealed(name);
    const auto known = ghosts_.find(name);
    if (known == ghosts_.end()) return;
    find(name).uses = std::min(known->second + 1, 8U);
    ghosts_.erase(known);
  }
  void used(Item& item) override { item.uses = std::min(item.uses + 1, 8U); }
  void freed(std::uint32_t name, Freed why) override {
    if (why == Freed::kEvicted) ghosts_[name] = find(name).uses;
  }
  std::uint32_t victim() override {
    return least([&](const Item& item) {
      const double weight = std::pow(item.uses, -tested_.exponent());
      return std::pair(-(static_cast<double>(now - item.rested) + 1) * weight, item.uses);
    });
  }
  const WeightedLruPolicy& tested_;
  std::map<std::uint32_t, std::uint32_t> ghosts_;
};

std::unique_ptr<Model> model_of(EvictionKind kind, const EvictionPolicy& policy) {
  switch (kind) {
    case EvictionKind::kLru:
      return std::make_unique<LruModel>();
    case EvictionKind::kSlru:
      return std::make_unique<SlruModel>();
    case EvictionKind::kS3Fifo:
      return std::make_unique<S3FifoModel>();
    case EvictionKind::kWeightedLru:
      return std::make_unique<WeightedModel>(dynamic_cast<const WeightedLruPolicy&>(policy));
  }
  return nullptr;
}

std::uint32_t hash_of(std::uint32_t name) { return (name + 1) * 0x9E3779B1U; }

class Run {
 public:
  Run(EvictionKind kind, std::uint64_t seed)
      : random_(seed), rows_(std::move(*EvictionRows::create(kRows))) {
    // Room for the memory of every name, so that the model needs to know nothing of its limits.
    auto made = EvictionPolicy::create(kind, *rows_, 4096);
    REQUIRE(made);
    policy_ = std::move(*made);
    model_ = model_of(kind, *policy_);
    names_.fill(kFree);
  }

  void step() {
    const std::uint32_t row = pick(kRows);
    if (names_[row] == kFree) {
      seal();
    } else if (model_->find(names_[row]).is_taken) {
      use(row);
    } else {
      leave_or_take(row);
    }
    compare();
  }

 private:
  static constexpr std::uint32_t kFree = ~std::uint32_t{0};
  void use(std::uint32_t row) {
    if (pick(2) == 0) {
      policy_->used_again(row);
      model_->used(model_->find(names_[row]));
    } else {
      policy_->rested(row);
      model_->rest(names_[row]);
    }
  }
  void leave_or_take(std::uint32_t row) {
    if (pick(20) == 0) {
      free(row, Freed::kDropped);
    } else if (pick(3) != 0) {
      policy_->taken(row);
      model_->take(names_[row]);
    } else {
      seal();
    }
  }
  std::uint32_t pick(std::uint32_t count) { return static_cast<std::uint32_t>(random_() % count); }
  void free(std::uint32_t row, Freed why) {
    policy_->freed(row, hash_of(names_[row]), why);
    model_->free(names_[row], why);
    names_[row] = kFree;
  }
  /// A block that is not there, some more often than others.
  void seal() {
    const std::uint32_t name = std::min(pick(kNames), pick(kNames));
    if (std::find(names_.begin(), names_.end(), name) != names_.end()) return;
    auto* place = std::find(names_.begin(), names_.end(), kFree);
    if (place == names_.end()) {
      const std::uint32_t victim = policy_->victim();
      if (victim == EvictionPolicy::kNone) return;
      free(victim, Freed::kEvicted);
      place = std::find(names_.begin(), names_.end(), kFree);
    }
    *place = name;
    policy_->sealed(static_cast<std::uint32_t>(place - names_.begin()), hash_of(name));
    model_->sealed(name);
  }
  void compare() {
    std::uint32_t at_rest = 0;
    for (const Item& item : model_->items) at_rest += item.is_taken ? 0 : 1;
    REQUIRE(policy_->size() == at_rest);
    REQUIRE(policy_->check([&](std::uint32_t row) {
      return names_[row] != kFree && !model_->find(names_[row]).is_taken;
    }));
    const std::uint32_t victim = policy_->victim();
    if (at_rest == 0) {
      REQUIRE(victim == EvictionPolicy::kNone);
      return;
    }
    REQUIRE(victim < kRows);
    REQUIRE(names_[victim] == model_->victim());
    REQUIRE(policy_->victim() == victim);
    std::array<std::uint32_t, 1> next{};
    if (policy_->victims(next) == 1) REQUIRE(next[0] == victim);
  }

  std::mt19937_64 random_;
  std::unique_ptr<EvictionRows> rows_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::unique_ptr<Model> model_;
  std::array<std::uint32_t, kRows> names_{};
};

}  // namespace

TEST_SUITE("EvictionPolicy, beside its model") {
  TEST_CASE("every policy names the victim that its description names") {
    for (const EvictionKind kind : kEvictionKinds) {
      CAPTURE(to_string(kind));
      Run run(kind, testing::seed());
      for (int i = 0; i < 20000; ++i) run.step();
    }
  }
}

}  // namespace pegaflow
