// Every policy beside a model of it in plain words, on random events.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include <doctest/doctest.h>

#include "engine/eviction/adaptive.h"
#include "engine/eviction/eviction.h"
#include "engine/eviction/weighted.h"
#include "tests/support/eviction_models.h"
#include "tests/support/seed.h"

namespace pegaflow::engine {

namespace {

using testing::AllGhosts;
using testing::EvictionModel;
using testing::LruModel;
using testing::S3FifoModel;
using testing::SlruModel;
using Freed = EvictionPolicy::Freed;
constexpr std::uint32_t kRows = 24;
constexpr std::uint32_t kNames = 60;

/// Takes the weight of uses from the tested policy: eviction_weighted_test tests how that adapts.
class WeightedModel final : public EvictionModel {
 public:
  explicit WeightedModel(const WeightedLruPolicy& tested) : tested_(tested) {}

  void seal(std::uint32_t name, std::uint32_t hash) override {
    EvictionModel::seal(name, hash);
    const auto known = ghosts_.find(hash);
    if (known == ghosts_.end()) return;
    find(name).uses = std::min(known->second + 1, 8U);
    ghosts_.erase(known);
  }
  std::uint32_t victim() override {
    return least([&](const Item& item) {
      const double weight = std::pow(item.uses, -tested_.exponent());
      return std::pair(-(static_cast<double>(now() - item.released) + 1) * weight, item.uses);
    });
  }

 private:
  void used(Item& item) override { item.uses = std::min(item.uses + 1, 8U); }
  void freed(const Item& item, Freed why) override {
    if (why == Freed::kEvicted) ghosts_[item.hash] = item.uses;
  }
  const WeightedLruPolicy& tested_;
  std::map<std::uint32_t, std::uint32_t> ghosts_;
};

/// Takes the rule from the tested policy: contest_test tests how that is found.
class AdaptiveModel final : public EvictionModel {
 public:
  explicit AdaptiveModel(const AdaptivePolicy& tested) : tested_(tested) {}

  void seal(std::uint32_t name, std::uint32_t hash) override {
    EvictionModel::seal(name, hash);
    find(name).uses = uses_of_new(hash);
    ghosts_.erase(hash);
  }
  std::uint32_t claim_begins() override {
    const std::uint32_t passed = std::exchange(refused_, 0);
    let_time_pass(passed);
    return passed;
  }
  std::uint32_t save_begins(bool /*may_refuse*/) override {
    pool_ = static_cast<double>(items().size());
    return claim_begins();
  }
  bool refuses(std::uint32_t hash) override {
    const double least = tested_.rule().patience() * pool_ * weight(uses_of_new(hash));
    if (age(find(victim())) >= least) return false;
    ghosts_[hash] = uses_of_new(hash);
    ++refused_;
    return true;
  }
  std::uint32_t victim() override {
    return least([&](const Item& item) { return std::pair(-age(item), item.uses); });
  }

