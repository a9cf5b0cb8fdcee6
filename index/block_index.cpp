#include "index/block_index.h"

#include <algorithm>

#include "base/assert.h"
#include "index/match.h"
#include "index/sweeper.h"
#include "index/tables.h"

namespace pegaflow::index {
namespace {

// Blocks of the start of a prompt stay for three passes of the hand of the clock: all longer chains
// of its conversation need them.
constexpr std::uint32_t kRootCredit = CellWord::kMostCredit;
constexpr std::size_t kRootBlocks = 64;
// Cache lines are requested so many keys ahead: the table's first, then the cell's.
constexpr std::size_t kAheadTable = 16;
constexpr std::size_t kAheadCell = 8;
constexpr std::size_t kSetsPerHolder = 8;
constexpr std::size_t kSetOverhead = 64;

Result<void> check_options(const BlockIndex::Options& options) {
  if (options.max_blocks < 64 || options.max_blocks > std::size_t{1} << 28U) {
    return fail(Errc::kInvalidArgument, "the index: {} blocks are not 64 to 2^28",
                options.max_blocks);
  }
  if (options.max_holders < 1 || options.max_holders > 4096) {
    return fail(Errc::kInvalidArgument, "the index: {} holders are not 1 to 4096",
                options.max_holders);
  }
  const std::size_t row_bytes = options.max_holders / 2 + kSetOverhead;
  const std::size_t fewest = options.max_holders * kSetsPerHolder * row_bytes;
  if (options.set_bytes < fewest) {
    return fail(Errc::kInvalidArgument,
                "the index: sets of {} holders need at least {} bytes, not {}", options.max_holders,
                fewest, options.set_bytes);
  }
  return {};
}

/// The changes of sets in one call: neighbouring blocks have mostly the same set, so the last
/// change is remembered. It holds its two sets, whose numbers would otherwise be used again.
class Changes {
 public:
  explicit Changes(HolderSets& sets) : sets_(sets) {}
  Changes(const Changes&) = delete;
  Changes& operator=(const Changes&) = delete;
  ~Changes() {
    sets_.unpin(from_);
    sets_.unpin(to_);
  }

  template <typename Change>
  SetId of(SetId from, const Change& change) {
    if (from == from_ && is_known_) return to_;
    const SetId to = change(from);
    sets_.pin(to);
    sets_.pin(from);
    sets_.unpin(from_);
    sets_.unpin(to_);
    from_ = from;
    to_ = to;
    is_known_ = true;
    return to;
  }

 private:
  HolderSets& sets_;
  SetId from_ = HolderSets::kEmpty;
  SetId to_ = HolderSets::kEmpty;
  bool is_known_ = false;
};

}  // namespace

struct BlockIndex::State {
  State(const Options& options, Cells cells, Places places)
      : tables(options.max_holders, options.set_bytes, std::move(cells), std::move(places)),
        sweeper(tables, options.max_blocks) {}

  Tables tables;
  Sweeper sweeper;
  Matcher matcher;
  std::uint64_t sets_refused = 0;
  std::uint64_t erased_unknown = 0;

  /// Rows of sets have room for all holders from now on.
  void widen() {
    tables.sets.widen();
    matcher.widen(tables.sets.row_words());
  }

