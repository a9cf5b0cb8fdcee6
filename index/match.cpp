#include "index/match.h"

#include <algorithm>

#include "index/same_run.h"
#include "index/tables.h"

namespace pegaflow::index {
void Matcher::match(const Tables& tables, std::span<const Key> chain, Match& out) {
  std::ranges::fill(out.own, 0U);
  std::ranges::fill(out.near, 0U);
  out.longest = 0;
  const Cells& cells = tables.cells;
  SetId set = HolderSets::kEmpty;
  Place place = 0;
  std::uint32_t length = 0;
  std::uint32_t run = 0;
  while (length < chain.size()) {
    // The cell behind the last one, if the chain goes on there; else where the table says.
    const bool goes_on = place != 0 && place <= cells.last_place() &&
                         cells.keys()[place] == chain[length] && cells.words()[place].set() != 0;
    if (!goes_on) {
      place = tables.find(chain[length]);
      if (place == 0) break;
      // Runs of one chain are often equally long: requests the line that finds the next one.
      if (length + run < chain.size()) tables.places.prefetch(chain[length + run]);
      run = 0;
    }
    const SetId here = cells.words()[place].set();
    if (here != set) {
      if (!tables.sets.has_live(here)) break;
      if (set == HolderSets::kEmpty) {
        begin(tables, here);
      } else {
        narrow(tables, here, length, out);
      }
      set = here;
    }
    const std::uint32_t same = same_run(cells, place, chain.subspan(length), set);
    length += same;
    place += same;
    run += same;
  }
  out.longest = length;
  if (set != HolderSets::kEmpty) end(tables, length, out);
}

void Matcher::begin(const Tables& tables, SetId set) {
  const ConstRow own = tables.sets.bits(set);
  const ConstRow near = tables.sets.local(set);
  const ConstRow live = tables.holders.live_bits();
  for (std::size_t i = 0; i < own.size(); ++i) own_[i] = own[i] & live[i];
  std::ranges::copy(near, near_.begin());
}

void Matcher::narrow(const Tables& tables, SetId set, std::uint32_t length, Match& out) {
  const ConstRow own = tables.sets.bits(set);
  const ConstRow near = tables.sets.local(set);
  for (std::size_t i = 0; i < own.size(); ++i) {
    const auto first = static_cast<std::uint32_t>(i * 64);
    each_bit(own_[i] & ~own[i], first,
             [&](std::uint32_t bit) { out.own[tables.holders.holder_of(bit)] = length; });
    own_[i] &= own[i];
    each_bit(near_[i] & ~near[i], first, [&](std::uint32_t engine) { out.near[engine] = length; });
    near_[i] &= near[i];
  }
}

void Matcher::end(const Tables& tables, std::uint32_t length, Match& out) const {
  each_bit(own_, [&](std::uint32_t bit) { out.own[tables.holders.holder_of(bit)] = length; });
  each_bit(near_, [&](std::uint32_t engine) { out.near[engine] = length; });
}

}  // namespace pegaflow::index
