#pragma once
/// \file
/// The index of blocks and their holders: the GPU caches of engines and the pools of nodes.
/// hashes.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "index/holders.h"
#include "index/key.h"
#include "index/match.h"

namespace pegaflow::index {

/// Owns the table from keys to sets of holders. Exact: every key is compared, and each change of a
/// holder is applied to it alone. It forgets, never invents: beyond `max_blocks`, or when there are
/// more different sets than `set_bytes` holds, blocks are forgotten and counted.
///
/// Blocks that are stored together lie side by side, so that a match reads memory in order and
/// searches only where such a run ends. About 19 bytes a block, however many holders have it, and
/// two rows of bits for each different set of holders.
///
/// Thread-bound, no locks. match() allocates nothing; other calls may enlarge the table of sets. A
/// call of store() or erase() should have at most 2,048 keys.
class BlockIndex {
 public:
  struct Options {
    std::size_t max_blocks = std::size_t{16}
                             << 20U;   ///< 64 to 2^28. Memory is touched as it fills.
    std::uint32_t max_holders = 1024;  ///< Engines and nodes, 1 to 4,096.
    std::size_t set_bytes = std::size_t{256} << 20U;  ///< Bound of the table of holder sets.
  };

  struct Stats {
    std::uint64_t blocks = 0;          ///< Cells in use, unswept ones of cleared holders included.
    std::uint64_t sets = 0;            ///< Different sets of holders.
    std::uint64_t holders = 0;         ///< Engines and nodes.
    std::uint64_t evicted = 0;         ///< Blocks forgotten because the index was full.
    std::uint64_t sets_refused = 0;    ///< Blocks forgotten because the table of sets was full.
    std::uint64_t erased_unknown = 0;  ///< Erased keys that the holder did not have.
    std::uint64_t moved = 0;           ///< Cells moved to join fragments.
    std::uint64_t swept = 0;           ///< Cells visited by sweep().
    std::size_t block_bytes = 0;       ///< Memory of cells and their table, as reserved.
    std::size_t set_bytes = 0;         ///< Memory of the table of holder sets.
  };

  /// Errors: kInvalidArgument when an option is out of its range; kOutOfCapacity when there is no
  /// memory for the tables.
  static Result<std::unique_ptr<BlockIndex>> create(const Options& options);

  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  /// Adds the GPU cache of one rank of one engine. Errors: kOutOfCapacity at `max_holders`, numbers
  /// that wait for sweep() included.
  Result<HolderId> add_engine();

  /// Adds what one node holds outside engines. Errors: as add_engine().
  Result<HolderId> add_node();

  /// From now on blocks of `node` count as local for `engine`, which has one node at most: an
  /// earlier one is replaced.
  void attach(HolderId engine, HolderId node);

  /// The blocks of its node no longer count as local for `engine`. No node is no error.
  void detach(HolderId engine);

  /// Forgets the holder and its blocks, in constant time. Engines of a removed node are detached.
  void remove(HolderId holder);

  /// Forgets the holder's blocks, in constant time; sweep() frees their cells.
  void clear(HolderId holder);

  /// The holder now has `keys`: the blocks of one event, in the order of their chain. Blocks that
  /// it has already are no error. `at_root`: the first key is the first block of a prompt; such
  /// blocks are forgotten last when the index is full.
  void store(HolderId holder, std::span<const Key> keys, bool at_root = false);

  /// The holder no longer has `keys`. Keys that it did not have are counted.
  void erase(HolderId holder, std::span<const Key> keys);

  /// Visits up to `max_cells` cells: frees those of cleared holders and joins fragments. Returns
  /// whether more is to do.
  bool sweep(std::size_t max_cells);

  /// Fills `out`, which was made for at least `max_holders`, with what each holder has of `chain`
  /// from its start.
  void match(std::span<const Key> chain, Match& out) const;

  /// Whether the holder has this block.
  [[nodiscard]] bool holds(HolderId holder, Key key) const;

  /// Appends the holder's blocks in the cells from `cell` on, visiting `max_cells` at most; begin
  /// with 1. Returns the cell to go on with, 0 after the last one. Blocks whose cells are moved
  /// between two calls may be left out.
  std::size_t list(HolderId holder, std::size_t cell, std::size_t max_cells,
                   std::vector<Key>& out) const;

  /// Blocks that the holder has now.
  [[nodiscard]] std::uint64_t blocks_of(HolderId holder) const;

  [[nodiscard]] Stats stats() const;

 private:
  struct State;
  explicit BlockIndex(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace pegaflow::index