 private:
  [[nodiscard]] double weight(std::uint32_t uses) const {
    return std::pow(uses, -tested_.rule().exponent());
  }
  [[nodiscard]] double age(const Item& item) const {
    return (static_cast<double>(now() - item.released) + 1) * weight(item.uses);
  }
  [[nodiscard]] std::uint32_t uses_of_new(std::uint32_t hash) const {
    const auto known = ghosts_.find(hash);
    return known == ghosts_.end() ? 1 : std::min(known->second + 1, 7U);
  }
  void used(Item& item) override { item.uses = std::min(item.uses + 1, 7U); }
  void freed(const Item& item, Freed why) override {
    if (why == Freed::kEvicted) ghosts_[item.hash] = item.uses;
  }
  const AdaptivePolicy& tested_;
  std::map<std::uint32_t, std::uint32_t> ghosts_;
  double pool_ = 0;
  std::uint32_t refused_ = 0;
};

std::unique_ptr<EvictionModel> model_of(EvictionKind kind, const EvictionPolicy& policy) {
  switch (kind) {
    case EvictionKind::kLru:
      return std::make_unique<LruModel>();
    case EvictionKind::kSlru:
      return std::make_unique<SlruModel>();
    case EvictionKind::kS3Fifo:
      return std::make_unique<S3FifoModel>(std::make_unique<AllGhosts>());
    case EvictionKind::kWeightedLru:
      return std::make_unique<WeightedModel>(dynamic_cast<const WeightedLruPolicy&>(policy));
    case EvictionKind::kAdaptive:
      return std::make_unique<AdaptiveModel>(dynamic_cast<const AdaptivePolicy&>(policy));
  }
  return nullptr;
}

std::uint32_t hash_of(std::uint32_t name) { return (name + 1) * 0x9E3779B1U; }

class Run {
 public:
  Run(EvictionKind kind, std::uint64_t seed)
      : random_(seed), rows_(std::move(*BlockRows::create(kRows))) {
    // Room for the memory of every name, so that the model need not know its limits.
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
  [[nodiscard]] std::uint32_t refused() const { return refused_; }

 private:
  static constexpr std::uint32_t kFree = ~std::uint32_t{0};
  void use(std::uint32_t row) {
    if (pick(2) == 0) {
      policy_->used_again(row);
      model_->use_again(names_[row]);
    } else {
      policy_->released(row);
      model_->release(names_[row]);
    }
  }
  void leave_or_take(std::uint32_t row) {
    if (pick(20) == 0) {
      free(row, Freed::kDropped);
    } else if (pick(3) != 0) {
      policy_->claim_begins();
      model_->claim_begins();
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
  /// A block that is absent, some more often than others.
  void seal() {
    const std::uint32_t name = std::min(pick(kNames), pick(kNames));
    if (std::find(names_.begin(), names_.end(), name) != names_.end()) return;
    const bool may_refuse = pick(4) != 0;
    policy_->save_begins(may_refuse);
    model_->save_begins(may_refuse);
    auto* place = std::find(names_.begin(), names_.end(), kFree);
    if (place == names_.end()) {
      const std::uint32_t victim = policy_->victim();
      if (victim == EvictionPolicy::kNone) return;
      if (may_refuse) {
        const bool is_refused = policy_->refuses(hash_of(name));
        REQUIRE(is_refused == model_->refuses(hash_of(name)));
        refused_ += is_refused ? 1 : 0;
        if (is_refused) return;
      }
      free(victim, Freed::kEvicted);
      place = std::find(names_.begin(), names_.end(), kFree);
    }
    *place = name;
    policy_->sealed(static_cast<std::uint32_t>(place - names_.begin()), hash_of(name));
    model_->seal(name, hash_of(name));
  }
  void compare() {
    std::uint32_t evictable = 0;
    for (const EvictionModel::Item& item : model_->items()) evictable += item.is_taken ? 0 : 1;
    REQUIRE(policy_->size() == evictable);
    REQUIRE(policy_->check([&](std::uint32_t row) {
      return names_[row] != kFree && !model_->find(names_[row]).is_taken;
    }));
    const std::uint32_t victim = policy_->victim();
    if (evictable == 0) {
      REQUIRE(victim == EvictionPolicy::kNone);
      return;
    }
    REQUIRE(victim < kRows);
    REQUIRE(names_[victim] == model_->victim());
    REQUIRE(policy_->victim() == victim);
  }

  std::mt19937_64 random_;
  std::unique_ptr<BlockRows> rows_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::unique_ptr<EvictionModel> model_;
  std::array<std::uint32_t, kRows> names_{};
  std::uint32_t refused_ = 0;
};

}  // namespace

TEST_SUITE("EvictionPolicy, beside its model") {
  TEST_CASE("every policy chooses the victim that its description requires") {
    for (const EvictionKind kind : kEvictionKinds) {
      CAPTURE(to_string(kind));
      // Whether random names make the policy adaptive refuse depends on them.
      std::uint32_t refused = 0;
      for (std::uint64_t more = 0; more < 20; ++more) {
        Run run(kind, testing::seed() + more);
        for (int i = 0; i < 20000; ++i) run.step();
        refused += run.refused();
        if (kind != EvictionKind::kAdaptive || refused != 0) break;
      }
      CHECK((refused != 0) == (kind == EvictionKind::kAdaptive));
    }
  }
}

}  // namespace pegaflow::engine
