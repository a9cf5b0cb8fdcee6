#include "index/block_index.h"

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

  void store(HolderId holder, std::uint32_t bit, Key key, std::uint32_t credit, Place& expected);
  void add_holder(HolderId holder, std::uint32_t bit, Place place);
  void erase(HolderId holder, std::uint32_t bit, Key key);
  void prefetch(std::span<const Key> keys, std::size_t i) const;
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
  const std::uint32_t bit = state_->tables.holders.bit_of(holder);
  Place expected = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    state_->prefetch(keys, i);
    state_->store(holder, bit, keys[i], at_root && i < kRootBlocks ? kRootCredit : 0, expected);
  }
}

void BlockIndex::erase(HolderId holder, std::span<const Key> keys) {
  PEGA_ASSERT(state_->tables.holders.is_holder(holder), "{} is no holder", holder);
  const std::uint32_t bit = state_->tables.holders.bit_of(holder);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    state_->prefetch(keys, i);
    state_->erase(holder, bit, keys[i]);
  }
}

void BlockIndex::State::prefetch(std::span<const Key> keys, std::size_t i) const {
  if (i + kAheadTable < keys.size()) tables.places.prefetch(keys[i + kAheadTable]);
  if (i + kAheadCell >= keys.size()) return;
  if (const Place place = tables.places.guess(keys[i + kAheadCell]); place != 0) {
    __builtin_prefetch(tables.cells.keys() + place);
    __builtin_prefetch(tables.cells.words() + place);
  }
}

/// `expected`: the cell behind that of the key before, where this key is if another holder stored
/// the same blocks.
void BlockIndex::State::store(HolderId holder, std::uint32_t bit, Key key, std::uint32_t credit,
                              Place& expected) {
  Cells& cells = tables.cells;
  const bool as_expected = expected != 0 && expected <= cells.last_place() &&
                           cells.keys()[expected] == key &&
                           cells.words()[expected].set() != HolderSets::kEmpty;
  const Place place = as_expected ? expected : tables.find(key);
  if (place != 0) {
    expected = place + 1;
    return add_holder(holder, bit, place);
  }
  expected = 0;
  const SetId set = tables.sets.with(HolderSets::kEmpty, bit);
  if (set == HolderSets::kRefused) {
    ++sets_refused;
    return;
  }
  tables.sets.add_cell(set);  // Room is made by forgetting: the set must outlive that.
  sweeper.make_room();
  tables.add(key, set, credit);
  tables.sets.drop_cell(set);
  ++tables.holders.blocks(holder);
}

void BlockIndex::State::add_holder(HolderId holder, std::uint32_t bit, Place place) {
  Cells& cells = tables.cells;
  const CellWord word = cells.words()[place];
  if (word.credit() < CellWord::kMostCredit) {
    cells.word(place) = CellWord::of(word.set(), word.credit() + 1);
  }
  if (tables.sets.has(word.set(), bit)) return;
  const SetId set = tables.sets.with(word.set(), bit);
  if (set == HolderSets::kRefused) {
    ++sets_refused;
    return;
  }
  tables.change_set(place, set);
  ++tables.holders.blocks(holder);
}

void BlockIndex::State::erase(HolderId holder, std::uint32_t bit, Key key) {
  const Place place = tables.find(key);
  if (place == 0 || !tables.sets.has(tables.cells.words()[place].set(), bit)) {
    ++erased_unknown;
    return;
  }
  const SetId set = tables.sets.without(tables.cells.words()[place].set(), bit);
  if (set == HolderSets::kRefused) {
    // The other holders are a set for which there is no memory: they are forgotten as well.
    ++sets_refused;
    return tables.forget(place);
  }
  --tables.holders.blocks(holder);
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
