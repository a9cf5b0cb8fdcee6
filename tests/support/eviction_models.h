#pragma once
/// \file
/// Models of every eviction policy, which find the next victim by a search through vectors.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/eviction/eviction.h"
#include "engine/eviction/ghosts.h"

namespace pegaflow::testing {

/// Returns the same as an EvictionPolicy that received the same calls. Thread-bound.
class EvictionModel {
 public:
  using Freed = engine::EvictionPolicy::Freed;

  /// A block under a number that is unique while the block exists.
  struct Item {
    std::uint32_t name = 0;
    std::uint32_t hash = 0;
    bool is_taken = false;
    std::uint32_t uses = 1;   ///< Each model gives it its own meaning.
    bool is_special = false;  ///< Protected, or in the main queue.
    std::uint64_t released = 0;
  };

  virtual ~EvictionModel() = default;
  virtual void seal(std::uint32_t name, std::uint32_t hash);
  virtual void take(std::uint32_t name);
  virtual void use_again(std::uint32_t name) { used(find(name)); }
  virtual void release(std::uint32_t name);
  virtual void free(std::uint32_t name, Freed why);
  /// A claim or a save begins. Returns by how much the others age, in uses.
  virtual std::uint32_t claim_begins() { return 0; }
  virtual std::uint32_t save_begins(bool /*may_refuse*/) { return 0; }
  virtual bool refuses(std::uint32_t /*hash*/) { return false; }
  /// The name of the next victim; EvictionPolicy::kNone when no item is evictable.
  virtual std::uint32_t victim() = 0;

  [[nodiscard]] Item& find(std::uint32_t name);
  [[nodiscard]] const std::vector<Item>& items() const { return items_; }

 protected:
  virtual void used(Item& item) = 0;
  virtual void freed(const Item& /*item*/, Freed /*why*/) {}
  /// The evictable item with the smallest `key`.
  template <typename Key>
  std::uint32_t least(Key&& key) {
    Item* best = nullptr;
    for (Item& item : items_) {
      if (!item.is_taken && (best == nullptr || key(item) < key(*best))) best = &item;
    }
    return best == nullptr ? engine::EvictionPolicy::kNone : best->name;
  }
  [[nodiscard]] std::uint64_t now() const { return now_; }
  void let_time_pass(std::uint64_t uses) { now_ += uses; }
  std::vector<Item> items_;

 private:
  std::uint64_t now_ = 0;
};

class LruModel final : public EvictionModel {
 public:
  std::uint32_t victim() override {
    return least([](const Item& item) { return item.released; });
  }

 private:
  void used(Item& /*item*/) override {}
};

class SlruModel final : public EvictionModel {
 public:
  void seal(std::uint32_t name, std::uint32_t hash) override;
  void release(std::uint32_t name) override;
  std::uint32_t victim() override;

 private:
  void used(Item& item) override { item.is_special = true; }
  void freed(const Item& item, Freed /*why*/) override { std::erase(order_, item.name); }
  void shrink();
  std::vector<std::uint32_t> order_;
};

/// The blocks evicted from the small queue, by their hashes.
class Ghosts {
 public:
  virtual ~Ghosts() = default;
  virtual void add(std::uint32_t hash) = 0;
  /// True if it was there; removes it.
  virtual bool take(std::uint32_t hash) = 0;
};

/// Removes all of them.
class AllGhosts final : public Ghosts {
 public:
  void add(std::uint32_t hash) override { hashes_.push_back(hash); }
  bool take(std::uint32_t hash) override { return std::erase(hashes_, hash) != 0; }

 private:
  std::vector<std::uint32_t> hashes_;
};

/// Remembers as many as a policy for that many rows.
class SomeGhosts final : public Ghosts {
 public:
  explicit SomeGhosts(std::uint32_t rows) : evicted_(engine::EvictedBlocks::create(rows).value()) {}
  void add(std::uint32_t hash) override { evicted_.add(hash, 1); }
  bool take(std::uint32_t hash) override { return evicted_.take(hash).has_value(); }

 private:
  engine::EvictedBlocks evicted_;
};

class S3FifoModel final : public EvictionModel {
 public:
  explicit S3FifoModel(std::unique_ptr<Ghosts> ghosts) : ghosts_(std::move(ghosts)) {}
  void seal(std::uint32_t name, std::uint32_t hash) override;
  std::uint32_t victim() override;

 private:
  void used(Item& item) override;
  void freed(const Item& item, Freed why) override;
  std::unique_ptr<Ghosts> ghosts_;
  std::vector<std::uint32_t> small_;
  std::vector<std::uint32_t> main_;
};

/// An adapter instead of a model, for a policy with adaptive parameters: it checks that another
/// policy receives the right calls.
class PolicyModel final : public EvictionModel {
 public:
  /// `rows` outlives it; item names are row numbers.
  PolicyModel(engine::EvictionKind kind, engine::BlockRows& rows, std::uint32_t row_count)
      : rows_(rows), policy_(engine::EvictionPolicy::create(kind, rows, row_count).value()) {}
  void seal(std::uint32_t name, std::uint32_t hash) override;
  void take(std::uint32_t name) override;
  void use_again(std::uint32_t name) override;
  void release(std::uint32_t name) override;
  void free(std::uint32_t name, Freed why) override;
  std::uint32_t claim_begins() override;
  std::uint32_t save_begins(bool may_refuse) override;
  bool refuses(std::uint32_t hash) override { return policy_->refuses(hash); }
  std::uint32_t victim() override { return policy_->victim(); }

 private:
  void used(Item& /*item*/) override {}
  engine::BlockRows& rows_;
  std::unique_ptr<engine::EvictionPolicy> policy_;
};

}  // namespace pegaflow::testing
