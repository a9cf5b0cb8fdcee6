#pragma once
/// \file
/// Which page size the pool is cut for, and when it may be cut anew.

#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "engine/block_store.h"

namespace pegaflow {

/// Cuts the pool into equal slots for one page size at a time, and owns the store over them.
///
/// The first instance sets the size. An instance with pages of another slot size waits, serving
/// without the cache, until no instance of the old size is connected and no page of it is reserved,
/// pinned or in quarantine; then the pool is emptied and cut for the instance that waits longest.
/// With nobody waiting it stays as it is: an engine that starts again finds its blocks.
///
/// The store is the same object for life; only its slots change, so references to it stay valid.
/// Thread-bound.
class PoolCut {
 public:
  struct Options {
    std::uint64_t pool_bytes = 0;  ///< What slots are cut from.
    BlockStore::Options store{};   ///< `slot_count` is ignored: it follows from the cut.
  };

  /// `clock` outlives it.
  /// Errors: those of BlockStore::create; kInvalidArgument for a pool without one 4 KiB page.
  static Result<std::unique_ptr<PoolCut>> create(const Options& options, const Clock& clock);
  ~PoolCut();

  [[nodiscard]] BlockStore& store() noexcept { return *store_; }
  [[nodiscard]] const BlockStore& store() const noexcept { return *store_; }

  enum class Answer {
    kServed,   ///< The pool is cut for its pages.
    kWaiting,  ///< It is cut for another size that is still in use: serve without the cache.
  };
  /// An instance registered with pages of `page_bytes`. Cuts the pool for it if it may.
  /// Errors: kRefused when not one page fits the pool, or the page passes 1 GiB: it will not be
  /// served, and is not known here. kInvalidArgument for an empty page, or an instance that is
  /// known.
  Result<Answer> enter(std::uint32_t instance, std::uint64_t page_bytes);
  /// The instance is gone, served or waiting. Unknown ones are fine.
  void leave(std::uint32_t instance);

  /// Cuts the pool for the instance that waits longest, if it may; true if it was cut. Then ask
  /// is_served() again for those that waited. Call it when something left: after leave(), and when
  /// the store's queued work is done; it costs nothing while nobody waits.
  bool settle();

  [[nodiscard]] bool is_served(std::uint32_t instance) const;
  [[nodiscard]] bool is_waiting() const;
  /// 0 before the first instance.
  [[nodiscard]] std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  /// How often it was cut; a slot number means nothing after the next cut.
  [[nodiscard]] std::uint64_t cuts() const noexcept { return cuts_; }

 private:
  struct Member {
    std::uint32_t instance = 0;
    std::uint64_t slot_bytes = 0;
  };

  PoolCut(std::uint64_t pool_bytes, std::unique_ptr<BlockStore> store);
  bool cut_for(std::uint64_t slot_bytes);

  std::uint64_t pool_bytes_;
  std::unique_ptr<BlockStore> store_;
  std::uint64_t slot_bytes_ = 0;
  std::uint64_t cuts_ = 0;
  std::vector<Member> members_;  ///< In the order of enter(); a handful.
};

}  // namespace pegaflow
