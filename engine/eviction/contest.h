#pragma once
/// \file
/// A contest of eviction rules: small caches that show which rule finds the most blocks.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "engine/eviction/policy_memory.h"
#include "engine/eviction/rule.h"
#include "engine/tables/index_list.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// Keeps a small cache for each rule, on a sample of the names: after Waldspurger et al., "Cache
/// Modeling and Optimization using Miniature Simulations" (ATC 2017). One name in n is sampled, by
/// its hash, and each cache has one n-th of the pool's rows: about 256, or all in a smaller pool.
/// The hits of a rule there stand for its hits in the pool.
///
/// The caches contain names only. 4,096 sampled names are remembered, the ones used last: 700 KiB,
/// of which a pool that never has so many names touches less. A use of a sampled name takes about a
/// microsecond, that of another name nothing. Thread-bound.
class Contest {
 public:
  static constexpr std::size_t kRules = 16;
  /// The first one is LRU. Until there is evidence, and where all saves are accepted: nearly LRU.
  static const std::array<EvictionRule, kRules>& rules();

  /// For a pool of so many rows. Continues what a former process left in `memory`, unless that one
  /// died within use(): then it begins anew. Errors: kOutOfCapacity.
  static Result<Contest> create(std::uint32_t row_count, PolicyMemory memory = {});

  [[nodiscard]] bool samples(std::uint32_t hash) const noexcept {
    const std::uint64_t spread = static_cast<std::uint32_t>(hash * 0xC2B2AE35U);
    return (spread * one_in_) >> 32U == 0;
  }
  /// Sampled names of one claim or save were requested, at most kMostOfGroup, the start of the
  /// prompt first. `now` counts the uses of all blocks, and wraps around.
  void use(std::span<const std::uint32_t> hashes, std::uint32_t now);
  static constexpr std::size_t kMostOfGroup = 256;
  /// The pool has so many rows now.
  void resize(std::uint32_t rows) noexcept;

  /// The rule to follow: the former one, unless another one has found 0.5 % more; at first one that
  /// is nearly LRU.
  [[nodiscard]] const EvictionRule& best(bool may_refuse) noexcept;
  /// The rule that best() returned last, perhaps in a former process.
  [[nodiscard]] const EvictionRule& followed() const noexcept { return rules()[state_[0].best]; }
  /// The hits of each rule, the last 8,192 uses of sampled names counting most.
  [[nodiscard]] std::span<const double, kRules> hits() const noexcept { return state_[0].hits; }
  /// Whether all lists and chains are as use() leaves them. O(entries).
  [[nodiscard]] bool is_whole() const;
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return entries_.size_bytes() + links_.size_bytes() + buckets_.size_bytes();
  }

 private:
  static constexpr std::uint32_t kRows = 256;
  static constexpr std::uint32_t kEntries = 16 * kRows;
  static constexpr std::uint32_t kMaxUses = EvictionRule::kMaxUses;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr std::uint32_t kFirst = 6;
  struct Entry {
    std::uint32_t hash;
    std::uint32_t last_use;
    std::uint16_t uses;
    std::uint16_t caches;            ///< Bit i: it is in the cache of rule i.
    std::uint32_t group;             ///< The last call of use() that had it.
    std::uint32_t in_bucket_plus_1;  ///< The next entry in its bucket.
    IndexLink order;
  };
  struct Link {
    IndexLink place;
  };
  using List = IndexList<&Link::place>;
  struct Cache {
    std::array<List, kMaxUses + 1> lists;  ///< By uses; oldest first.
    std::uint32_t size = 0;
  };
  /// A name of the present call of use().
  struct Member {
    std::uint32_t entry;
    std::uint16_t in = 0;  ///< Bit i: it was in the cache of rule i, and then: it is to be.
  };

  /// All but the tables.
  struct State {
    std::uint32_t is_begun;          ///< 0: none of this is set.
    std::uint32_t is_changing;       ///< Within use().
    IndexList<&Entry::order> order;  ///< All entries, the one used longest ago in front.
    std::uint32_t made;              ///< Entries that were ever used.
    std::uint32_t group;
    std::uint32_t rows;
    std::uint32_t rows_of_cache;
    std::uint32_t best;
    double hit;  ///< The weight of a hit now; it grows, and so the others fade.
    std::array<Cache, kRules> caches;
    std::array<double, kRules> hits;
  };

  Contest(ZeroPages<State> state, ZeroPages<Entry> entries, ZeroPages<Link> links,
          ZeroPages<std::uint32_t> buckets, std::uint32_t row_count);
  void begin(std::uint32_t row_count) noexcept;
  [[nodiscard]] bool is_whole_cache(std::size_t rule) const;
  void change(std::span<const std::uint32_t> hashes, std::uint32_t now);
  [[nodiscard]] std::span<Link> links(std::size_t rule) noexcept {
    return {&links_[rule * kEntries], kEntries};
  }
  [[nodiscard]] static std::uint32_t bucket_of(std::uint32_t hash) noexcept {
    return static_cast<std::uint32_t>(hash * 0x9E3779B1U) / (~0U / kEntries + 1);
  }
  [[nodiscard]] std::uint32_t& bucket(std::uint32_t hash) noexcept {
    return buckets_[bucket_of(hash)];
  }
  [[nodiscard]] std::uint32_t find(std::uint32_t hash) noexcept;
  [[nodiscard]] std::uint32_t add(std::uint32_t hash) noexcept;
  void forget(std::uint32_t entry) noexcept;
  void leave(std::size_t rule, std::uint32_t entry) noexcept;
  void gather(std::span<const std::uint32_t> hashes);
  void play(std::size_t rule, std::uint32_t now);
  /// Makes room for one more beside `held`; returns false when the member is refused.
  bool make_room(std::size_t rule, const Member& wanted, std::uint32_t held,
                 std::uint32_t now) noexcept;
  [[nodiscard]] double lead(std::size_t rule, std::size_t over) const noexcept;

  ZeroPages<State> state_;  ///< One.
  ZeroPages<Entry> entries_;
  ZeroPages<Link> links_;             ///< kEntries for each rule.
  ZeroPages<std::uint32_t> buckets_;  ///< kEntries.
  std::vector<Member> members_;
  std::uint32_t one_in_;
};

}  // namespace pegaflow::engine
