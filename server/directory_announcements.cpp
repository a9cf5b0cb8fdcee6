#include "server/directory_announcements.h"

#include <algorithm>
#include <utility>

#include "directory/anchor.h"

namespace pegaflow::server {
namespace {

/// Namespaces are looked at every so many steps.
constexpr unsigned kSpacesEvery = 8;
/// Generations that are announced; the limit of one read of the journal.
constexpr std::size_t kMostSpaces = 256;

/// The deepest block of engine::Depth that is among the first kHeadBlocks.
constexpr engine::Depth kLastHead = 3;
static_assert(directory::kHeadBlocks == 63, "engine::Depth 3 ends at 62 blocks before it");

bool is_announced(const BlockKey& key, engine::Depth depth) {
  const bool is_head = depth != engine::kUnknownDepth && depth <= kLastHead;
  return directory::is_anchor(key, is_head);
}

}  // namespace

DirectoryAnnouncements::DirectoryAnnouncements(CacheService& service, Send send,
                                               const Options& options)
    : service_(service), send_(std::move(send)), options_(options) {}

bool DirectoryAnnouncements::step() {
  if (steps_++ % kSpacesEvery == 0) note_spaces();
  if (must_start_over_ && !begin_again()) return false;
  bool has_more = false;
  if (!announce_part(has_more)) return false;
  list_some();
  return has_more;
}

void DirectoryAnnouncements::note_spaces() {
  auto now = service_.announced(kMostSpaces);
  const auto is_same = [](const CacheService::Announced& a, const CacheService::Announced& b) {
    return a.name == b.name && a.generation == b.generation && a.epoch == b.epoch;
  };
  std::erase_if(spaces_, [&](const Space& space) {
    const bool is_there = std::any_of(now.begin(), now.end(),
                                      [&](const auto& each) { return is_same(each, space.what); });
    // Without room it is tried again.
    return !is_there &&
           send_({.kind = directory::Announcement::Kind::kSpaceOver, .space = space.number});
  });
  for (const CacheService::Announced& each : now) {
    const bool is_known = std::any_of(spaces_.begin(), spaces_.end(), [&](const Space& space) {
      return is_same(each, space.what);
    });
    if (is_known || spaces_.size() >= kMostSpaces) continue;
    spaces_.push_back({.number = ++last_space_, .what = each});
  }
}

/// Entries of the journal are lost, or all names have changed.
bool DirectoryAnnouncements::begin_again() {
  if (!send_({.kind = directory::Announcement::Kind::kStartOver})) return false;
  must_start_over_ = false;
  is_listing_again_ = true;
  position_ = engine::BlockStore::kJournalEnd;
  for (Space& space : spaces_) space.listed = 0;
  return true;
}

/// False without room for it, or when entries are lost. `has_more`: the journal has further ones.
bool DirectoryAnnouncements::announce_part(bool& has_more) {
  std::vector<engine::SpaceId> generations;
  for (const Space& space : spaces_) generations.push_back(space.what.generation);
  const auto part = service_.store().journal(generations, position_, options_.entries);
  if (part.has_lost) {
    must_start_over_ = true;
    return false;
  }
  has_more = part.has_more;
  std::vector<Blocks> blocks(spaces_.size());
  for (const engine::BlockStore::JournalEntry& entry : part.entries) {
    // A block that is gone may have been announced by another writer's depth.
    const bool is_anchor = entry.is_present ? is_announced(entry.key, entry.depth)
                                            : directory::is_anchor(entry.key, true);
    if (is_anchor) blocks[entry.place].emplace_back(entry.key, entry.is_present);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    // A change that is sent twice changes nothing.
    if (!blocks[i].empty() && !send(spaces_[i], std::move(blocks[i]))) return false;
  }
  position_ = part.next;
  return true;
}

void DirectoryAnnouncements::list_some() {
  const auto open = std::find_if(spaces_.begin(), spaces_.end(), [](const Space& space) {
    return space.listed != engine::kNoFrame;
  });
  if (open == spaces_.end()) {
    if (!is_listing_again_) return;
    is_listing_again_ = !send_({.kind = directory::Announcement::Kind::kListed});
    return;
  }
  const auto listed = service_.store().list(open->what.generation, open->listed, options_.frames);
  Blocks blocks;
  for (std::size_t i = 0; i < listed.keys.size(); ++i) {
    if (is_announced(listed.keys[i], listed.depths[i])) blocks.emplace_back(listed.keys[i], true);
  }
  if (!blocks.empty() && !send(*open, std::move(blocks))) return;
  open->listed = listed.next;
}

bool DirectoryAnnouncements::send(const Space& space, Blocks blocks) {
  return send_({.space = space.number,
                .name = space.what.name,
                .epoch = space.what.epoch,
                .blocks = std::move(blocks)});
}

}  // namespace pegaflow::server
