#pragma once
/// \file
/// The holders, and the share of the pool that each instance holds.

#include <cstdint>
#include <unordered_map>

#include "base/id128.h"
#include "engine/rights/rows.h"

namespace pegaflow::engine {

/// Owns the holders and their instances. A holder keeps its address until it is removed: rows of
/// other tables point to it. Thread-bound.
class HolderTable {
 public:
  /// The share of one engine core.
  struct Instance {
    std::uint64_t held_bytes = 0;  ///< By claims, and by pins that outlived theirs.
    std::uint32_t holders = 0;
  };

  /// `instance_limit`: the bytes that one instance may hold.
  explicit HolderTable(std::uint64_t instance_limit) : instance_limit_(instance_limit) {}

  /// `process` identifies the writer of a block.
  HolderId add(std::uint32_t instance, const Id128& process);
  /// The holder writes `shard` of `shards`, and counts as one writer with the other ranks of its
  /// instance.
  void set_shard(Holder& holder, std::uint32_t shard, std::uint32_t shards);
  /// The connection ended; the process may live.
  void set_lost(Holder& holder) { holder.is_lost = true; }
  /// The process is gone: callers no longer know the holder.
  void set_gone(Holder& holder) { holder.is_gone = true; }
  /// Its lists are empty.
  void remove(HolderId id);

  /// The holder if it is still connected; null if it is unknown, lost or gone.
  [[nodiscard]] Holder* active(HolderId id);
  /// The holder unless it is unknown or gone. A lost one may still report the end of its copies.
  [[nodiscard]] Holder* known(HolderId id);
  /// The holder until it is removed; null if it is unknown.
  [[nodiscard]] Holder* find(HolderId id);

  /// The bytes that further claims of the holder's instance may hold.
  [[nodiscard]] std::uint64_t room(const Holder& holder) const;
  /// Adds to the bytes that the instance holds, or subtracts from them. An instance without bytes
  /// and holders is forgotten.
  void add_held(std::uint32_t instance, std::uint64_t bytes);
  void drop_held(std::uint32_t instance, std::uint64_t bytes);

  /// For checks.
  [[nodiscard]] const std::unordered_map<HolderId, Holder>& all() const noexcept {
    return holders_;
  }
  [[nodiscard]] const std::unordered_map<std::uint32_t, Instance>& instances() const noexcept {
    return instances_;
  }

 private:
  void forget_if_unused(std::uint32_t instance);

  std::uint64_t instance_limit_;
  std::uint64_t next_ = 1;
  // Few entries, in maps whose elements do not move.
  std::unordered_map<HolderId, Holder> holders_;
  std::unordered_map<std::uint32_t, Instance> instances_;
};

}  // namespace pegaflow::engine
