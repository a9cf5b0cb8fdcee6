#pragma once
/// \file
/// The engines of the router as the index sees them: their ranks, their event streams, and how far
/// each is trusted.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "index/block_index.h"
#include "index/events/adoption.h"
#include "index/events/event_socket.h"
#include "index/events/kv_event_sources.h"
#include "index/events/source.h"
#include "index/placement/expected_blocks.h"
#include "index/placement/placement.h"
#include "router/kv/kv_lessons.h"
#include "router/kv/kv_tokens.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

/// The subscriptions that KvFleet wants: index::EventSocket, or a double in tests.
struct KvStreams {
  std::function<Result<void>(index::StreamId, index::EventSocket::Stream)> add;
  std::function<void(index::StreamId)> remove;
  std::function<Result<void>(index::StreamId, std::uint64_t ticket, std::uint64_t sequence)> replay;
};

/// Owns one entry for each engine URL, with its data-parallel ranks. Applies events to the index.
/// Thread-bound.
class KvFleet {
 public:
  /// One rank of one engine: a GPU cache.
  struct Rank {
    std::uint64_t engine = 0;  ///< Engine::id.
    std::uint32_t number = 0;  ///< Data-parallel rank.
    std::string url{};         ///< The engine's.
    index::HolderId holder = 0;
    index::EngineId place = index::kNoEngine;
    index::StreamId stream = 0;  ///< 0: the engine publishes no events.
    index::EventAddress address{};
    index::Source source{};
    index::Adoption adoption{};                    ///< Blocks of another router's snapshot.
    KvTokens::Engine hashes{};                     ///< How it hashes, as far as its events told.
    bool names_sessions = false;                   ///< Its events have named a session.
    index::Trust logged = index::Trust::kUnknown;  ///< The state in the log.

    [[nodiscard]] bool gives_credit() const { return stream != 0 && source.gives_credit(); }
  };
  struct Entry {
    std::string url;
    std::string host{};                        ///< The host in the URL.
    std::shared_ptr<const Engine> engine{};    ///< For its models.
    std::vector<std::unique_ptr<Rank>> ranks;  ///< At least one, in the order of their numbers.
    std::string sources_error{};  ///< Why the engine's addresses are not used; empty: they are.
    bool was_asked = false;       ///< For its addresses.
    bool decodes = true;          ///< It has the role of a decode engine.
  };

  /// All of them outlive the object.
  KvFleet(index::BlockIndex& blocks, index::Placement& placement, index::ExpectedBlocks& expected,
          KvLessons& lessons, KvTokens& tokens, KvStreams streams);

  /// Calls about blocks that a rank no longer has.
  struct Watch {
    std::function<void(const Rank&)> removed;    ///< The engine has removed some or all.
    std::function<void(const Rank&)> forgotten;  ///< They are no longer known.
    std::function<void(const Rank&)> gone;       ///< The rank is; its numbers may be used again.
  };
  void watch(Watch calls) { watch_ = std::move(calls); }

  /// Replaces the engines. What is known of those that stay is kept.
  void set_engines(std::span<const std::shared_ptr<Engine>> engines, TimePoint now);
  /// The addresses of an engine's event streams, as it returned them; empty: it publishes none.
  /// `error` tells why there are none.
  void set_addresses(std::uint64_t engine, std::vector<index::EventAddress> addresses,
                     std::string error, TimePoint now);
  /// Whether the engine's addresses are known, or known to be missing.
  [[nodiscard]] bool was_asked(std::uint64_t engine) const;
  /// The engine's process may be another one: ask for its addresses again.
  void ask_again(std::uint64_t engine);

  /// Something arrived on a stream. Applies at most what one batch has.
  void arrive(index::Arrival&& arrival, TimePoint now);
  /// Replaces what is known of a rank by another router's blocks, which are those at `place` of its
  /// stream, and continues from there. False, without effect, if Source::resume() is. The blocks
  /// are entered by adopt_more().
  bool adopt(Rank& rank, const index::Source::Position& place, std::vector<index::Key> keys,
             TimePoint now);
  /// Enters index::Adoption::kSlice blocks of adopted ranks at most. Returns whether there are
  /// more.
  bool adopt_more();
  /// Timeouts of sources.
  void tick(TimePoint now);

  [[nodiscard]] const Entry* find(std::uint64_t engine) const;
  /// The form of the engine's events, and of its names of blocks; nullopt without events.
  [[nodiscard]] std::optional<index::Dialect> dialect_of(std::uint64_t engine) const;
  /// A rank with credit whose hashes are known, of an engine that serves `model` itself and not
  /// as an adapter; nullptr: none.
  [[nodiscard]] const Rank* hashing_rank(std::string_view model, bool is_salted) const;
  [[nodiscard]] Rank* find_rank(std::uint64_t engine, std::uint32_t number);
  [[nodiscard]] const std::unordered_map<std::uint64_t, Entry>& entries() const { return entries_; }
  /// Changes whenever a rank is added or removed.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  /// Whether a request for `model` may ask its engine to report reused blocks: an engine publishes
  /// events, and none that may serve the model rejects the member.
  [[nodiscard]] bool takes_full_reports(std::string_view model) const;
  /// Sets or changes the node whose pool the ranks of an engine use; the holder and the node are
  /// numbers of the index and of the placement.
  void attach(std::uint64_t engine, std::optional<index::HolderId> holder, index::NodeId node);

  struct Stats {
    std::uint64_t stored = 0;   ///< Blocks.
    std::uint64_t removed = 0;  ///< Blocks.
    std::uint64_t cleared = 0;  ///< Caches emptied by their engine.
    std::uint64_t adopted = 0;  ///< Blocks of other routers' snapshots.
    std::uint64_t refused = 0;  ///< Ranks beyond the capacity of the index or of the placement.
  };
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }

 private:
  bool add_rank(Entry& entry, std::uint64_t engine, std::uint32_t number);
  void remove_rank(Rank& rank);
  void close_stream(Rank& rank, TimePoint now);
  void open_stream(Rank& rank, const index::EventAddress& address);
  void run_actions(Rank& rank, TimePoint now);
  void apply(Rank& rank, const index::KvBatch& batch);
  void apply_stored(Rank& rank, const index::KvEvent& event);
  /// Removes all blocks of the rank.
  void forget_blocks(Rank& rank);

  index::BlockIndex& blocks_;
  index::Placement& placement_;
  index::ExpectedBlocks& expected_;
  KvLessons& lessons_;
  KvTokens& tokens_;
  KvStreams streams_;
  std::unordered_map<std::uint64_t, Entry> entries_;  // By Engine::id.
  std::unordered_map<index::StreamId, Rank*> by_stream_;
  index::StreamId next_stream_ = 1;
  Watch watch_;
  std::vector<index::Key> keys_;  // Kept between events.
  std::uint64_t version_ = 1;
  Stats stats_;
};

}  // namespace pegaflow::router
