#pragma once
/// \file
/// Which blocks of the store this node announces in the directory, from the store's journal.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "directory/messages.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {

/// Follows the journal of the store, and lists a namespace that is new, or has a new generation,
/// part by part.
///
/// One step reads one part of the journal, and lists one part of a namespace, within an event-loop
/// iteration. While the journal has more, the next step follows at once, so that a burst of saves
/// does not overrun the ring. When it was overrun nevertheless, or all names have changed,
/// everything is listed again; then only what differs is written. What finds no room is sent again
/// with the next step. Thread-bound: the RPC thread.
class DirectoryAnnouncements {
 public:
  /// False when there is no room; the message is then untouched.
  using Send = std::function<bool(directory::Announcement&&)>;
  struct Options {
    std::size_t entries = 1024;  ///< Entries of the journal that one step reads.
    std::size_t frames = 4096;   ///< Frames that one step lists: 100 us.
  };
  /// All references outlive it. The store keeps a journal.
  DirectoryAnnouncements(CacheService& service, Send send, const Options& options);

  /// Returns whether the journal has more: then the next step is due in the next event-loop
  /// iteration. False also without room for what was read.
  bool step();
  /// All names have changed.
  void start_over() { must_start_over_ = true; }

 private:
  using Blocks = std::vector<std::pair<BlockKey, bool>>;
  /// A generation of a namespace and kind that is announced.
  struct Space {
    std::uint32_t number = 0;
    CacheService::Announced what;
    engine::FrameIndex listed = 0;  ///< The frame from which it is listed; kNoFrame: all are.
  };
  void note_spaces();
  bool begin_again();
  bool announce_part(bool& has_more);
  void list_some();
  bool send(const Space& space, Blocks blocks);

  CacheService& service_;
  const Send send_;
  const Options options_;
  std::vector<Space> spaces_;
  std::uint32_t last_space_ = 0;
  std::uint64_t position_ = engine::BlockStore::kJournalEnd;
  unsigned steps_ = 0;
  bool must_start_over_ = false;
  bool is_listing_again_ = false;
};

}  // namespace pegaflow::server
