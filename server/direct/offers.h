#pragma once
/// \file
/// Blocks that workers are saving and that other workers may read meanwhile.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "base/os/unique_fd.h"
#include "capnp/wire/codec.h"
#include "engine/types/ids.h"
#include "server/direct/allocations.h"
#include "server/direct/consents.h"
#include "server/direct/direct_stats.h"
#include "server/direct/source_id.h"

namespace pegaflow::server {

/// Which worker has which block in its own memory, from the reservation of a job until its end, and
/// which workers read them.
///
/// An entry may be outdated: a reader compares the guard of the block's job after its last read, so
/// this table decides nothing about the bytes. Thread-bound: the RPC thread.
class Offers {
 public:
  /// More blocks are not offered.
  static constexpr std::size_t kMostBlocks = std::size_t{1} << 20;
  /// A worker begins no further read beside so many.
  static constexpr std::size_t kMostReads = 1024;

  /// A worker that has registered its memory. Immutable.
  struct Source {
    SourceId id{};
    Id128 connection;
    std::uint32_t shard = 0;
    OfferedMemory memory;
    UniqueFd guards;                                 ///< The memfd of its guards.
    UniqueFd process;                                ///< Its pidfd.
    std::shared_ptr<const Allocations> allocations;  ///< Those of its ranges; null: it has none.
  };

  /// The worker of `connection` may read blocks of its group from now on, and offer its own.
  /// Replaces an earlier source of the connection.
  void add(const Id128& connection, std::uint32_t shard, OfferedMemory memory, UniqueFd guards,
           UniqueFd process, std::shared_ptr<const Allocations> allocations = {});
  /// Its connection ended: it offers and reads nothing any longer. The connection may also be that
  /// of another node, which only reads. Ignores unknown ones.
  void remove(const Id128& connection);
  [[nodiscard]] bool has(const Id128& connection) const {
    return by_connection_.contains(connection);
  }
  /// Whether the connection has a source with this memory.
  [[nodiscard]] bool has(const Id128& connection, std::uint32_t shard,
                         const OfferedMemory& memory) const {
    const auto found = by_connection_.find(connection);
    return found != by_connection_.end() && found->second->shard == shard &&
           found->second->memory == memory;
  }

  /// The memory that the connection has registered; nullptr: none.
  [[nodiscard]] const OfferedMemory* memory_of(const Id128& connection) const;

  /// Whether a worker has this registration now.
  [[nodiscard]] bool has(SourceId source) const { return find_source(source) != nullptr; }
  /// That worker; nullptr: it has left.
  [[nodiscard]] std::shared_ptr<const Source> find_source(SourceId source) const;
  /// The worker of this connection; nullptr: none.
  [[nodiscard]] std::shared_ptr<const Source> source_of(const Id128& connection) const;

  /// Whose turn it is at memory that needs consent.
  [[nodiscard]] Consents& consents() noexcept { return consents_; }

  struct Guarded {
    std::uint32_t place = 0;  ///< In the source's array of guards.
    std::uint64_t value = 0;
  };
  /// The job of a worker writes these keys, which lie in its blocks of the same places. Those with
  /// `skipped` set are not saved by it, and not offered. The blocks of a job that is `pending` are
  /// not read before ready(). Errors: kInvalidArgument for a connection without a source, another
  /// number of blocks than keys, a block or a guard beyond the registered ones, a guard of value 0,
  /// or another guard than earlier blocks of the job have.
  Result<void> offer(const Id128& connection, const JobId& job, engine::SpaceId space,
                     std::span<const BlockKey> keys, std::span<const std::uint32_t> blocks,
                     const std::vector<bool>& skipped, const Guarded& guard, bool pending = false);
  /// The blocks of the job may be read now. Whether they could not before.
  bool ready(const Id128& connection, const JobId& job);
  /// The job has ended: its blocks are offered no longer. They may still be read.
  void job_ended(const Id128& connection, const JobId& job);
  /// Whether a worker reads blocks of the job.
  [[nodiscard]] bool is_read(const Id128& connection, const JobId& job) const;