  /// One call for one holder, whose bit is `bit`.
  struct Call {
    HolderId holder;
    std::uint32_t bit;
    Changes& changes;
    /// The cell behind that of the key before, where this key is if another holder stored the same
    /// blocks.
    Place expected = 0;
  };
  void store(Call& call, Key key, std::uint32_t credit);
  void add_holder(Call& call, Place place);
  void erase(Call& call, Key key);
  // Inlined, or g++ drops the calls: see Places::prefetch().
  [[gnu::always_inline]] void prefetch_first(std::span<const Key> keys) const {
    for (std::size_t i = 0; i < std::min(keys.size(), kAheadTable); ++i) {
      tables.places.prefetch(keys[i]);
    }
  }
  [[gnu::always_inline]] void prefetch(std::span<const Key> keys, std::size_t i) const {
    if (i + kAheadTable < keys.size()) tables.places.prefetch(keys[i + kAheadTable]);
    if (i + kAheadCell >= keys.size()) return;
    if (const Place place = tables.places.guess(keys[i + kAheadCell]); place != 0) {
      __builtin_prefetch(tables.cells.keys() + place);
      __builtin_prefetch(tables.cells.words() + place);
    }
  }
};

Result<std::unique_ptr<BlockIndex>> BlockIndex::create(const Options& options) {
  PEGA_TRY(check_options(options));
  PEGA_TRY_LET(Cells cells, Cells::create(options.max_blocks));
  PEGA_TRY_LET(Places places, Places::create(options.max_blocks, cells.last_place()));
  auto state = std::make_unique<State>(options, std::move(cells), std::move(places));
  state->widen();
  return std::unique_ptr<BlockIndex>(new BlockIndex(std::move(state)));
}

BlockIndex::BlockIndex(std::unique_ptr<State> state) : state_(std::move(state)) {}
BlockIndex::~BlockIndex() = default;

Result<HolderId> BlockIndex::add_engine() {
  auto holder = state_->tables.holders.add(false);
  state_->widen();
  return holder;
}

Result<HolderId> BlockIndex::add_node() {
  auto holder = state_->tables.holders.add(true);
  state_->widen();
  return holder;
}

void BlockIndex::attach(HolderId engine, HolderId node) {
  Holders& holders = state_->tables.holders;
  PEGA_ASSERT(holders.is_holder(engine) && !holders.is_node(engine), "{} is no engine", engine);
  PEGA_ASSERT(holders.is_holder(node) && holders.is_node(node), "{} is no node", node);
  holders.attach(engine, node);
}

void BlockIndex::detach(HolderId engine) {
  PEGA_ASSERT(state_->tables.holders.is_holder(engine), "{} is no holder", engine);
  state_->tables.holders.detach(engine);
}

void BlockIndex::remove(HolderId holder) {
  PEGA_ASSERT(state_->tables.holders.is_holder(holder), "{} is no holder", holder);
  state_->sweeper.add_dead(state_->tables.holders.remove(holder));
}

void BlockIndex::clear(HolderId holder) {
  Holders& holders = state_->tables.holders;
  PEGA_ASSERT(holders.is_holder(holder), "{} is no holder", holder);
  if (holders.blocks(holder) == 0) return;
  if (!holders.has_free_bit()) state_->sweeper.finish();
  state_->sweeper.add_dead(holders.renew_bit(holder));
  state_->widen();
}

void BlockIndex::store(HolderId holder, std::span<const Key> keys, bool at_root) {
  PEGA_ASSERT(state_->tables.holders.is_holder(holder), "{} is no holder", holder);
  Changes changes(state_->tables.sets);
  State::Call call{holder, state_->tables.holders.bit_of(holder), changes};
  state_->prefetch_first(keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    state_->prefetch(keys, i);
    state_->store(call, keys[i], at_root && i < kRootBlocks ? kRootCredit : 0);
  }
}

void BlockIndex::erase(HolderId holder, std::span<const Key> keys) {
  PEGA_ASSERT(state_->tables.holders.is_holder(holder), "{} is no holder", holder);
  Changes changes(state_->tables.sets);
  State::Call call{holder, state_->tables.holders.bit_of(holder), changes};
  state_->prefetch_first(keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    state_->prefetch(keys, i);
    state_->erase(call, keys[i]);
  }
}

void BlockIndex::State::store(Call& call, Key key, std::uint32_t credit) {
  const Cells& cells = tables.cells;
  const Place expected = call.expected;
  const bool as_expected = expected != 0 && expected <= cells.last_place() &&
                           cells.keys()[expected] == key &&
                           cells.words()[expected].set() != HolderSets::kEmpty;
  const Place place = as_expected ? expected : tables.find(key);
  if (place != 0) {
    call.expected = place + 1;
    return add_holder(call, place);
  }
  call.expected = 0;
  const SetId set = call.changes.of(
      HolderSets::kEmpty, [&](SetId former) { return tables.sets.with(former, call.bit); });
  if (set == HolderSets::kRefused) {
    ++sets_refused;
    return;
  }
  sweeper.make_room();
  tables.add(key, set, credit);
  ++tables.holders.blocks(call.holder);
}

void BlockIndex::State::add_holder(Call& call, Place place) {
  const CellWord word = tables.cells.words()[place];
  if (word.credit() < CellWord::kMostCredit) {
    tables.cells.word(place) = CellWord::of(word.set(), word.credit() + 1);
  }
  if (tables.sets.has(word.set(), call.bit)) return;
  const SetId set =
      call.changes.of(word.set(), [&](SetId former) { return tables.sets.with(former, call.bit); });
  if (set == HolderSets::kRefused) {
    ++sets_refused;
    return;
  }
  tables.change_set(place, set);
  ++tables.holders.blocks(call.holder);
}

void BlockIndex::State::erase(Call& call, Key key) {
  const Place place = tables.find(key);
  if (place == 0 || !tables.sets.has(tables.cells.words()[place].set(), call.bit)) {
    ++erased_unknown;
    return;
  }
  const SetId set = call.changes.of(tables.cells.words()[place].set(), [&](SetId former) {
    return tables.sets.without(former, call.bit);
  });
  if (set == HolderSets::kRefused) {
    // The other holders are a set for which there is no memory: they are forgotten as well.
    ++sets_refused;
    return tables.forget(place);
  }
  --tables.holders.blocks(call.holder);
  tables.change_set(place, set);
}

bool BlockIndex::sweep(std::size_t max_cells) { return state_->sweeper.sweep(max_cells); }

void BlockIndex::match(std::span<const Key> chain, Match& out) const {
  state_->matcher.match(state_->tables, chain, out);
}

bool BlockIndex::holds(HolderId holder, Key key) const {
  const Tables& tables = state_->tables;
  if (!tables.holders.is_holder(holder)) return false;
  const Place place = tables.find(key);
  return place != 0 &&
         tables.sets.has(tables.cells.words()[place].set(), tables.holders.bit_of(holder));
}

std::size_t BlockIndex::list(HolderId holder, std::size_t cell, std::size_t max_cells,
                             std::vector<Key>& out) const {
  const Tables& tables = state_->tables;
  if (!tables.holders.is_holder(holder)) return 0;
  const std::uint32_t bit = tables.holders.bit_of(holder);
  const std::size_t end = std::min(std::size_t{tables.cells.last_place()} + 1, cell + max_cells);
  // Neighbors have mostly the same set.
  SetId former = HolderSets::kEmpty;
  bool has_former = false;
  for (std::size_t at = std::max<std::size_t>(cell, 1); at < end; ++at) {
    const SetId set = tables.cells.words()[at].set();
    if (set == HolderSets::kEmpty) continue;
    if (set != former) {
      former = set;
      has_former = tables.sets.has(set, bit);
    }
    if (has_former) out.push_back(tables.cells.keys()[at]);
  }
  return end > tables.cells.last_place() ? 0 : end;
}

std::uint64_t BlockIndex::blocks_of(HolderId holder) const {
  return state_->tables.holders.blocks(holder);
}

BlockIndex::Stats BlockIndex::stats() const {
  const Tables& tables = state_->tables;
  return {.blocks = tables.cells.live(),
          .sets = tables.sets.count(),
          .holders = tables.holders.count(),
          .evicted = state_->sweeper.evicted(),
          .sets_refused = state_->sets_refused + state_->sweeper.refused(),
          .erased_unknown = state_->erased_unknown,
          .moved = state_->sweeper.moved(),
          .swept = state_->sweeper.swept(),
          .block_bytes = tables.cells.bytes() + tables.places.bytes(),
          .set_bytes = tables.sets.bytes()};
}

}  // namespace pegaflow::index
