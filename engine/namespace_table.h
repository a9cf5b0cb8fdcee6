#pragma once
/// \file
/// Which engines may share blocks: those with equal lists of factors.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/block_store.h"
#include "engine/kinds/block_kinds.h"
#include "engine/types/namespace_factors.h"

namespace pegaflow::engine {

/// A row of the NamespaceTable; never used again for another namespace.
enum class NamespaceId : std::uint32_t {};

/// The namespaces of this server, each with the generation that the store currently uses for it.
///
/// A namespace without users stays, since an engine that restarts needs its blocks. When the table
/// is full, the namespace that has been unused for longest is removed with its blocks.
/// Thread-bound.
class NamespaceTable {
 public:
  /// The blocks of one kind: a space of their own in the store.
  struct Kind {
    Shape shape;
    ShapeId shape_id{};
    SpaceId space{};
  };
  struct Namespace {
    NamespaceId id{};
    std::vector<NamespaceFactor> factors;  ///< Canonical.
    std::string hash;                      ///< For logs and pages: namespace_hash(factors).
    /// The kinds of its blocks; without any until the first engine is complete, see fix_shapes(),
    /// and again after the last engine has left and the last block is gone.
    std::vector<Kind> kinds{};
    /// The rules of the kinds; without kinds where there is one, of which prompts need a prefix.
    BlockKinds rules{};
    std::uint64_t generation = 1;  ///< Raised by reset().
    std::uint32_t users = 0;       ///< Calls of enter() without leave().

    [[nodiscard]] bool has_shapes() const noexcept { return !kinds.empty(); }
    /// The current generation of a kind; none until there are shapes.
    [[nodiscard]] SpaceId space(std::size_t kind = 0) const {
      return kind < kinds.size() ? kinds[kind].space : SpaceId{};
    }
  };

  /// `store` outlives the table.
  explicit NamespaceTable(BlockStore& store, std::size_t max_namespaces = 256);
  ~NamespaceTable();
  NamespaceTable(const NamespaceTable&) = delete;
  NamespaceTable& operator=(const NamespaceTable&) = delete;

  /// A namespace of a former process, whose blocks BlockStore::adopt() restored.
  struct Former {
    std::vector<NamespaceFactor> factors;
    BlockKinds rules{};
    std::vector<std::pair<Shape, SpaceId>> kinds{};
    std::uint64_t generation = 1;
  };
  /// Restores namespaces without users; of those, the first will be removed first for another one.
  /// To be called before anything else.
  /// Errors: those of canonical_factors() and BlockStore::add_shape(); kCorrupt above the limit of
  /// namespaces or for one that is there twice.
  Result<void> restore(std::vector<Former> namespaces);
  /// Calls `changed` after each change to what restore() needs; an empty one: no longer.
  void on_change(std::function<void()> changed) { changed_ = std::move(changed); }

  /// Returns the namespace with these factors, created if there is none, with one more user. The
  /// pointer stays valid, and its content up to date, until the matching leave().
  /// Errors: those of canonical_factors(); kBusy when the table is full and every namespace has a
  /// user.
  Result<const Namespace*> enter(std::vector<NamespaceFactor> factors);
  /// Checks whether a rank with these rules and pages of `page_bytes`, kind by kind, as `shard` of
  /// `shards` fits the namespace. Any does until the first engine is complete. A rank of several
  /// `cells` holds that many shards, from `shard` on; each of its pages is theirs together, so they
  /// must be of equal size and adjacent.
  /// Errors: kRefused that names both sizes, or the kinds, or the shards that are not adjacent.
  [[nodiscard]] Result<void> fits(NamespaceId id, std::uint32_t shard, std::uint32_t shards,
                                  const BlockKinds& rules,
                                  std::span<const std::uint64_t> page_bytes,
                                  std::uint32_t cells = 1) const;
  /// Fixes the kinds and their shapes when the first engine of the namespace is complete. Later
  /// engines may name other NUMA nodes, which changes nothing. `rules` were checked.
  /// Errors: kRefused when its rules or page sizes differ; those of BlockStore::add_shape(): the
  /// namespace then has no shape.
  Result<void> fix_shapes(NamespaceId id, const BlockKinds& rules, std::span<const Shape> shapes);
  /// Ends one enter(). The namespace and its blocks stay.
  void leave(NamespaceId id);
  /// Drops the shapes of namespaces without users whose last block is gone, as leave() does when
  /// there is no block.
  void forget_shapes();
  /// Whether a shape lost its last block since forget_shapes(). O(1), cheap enough for each call.
  [[nodiscard]] bool has_emptied_shape() const;

  /// Raises the generation: blocks saved before are never found again. Unknown ids are fine.
  void reset(NamespaceId id);

  /// Null for an id whose namespace was removed for another.
  [[nodiscard]] const Namespace* find(NamespaceId id) const;
  /// Every namespace, oldest first. Valid until the next call that is not const.
  [[nodiscard]] std::vector<const Namespace*> all() const;

 private:
  struct Row;
  bool make_room();
  /// Drops the shapes of a namespace without users and blocks, whose tables are of no further use.
  /// Its name and generation stay.
  void forget_shapes_of(Namespace& space);
  /// Drops its generation, with the blocks in it, and its shapes.
  void drop_shapes(Namespace& space);
  [[nodiscard]] Row* row(NamespaceId id) const;
  Row& add(std::vector<NamespaceFactor> canonical);
  void note_change() const {
    if (changed_) changed_();
  }

  BlockStore& store_;
  std::size_t max_namespaces_;
  std::uint32_t next_id_ = 1;
  std::uint64_t next_left_ = 1;
  std::uint64_t emptied_seen_ = 0;  ///< emptied_shapes() of the store at the last forget_shapes().
  std::vector<std::unique_ptr<Row>> rows_;
  std::function<void()> changed_;
};

}  // namespace pegaflow::engine