  /// A name that no source has, and that none gets.
  [[nodiscard]] SourceId new_name() { return SourceId{++last_source_}; }

  /// A worker that reads, of this node or of another one.
  struct Reader {
    std::string group;
    std::uint32_t shard = 0;
    SourceId source{};      ///< Its own memory, which it does not read; of another node: none.
    bool is_there = false;  ///< On another node: it reads only memory that has a network.
    bool reads_without_consent = false;
  };
  /// The worker of this connection; no value without a source.
  [[nodiscard]] std::optional<Reader> reader(const Id128& connection) const;
  /// The workers of all these connections; no value unless each has a source.
  [[nodiscard]] std::optional<std::vector<Reader>> readers(
      std::span<const Id128> connections) const;

  struct Run {
    Guarded guard;
    std::uint32_t blocks = 0;
  };
  struct Found {
    std::shared_ptr<const Source> source;
    std::vector<std::uint32_t> blocks;
    std::vector<Run> guards;  ///< They cover the blocks, in this order.
    bool has_turn = false;    ///< The process of the source consents to this reader.
  };
  /// The leading keys that one other worker of the reader's group and shard offers; no value for
  /// none, and while the reader waits for the consent of that worker's process. The reader reads
  /// them under `pin`, a name of its connection, until end_read().
  std::optional<Found> begin_read(const Id128& connection, const Reader& reader,
                                  engine::SpaceId space, std::span<const BlockKey> keys,
                                  std::uint64_t pin);
  /// Whether a read of the connection had begun under this name.
  bool end_read(const Id128& connection, std::uint64_t pin);
  /// Reads of blocks of the job no longer keep other workers from their turns, although they have
  /// not ended: the guard of the job is closed, or will be at once.
  void end_turns(const Id128& connection, const JobId& job);

  /// How many leading keys each of these workers could begin to read, now or once they are ready.
  [[nodiscard]] std::size_t count(std::span<const Reader> readers, engine::SpaceId space,
                                  std::span<const BlockKey> keys) const;

  using Stats = DirectStats;
  [[nodiscard]] Stats stats() const;

 private:
  using OneSource = std::shared_ptr<const Source>;
  /// The name of a page of a block.
  struct Page {
    engine::SpaceId space{};
    std::uint32_t shard = 0;
    BlockKey key;
    bool operator==(const Page&) const = default;
  };
  struct PageHash {
    std::size_t operator()(const Page& page) const noexcept {
      return page.key.hash() ^ (static_cast<std::size_t>(page.space) << 32U) ^ page.shard;
    }
  };
  struct Job;
  struct Entry {
    Job* job = nullptr;
    std::uint32_t block = 0;
  };
  /// A worker reads blocks of these jobs.
  struct Read {
    std::vector<std::pair<Id128, JobId>> jobs;
    SourceId permitted{};  ///< The source whose process has consented; none: it need not.
  };
  /// The name of a job of a worker: all ranks of an engine have jobs of the same numbers.
  using JobName = std::pair<Id128, JobId>;
  /// Exists while its blocks are offered or read.
  struct Job {
    JobName name;
    OneSource source;
    std::vector<Page> pages;  ///< Offered under it.
    Guarded guard;
    bool is_pending = false;
    std::size_t readers = 0;
  };
  using Pin = std::pair<Id128, std::uint64_t>;

  [[nodiscard]] const Entry* find(const Reader& reader, engine::SpaceId space,
                                  const BlockKey& key) const;
  void withdraw(Job& job);
  void forget_if_unused(std::map<JobName, Job>::iterator job);

  std::uint64_t last_source_ = 0;
  std::unordered_map<Id128, OneSource> by_connection_;
  std::map<JobName, Job> jobs_;
  std::unordered_map<Page, Entry, PageHash> pages_;
  std::map<Pin, Read> reads_;
  Consents consents_;
  std::unordered_map<Id128, std::size_t> reads_of_;  ///< By the reader's connection.
  std::size_t listed_ = 0;                           ///< Pages of all jobs.
  Stats counted_;
};

}  // namespace pegaflow::server
