#include "index/events/event_filter.h"

namespace pegaflow::index {

void EventFilter::apply(KvBatch& batch) {
  std::erase_if(batch.events, [this](const KvEvent& event) { return !keeps(event); });
}

bool EventFilter::keeps(const KvEvent& event) {
  if (event.kind == EventKind::kCleared) return true;
  // The group is learned from events of every medium.
  const bool attention = is_attention(event);
  if (event.medium != Medium::kGpu) {
    ++counts_.other_media;
    return false;
  }
  if (!attention) ++counts_.other_groups;
  return attention;
}

bool EventFilter::is_attention(const KvEvent& event) {
  if (event.group_kind != GroupKind::kUnnamed) {
    if (event.group && (groups_.size() < kMaxGroups || groups_.contains(*event.group))) {
      groups_[*event.group] = event.group_kind;
    }
    return event.group_kind == GroupKind::kAttention;
  }
  if (!event.group) return true;  // An engine with one group.
  const auto known = groups_.find(*event.group);
  if (known != groups_.end()) return known->second == GroupKind::kAttention;
  // Before any stored event of the group there is nothing of it to remove. Engines that name no
  // kinds number their only group 0.
  return *event.group == 0;
}

}  // namespace pegaflow::index
