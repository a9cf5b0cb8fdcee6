// The index beside a naive model: a map from keys to sets of holders.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

#include <doctest/doctest.h>

#include "index/block_index.h"
#include "tests/support/seed.h"

namespace pegaflow::index {
namespace {

struct Shape {
  std::size_t max_blocks;
  std::uint32_t holders;
  std::size_t chains;
  std::size_t chain_blocks;
  bool is_full;  ///< More different blocks than it may have: it forgets, and never invents.
};

std::size_t steps_of_run() {
  const char* const steps = std::getenv("PEGA_INDEX_STEPS");
  return steps == nullptr ? 60'000 : std::strtoull(steps, nullptr, 10);
}

/// Random calls, each applied to the index and to the model.
class Comparison {
 public:
  Comparison(const Shape& shape, std::uint64_t seed)
      : shape_(shape), random_(seed), match_(shape.holders) {
    auto index = BlockIndex::create({.max_blocks = shape.max_blocks, .max_holders = shape.holders});
    REQUIRE(index);
    index_ = std::move(*index);
    chains_.resize(shape.chains);
    for (std::vector<Key>& chain : chains_) {
      // Chains share beginnings, as prompts do.
      const std::vector<Key>& other = chains_[draw(chains_.size())];
      chain.assign(other.begin(), other.begin() + static_cast<long>(draw(other.size() + 1)));
      while (chain.size() < shape.chain_blocks) chain.push_back(random_());
    }
    for (std::uint32_t i = 0; i < shape.holders - 2; ++i) add_holder();
  }

  void step() {
    const std::size_t choice = draw(1000);
    if (choice < 500) return store();
    if (choice < 800) return erase();
    if (choice < 975) return match();
    if (choice < 980) return clear();
    if (choice < 984) return replace_holder();
    if (choice < 988) return attach();
    static_cast<void>(index_->sweep(draw(2000)));
  }

