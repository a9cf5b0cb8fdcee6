#pragma once
/// \file
/// Selection of the events of a stream that an index of GPU caches may use.

#include <cstddef>
#include <cstdint>
#include <map>

#include "index/events/kv_event.h"

namespace pegaflow::index {

/// Removes the events of a batch that must not be indexed, and learns the kinds of cache groups.
///
/// The hash of a block does not contain its group, so at equal block sizes a block of a recurrent
/// state has the hash of an attention block. Only groups of attention over the whole prefix are
/// indexed. A stored event names the kind of its group; a removal names the index of the group
/// alone.
///
/// Thread-bound. Remembers kMaxGroups groups; events of further ones are removed.
class EventFilter {
 public:
  static constexpr std::size_t kMaxGroups = 256;

  struct Counts {
    std::uint64_t other_groups = 0;  ///< Events of groups that are not indexed.
    std::uint64_t other_media = 0;   ///< Events of host memory and storage.
  };

  /// Removes events from `batch`; the spans of the others stay valid.
  void apply(KvBatch& batch);
  /// Forgets the groups: the engine is another process.
  void reset() { groups_.clear(); }
  [[nodiscard]] const Counts& counts() const noexcept { return counts_; }

 private:
  bool keeps(const KvEvent& event);
  bool is_attention(const KvEvent& event);

  std::map<std::uint32_t, GroupKind> groups_;
  Counts counts_;
};

}  // namespace pegaflow::index
