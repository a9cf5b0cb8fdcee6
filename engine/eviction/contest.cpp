#include "engine/eviction/contest.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/tables/store_order.h"

namespace pegaflow::engine {

namespace {

/// Less is no lead.
constexpr double kLead = 0.005;
constexpr double kHalfLife = 8192;  ///< Uses of sampled names.
constexpr double kMostWorth = 1e100;

/// Whether a list has as many rows as it counts, each below `limit`, linked in both directions, and
/// `is_right` accepts them.
template <typename List, typename Rows, typename IsRight>
bool is_whole_list(const List& list, const Rows& rows, std::uint32_t limit, IsRight&& is_right) {
  std::uint32_t previous = List::kNone;
  std::uint32_t row = list.front();
  for (std::uint32_t seen = 0; seen < list.size(); ++seen) {
    if (row >= limit || List::previous(rows, row) != previous || !is_right(row)) return false;
    previous = row;
    row = List::next(rows, row);
  }
  return row == List::kNone && list.back() == previous;
}

}  // namespace

const std::array<EvictionRule, Contest::kRules>& Contest::rules() {
  static const std::array<EvictionRule, kRules> all = {{{0, 0},
                                                        {0, 1},
                                                        {0, 1.5},
                                                        {0, 2},
                                                        {0, 4},
                                                        {0, 8},
                                                        {0.25, 0},
                                                        {0, 2.5},
                                                        {1, 0},
                                                        {1, 1.5},
                                                        {1, 2},
                                                        {1, 4},
                                                        {1, 8},
                                                        {1, 16},
                                                        {0.5, 0},
                                                        {2, 0}}};
  return all;
}

Result<Contest> Contest::create(std::uint32_t row_count, PolicyMemory memory) {
  PEGA_TRY_LET(auto state, memory.take<State>(1));
  PEGA_TRY_LET(auto entries, memory.take<Entry>(kEntries));
  PEGA_TRY_LET(auto links, memory.take<Link>(std::size_t{kRules} * kEntries));
  PEGA_TRY_LET(auto buckets, memory.take<std::uint32_t>(kEntries));
  return Contest(std::move(state), std::move(entries), std::move(links), std::move(buckets),
                 row_count);
}

Contest::Contest(ZeroPages<State> state, ZeroPages<Entry> entries, ZeroPages<Link> links,
                 ZeroPages<std::uint32_t> buckets, std::uint32_t row_count)
    : state_(std::move(state)),
      entries_(std::move(entries)),
      links_(std::move(links)),
      buckets_(std::move(buckets)),
      one_in_(std::max(1U, row_count / kRows + (row_count % kRows == 0 ? 0 : 1))) {
  if (state_[0].is_begun == 0 || !is_whole()) begin(row_count);
}

void Contest::begin(std::uint32_t row_count) noexcept {
  state_[0] = {};
  for (std::uint32_t i = 0; i < kEntries; ++i) buckets_[i] = 0;
  state_[0].best = kFirst;
  state_[0].hit = 1;
  resize(row_count);
  order_stores();
  state_[0].is_begun = 1;
}

void Contest::resize(std::uint32_t rows) noexcept {
  state_[0].rows = std::max(1U, rows);
  state_[0].rows_of_cache = std::max(1U, rows / one_in_);
}

std::uint32_t Contest::find(std::uint32_t hash) noexcept {
  std::uint32_t entry = bucket(hash) - 1;
  while (entry != kNone && entries_[entry].hash != hash) {
    entry = entries_[entry].in_bucket_plus_1 - 1;
  }
  return entry;
}

std::uint32_t Contest::add(std::uint32_t hash) noexcept {
  std::uint32_t entry = state_[0].made;
  if (state_[0].made < kEntries) {
    ++state_[0].made;
  } else {
    entry = state_[0].order.front();
    forget(entry);
  }
  std::uint32_t& first = bucket(hash);
  entries_[entry] = {.hash = hash,
                     .last_use = 0,
                     .uses = 0,
                     .caches = 0,
                     .group = 0,
                     .in_bucket_plus_1 = first,
                     .order = {}};
  first = entry + 1;
  state_[0].order.push_back(entries_, entry);
  return entry;
}

void Contest::forget(std::uint32_t entry) noexcept {
  for (std::size_t rule = 0; rule < kRules; ++rule) {
    if ((entries_[entry].caches >> rule & 1U) != 0) leave(rule, entry);
  }
  state_[0].order.erase(entries_, entry);
  std::uint32_t* at = &bucket(entries_[entry].hash);
  while (*at != entry + 1) at = &entries_[*at - 1].in_bucket_plus_1;
  *at = entries_[entry].in_bucket_plus_1;
}

void Contest::leave(std::size_t rule, std::uint32_t entry) noexcept {
  std::span<Link> of_rule = links(rule);
  state_[0].caches[rule].lists[entries_[entry].uses].erase(of_rule, entry);
  --state_[0].caches[rule].size;
  entries_[entry].caches &= static_cast<std::uint16_t>(~(1U << rule));
}

bool Contest::make_room(std::size_t rule, const Member& wanted, std::uint32_t held,
                        std::uint32_t now) noexcept {
  const EvictionRule& by = rules()[rule];
  Cache& cache = state_[0].caches[rule];
  while (cache.size + held >= state_[0].rows_of_cache) {
    std::uint32_t oldest = kNone;
    double most = 0;
    for (std::uint32_t n = 1; n <= kMaxUses; ++n) {
      const std::uint32_t entry = cache.lists[n].front();
      if (entry == kNone) continue;
      const double age = (now - entries_[entry].last_use + 1.0) * by.weight(n);
      if (age > most) {
        most = age;
        oldest = entry;
      }
    }
    if (oldest == kNone) return false;
    const std::uint32_t uses = std::min<std::uint32_t>(entries_[wanted.entry].uses + 1U, kMaxUses);
    if (by.refuses(uses, most, state_[0].rows)) return false;
    leave(rule, oldest);
  }
  return true;
}

void Contest::gather(std::span<const std::uint32_t> hashes) {
  members_.clear();
  ++state_[0].group;
  for (const std::uint32_t hash : hashes) {
    std::uint32_t entry = find(hash);
    if (entry == kNone) {
      entry = add(hash);
    } else {
      if (entries_[entry].group == state_[0].group) continue;
      state_[0].order.erase(entries_, entry);
      state_[0].order.push_back(entries_, entry);
    }
    entries_[entry].group = state_[0].group;
    members_.push_back({.entry = entry, .in = entries_[entry].caches});
  }
}

void Contest::play(std::size_t rule, std::uint32_t now) {
  const auto bit = static_cast<std::uint16_t>(1U << rule);
  std::uint32_t held = 0;
  for (const Member& each : members_) {
    if ((each.in & bit) == 0) continue;
    state_[0].hits[rule] += state_[0].hit;
    leave(rule, each.entry);
    ++held;
  }
  for (Member& each : members_) {
    if ((each.in & bit) != 0) continue;
    if (!make_room(rule, each, held, now)) continue;
    each.in |= bit;
    ++held;
  }
}

void Contest::use(std::span<const std::uint32_t> hashes, std::uint32_t now) {
  state_[0].is_changing = 1;
  order_stores();
  change(hashes, now);
  order_stores();
  state_[0].is_changing = 0;
}

void Contest::change(std::span<const std::uint32_t> hashes, std::uint32_t now) {
  static const double fade = std::exp2(1 / kHalfLife);
  state_[0].hit *= std::pow(fade, hashes.size());
  if (state_[0].hit > kMostWorth) {
    for (double& hits : state_[0].hits) hits /= state_[0].hit;
    state_[0].hit = 1;
  }
  gather(hashes);
  for (std::size_t rule = 0; rule < kRules; ++rule) play(rule, now);
  // The end of a prompt leaves before its start.
  for (auto each = members_.rbegin(); each != members_.rend(); ++each) {
    Entry& entry = entries_[each->entry];
    entry.uses = static_cast<std::uint16_t>(std::min<std::uint32_t>(entry.uses + 1U, kMaxUses));
    entry.last_use = now;
    entry.caches = each->in;
    for (std::size_t rule = 0; rule < kRules; ++rule) {
      if ((each->in >> rule & 1U) == 0) continue;
      std::span<Link> of_rule = links(rule);
      state_[0].caches[rule].lists[entry.uses].push_back(of_rule, each->entry);
      ++state_[0].caches[rule].size;
    }
  }
}

bool Contest::is_whole_cache(std::size_t rule) const {
  struct Rows {
    const ZeroPages<Link>& all;
    std::size_t first;
    const Link& operator[](std::uint32_t row) const { return all[first + row]; }
  };
  const State& state = state_[0];
  const Rows rows{links_, rule * kEntries};
  std::uint32_t size = 0;
  for (std::uint32_t uses = 0; uses <= kMaxUses; ++uses) {
    const List& list = state.caches[rule].lists[uses];
    size += list.size();
    const auto is_right = [&](std::uint32_t row) {
      return entries_[row].uses == uses && (entries_[row].caches >> rule & 1U) != 0;
    };
    if (uses == 0 && !list.is_empty()) return false;
    if (!is_whole_list(list, rows, state.made, is_right)) return false;
  }
  std::uint32_t in_it = 0;
  for (std::uint32_t entry = 0; entry < state.made; ++entry) {
    in_it += entries_[entry].caches >> rule & 1U;
  }
  return size == state.caches[rule].size && size == in_it;
}

bool Contest::is_whole() const {
  const State& state = state_[0];
  if (state.is_changing != 0 || state.made > kEntries || state.best >= kRules) return false;
  if (state.rows == 0 || state.rows_of_cache == 0) return false;
  if (!(state.hit >= 1 && std::isfinite(state.hit))) return false;
  const auto is_sum = [](double hits) { return hits >= 0 && std::isfinite(hits); };
  if (!std::all_of(state.hits.begin(), state.hits.end(), is_sum)) return false;
  const auto is_any = [](std::uint32_t) { return true; };
  if (state.order.size() != state.made) return false;
  if (!is_whole_list(state.order, entries_, state.made, is_any)) return false;
  std::uint32_t in_buckets = 0;
  for (std::uint32_t i = 0; i < kEntries; ++i) {
    for (std::uint32_t next = buckets_[i]; next != 0; next = entries_[next - 1].in_bucket_plus_1) {
      if (next > state.made || ++in_buckets > state.made) return false;
      if (bucket_of(entries_[next - 1].hash) != i) return false;
    }
  }
  if (in_buckets != state.made) return false;
  for (std::size_t rule = 0; rule < kRules; ++rule) {
    if (!is_whole_cache(rule)) return false;
  }
  return true;
}

double Contest::lead(std::size_t rule, std::size_t over) const noexcept {
  return state_[0].hits[over] > 0   ? state_[0].hits[rule] / state_[0].hits[over] - 1
         : state_[0].hits[rule] > 0 ? 1
                                    : 0;
}

const EvictionRule& Contest::best(bool may_refuse) noexcept {
  const auto allowed = [&](std::size_t rule) { return may_refuse || !rules()[rule].may_refuse(); };
  if (!allowed(state_[0].best)) state_[0].best = kFirst;
  std::uint32_t most = state_[0].best;
  for (std::uint32_t rule = 0; rule < kRules; ++rule) {
    if (allowed(rule) && state_[0].hits[rule] > state_[0].hits[most]) most = rule;
  }
  if (most != state_[0].best && lead(most, state_[0].best) > kLead) state_[0].best = most;
  return rules()[state_[0].best];
}

}  // namespace pegaflow::engine