  void check_all() {
    while (index_->sweep(100'000)) {
    }
    std::size_t claims = 0;
    for (const auto& [key, holders] : model_) {
      for (const HolderId holder : ids_) {
        const bool has = index_->holds(holder, key);
        if (has || !shape_.is_full) REQUIRE(has == holders.contains(holder));
        claims += has ? 1 : 0;
      }
    }
    std::size_t counted = 0;
    for (const HolderId holder : ids_) counted += index_->blocks_of(holder);
    CHECK(claims == counted);
    if (!shape_.is_full) CHECK(index_->stats().evicted == 0);
    CHECK(index_->stats().blocks <= shape_.max_blocks);
  }

  [[nodiscard]] BlockIndex::Stats stats() const { return index_->stats(); }

 private:
  std::size_t draw(std::size_t below) { return below == 0 ? 0 : random_() % below; }
  HolderId any_holder() { return ids_[draw(ids_.size())]; }

  std::span<const Key> any_part() {
    const std::vector<Key>& chain = chains_[draw(chains_.size())];
    const std::size_t from = draw(chain.size());
    const std::size_t most = draw(4) == 0 ? chain.size() : 40;
    return std::span(chain).subspan(from, draw(std::min(most, chain.size() - from)) + 1);
  }

  void add_holder() {
    const bool is_node = draw(4) == 0;
    const auto holder = is_node ? index_->add_node() : index_->add_engine();
    REQUIRE(holder);
    ids_.push_back(*holder);
    node_of_.erase(*holder);
    is_node_[*holder] = is_node;
  }

  void store() {
    const HolderId holder = any_holder();
    const auto keys = any_part();
    index_->store(holder, keys, draw(3) == 0);
    for (const Key key : keys) model_[key].insert(holder);
  }

  void erase() {
    const HolderId holder = any_holder();
    const auto keys = any_part();
    index_->erase(holder, keys);
    for (const Key key : keys) model_[key].erase(holder);
  }

  void forget(HolderId holder) {
    for (auto& [key, holders] : model_) holders.erase(holder);
  }

  void clear() {
    const HolderId holder = any_holder();
    index_->clear(holder);
    forget(holder);
  }

  void replace_holder() {
    const std::size_t at = draw(ids_.size());
    const HolderId holder = ids_[at];
    index_->remove(holder);
    forget(holder);
    ids_.erase(ids_.begin() + static_cast<long>(at));
    std::erase_if(node_of_, [holder](const auto& entry) {
      return entry.first == holder || entry.second == holder;
    });
    while (index_->sweep(50'000)) {
    }
    add_holder();
  }

  void attach() {
    const HolderId engine = any_holder();
    const HolderId node = any_holder();
    if (is_node_[engine] || !is_node_[node]) return;
    if (draw(4) == 0) {
      index_->detach(engine);
      node_of_.erase(engine);
    } else {
      index_->attach(engine, node);
      node_of_[engine] = node;
    }
  }

  bool model_has(HolderId holder, Key key) {
    const auto found = model_.find(key);
    return found != model_.end() && found->second.contains(holder);
  }

  bool model_has_any(Key key) {
    const auto found = model_.find(key);
    return found != model_.end() && !found->second.empty();
  }

  void match() {
    std::vector<Key> chain = chains_[draw(chains_.size())];
    if (draw(4) == 0 && !chain.empty()) chain[draw(chain.size())] = random_();
    index_->match(chain, match_);
    for (const HolderId holder : ids_) {
      const auto node = node_of_.find(holder);
      std::size_t own = 0;
      while (own < chain.size() && model_has(holder, chain[own])) ++own;
      std::size_t local = 0;
      while (local < chain.size() &&
             (model_has(holder, chain[local]) ||
              (node != node_of_.end() && model_has(node->second, chain[local])))) {
        ++local;
      }
      if (is_node_[holder]) local = 0;
      if (shape_.is_full) {
        REQUIRE(match_.own[holder] <= own);
        REQUIRE(match_.near[holder] <= local);
      } else {
        REQUIRE(match_.own[holder] == own);
        REQUIRE(match_.near[holder] == local);
      }
    }
    std::size_t longest = 0;
    while (longest < chain.size() && model_has_any(chain[longest])) ++longest;
    if (shape_.is_full) {
      REQUIRE(match_.longest <= longest);
    } else {
      REQUIRE(match_.longest == longest);
    }
  }

  Shape shape_;
  std::mt19937_64 random_;
  std::unique_ptr<BlockIndex> index_;
  Match match_;
  std::vector<std::vector<Key>> chains_;
  std::vector<HolderId> ids_;
  std::unordered_map<HolderId, HolderId> node_of_;
  std::unordered_map<HolderId, bool> is_node_;
  std::unordered_map<Key, std::set<HolderId>> model_;
};

void run(const Shape& shape) {
  const std::uint64_t seed = testing::seed();
  CAPTURE(seed);
  Comparison comparison(shape, seed);
  const std::size_t steps = steps_of_run();
  for (std::size_t i = 0; i < steps; ++i) {
    CAPTURE(i);
    comparison.step();
    if (i % (steps / 4 + 1) == 0) comparison.check_all();
  }
  comparison.check_all();
}

TEST_SUITE("BlockIndex beside a model") {
  TEST_CASE("ten holders, everything fits") {
    run({.max_blocks = 8192, .holders = 12, .chains = 60, .chain_blocks = 120, .is_full = false});
  }
  TEST_CASE("more than 64 holders") {
    run({.max_blocks = 8192, .holders = 100, .chains = 20, .chain_blocks = 60, .is_full = false});
  }
  TEST_CASE("more than 256 holders") {
    run({.max_blocks = 8192, .holders = 300, .chains = 8, .chain_blocks = 40, .is_full = false});
  }
  TEST_CASE("a full index never claims what is not there") {
    run({.max_blocks = 1024, .holders = 20, .chains = 60, .chain_blocks = 120, .is_full = true});
  }
}

}  // namespace
}  // namespace pegaflow::index
