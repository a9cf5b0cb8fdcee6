#pragma once
/// \file
/// Which engines may share blocks: those whose list of factors is the same.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/block_store.h"
#include "engine/types/namespace_factors.h"

namespace pegaflow::engine {

/// A row of the NamespaceTable; never used again for another namespace.
enum class NamespaceId : std::uint32_t {};

/// The namespaces of this server, each with the space of the store that its current generation
/// uses.
///
/// A namespace without users stays, since an engine that restarts needs its blocks. When the table
/// is full, the namespace that has been unused for longest is removed with its blocks.
/// Thread-bound.
class NamespaceTable {
 public:
  struct Namespace {
    NamespaceId id{};
    std::vector<NamespaceFactor> factors;  ///< Canonical.
    std::string hash;                      ///< For people: namespace_hash(factors).
    /// Of its blocks; without shards until the first engine is complete, see fix_shape(), and again
    /// when the last one has left and no block is left of it.
    Shape shape{};
    ShapeId shape_id{};
    SpaceId space{};               ///< Of the current generation; none until then.
    std::uint64_t generation = 1;  ///< Raised by reset().
    std::uint32_t users = 0;       ///< enter() without leave().
  };

  /// `store` outlives the table.
  explicit NamespaceTable(BlockStore& store, std::size_t max_namespaces = 256);
  ~NamespaceTable();
  NamespaceTable(const NamespaceTable&) = delete;
  NamespaceTable& operator=(const NamespaceTable&) = delete;

  /// The namespace with these factors, made if there is none, with one user more. The reference
  /// stays valid, and is kept up to date, until the matching leave().
  /// Errors: kInvalidArgument as canonical_factors(); kBusy when the table is full and every
  /// namespace has a user.
  Result<const Namespace*> enter(std::vector<NamespaceFactor> factors);
  /// Whether a rank with pages of `page_bytes` as `shard` of `shards` fits the namespace. Any does
  /// as long as no engine of it was complete.
  /// Errors: kRefused that names both sizes.
  [[nodiscard]] Result<void> fits(NamespaceId id, std::uint32_t shard, std::uint32_t shards,
                                  std::uint64_t page_bytes) const;
  /// An engine of the namespace is complete: the first one fixes the shape. Later ones may name
  /// other nodes of memory, that changes nothing.
  /// Errors: kRefused when its pages have other sizes; those of BlockStore::add_shape().
  Result<void> fix_shape(NamespaceId id, const Shape& shape);
  /// Gives one enter() back. The namespace and its blocks stay.
  void leave(NamespaceId id);
  /// Gives up the shapes of namespaces without users whose last block is gone, as leave() does
  /// where none was left.
  void forget_shapes();
  /// Whether a shape lost its last block since forget_shapes(). Asked with each call: O(1).
  [[nodiscard]] bool has_emptied_shape() const;

  /// Raises the generation: blocks saved before are never found again. Unknown ids are fine.
  void reset(NamespaceId id);

  /// No value for an id whose namespace made room for another.
  [[nodiscard]] const Namespace* find(NamespaceId id) const;
  /// Every namespace, oldest first. Valid until the next call that is not const.
  [[nodiscard]] std::vector<const Namespace*> all() const;

 private:
  struct Row;
  bool make_room();
  /// A namespace without users keeps its name and generation: without blocks the tables of its
  /// shape are of no use.
  void forget_shape(Namespace& space);
  /// Gives up its space, with the blocks in it, and its shape.
  void drop_shape(Namespace& space);
  [[nodiscard]] Row* row(NamespaceId id) const;

  BlockStore& store_;
  std::size_t max_namespaces_;
  std::uint32_t next_id_ = 1;
  std::uint64_t next_left_ = 1;
  std::uint64_t emptied_seen_ = 0;  ///< emptied_shapes() of the store at the last forget_shapes().
  std::vector<std::unique_ptr<Row>> rows_;
};

}  // namespace pegaflow::engine
