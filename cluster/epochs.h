#pragma once
/// \file
/// The epoch of each namespace: its last reset in the cluster.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "capnp/wire/peer_types.h"

namespace pegaflow::cluster {

/// The epoch of a reset at a node that knows `known`: above it, and not below the system's time, so
/// that a node that has forgotten an epoch in a restart does not reset below it.
Epoch epoch_after(const Epoch& known, std::chrono::microseconds system_time, std::uint64_t id);

/// The epoch of each namespace that was ever reset, by its name among nodes.
///
/// Epochs never go back. The table is bounded: when it is full, the oldest entry gives way and its
/// epoch becomes the *floor*, the epoch of every namespace that is not listed. That discards
/// blocks of namespaces that were not reset, and never keeps blocks of one that was. Thread-bound.
class Epochs {
 public:
  static constexpr std::size_t kMaxSpaces = KnownEpochs::kMaxSpaces;
  /// Makes an epoch newer than the one given.
  using Next = std::function<Epoch(const Epoch& known)>;

  /// `news` is called after an epoch has become newer. The default of `next` is epoch_after() by
  /// the system clock.
  explicit Epochs(std::function<void()> news = {}, Next next = {},
                  std::size_t max_spaces = kMaxSpaces);

  [[nodiscard]] Epoch of(const Bytes32& space) const;
  /// From now on `space` is another name of `first`, and has its epoch: the kinds of blocks of one
  /// namespace are reset together. `first` is no other name itself.
  void alias(const Bytes32& space, const Bytes32& first);
  /// Ends that; `space` keeps the epoch that it has, if there is room for it. Calls no hook.
  void forget_alias(const Bytes32& space);
  /// Takes the newer one of both. Returns true if that was `epoch`.
  bool learn(const Bytes32& space, const Epoch& epoch);
  /// Makes a reset: returns the new epoch, which is newer than the known one. No value if there is
  /// no epoch above the known one; then nothing was reset.
  std::optional<Epoch> raise(const Bytes32& space);

  [[nodiscard]] KnownEpochs known() const;
  void learn(const KnownEpochs& known);
  [[nodiscard]] std::size_t size() const noexcept { return epochs_.size(); }

  /// The count of changes to newer epochs since the start.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }
  /// Sets the function that is called after `news`, to inform other nodes; there is one at a time.
  void on_change(std::function<void()> changed) { changed_ = std::move(changed); }

 private:
  [[nodiscard]] const Bytes32& first_name(const Bytes32& space) const;
  bool take(const Bytes32& space, const Epoch& epoch);
  bool take_floor(const Epoch& epoch);
  /// Raises the floor until the table has its size: once for all epochs that were taken together.
  void cut();
  void note_change();

  std::function<void()> news_;
  std::function<void()> changed_;
  std::uint64_t changes_ = 0;
  Next next_;
  std::size_t max_spaces_;
  std::map<Bytes32, Epoch> epochs_;     ///< All above the floor.
  std::map<Bytes32, Bytes32> aliases_;  ///< Other names, each with the first one.
  Epoch floor_;
};

}  // namespace pegaflow::cluster
