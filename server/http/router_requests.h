#pragma once
/// \file
/// The requests of routers on the RPC thread: the journal, lists of blocks, links and prefetches.

#include <cstdint>
#include <functional>
#include <list>
#include <optional>

#include <kj/async-io.h>

#include "base/clock.h"
#include "server/http/admin_messages.h"

namespace pegaflow::server {

class CacheService;
class Prefetches;

/// Answers RouterQuery. A request for the journal that has nothing to report waits until something
/// happens, for at most `patience`: the answer then is empty. Up to `most_readers` wait.
///
/// While none waits there is no timer and the store calls nothing. Thread-bound: the RPC thread.
class RouterRequests final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    Id128 server{};  ///< The incarnation.
    Duration patience = std::chrono::seconds(25);
    /// Changes are collected for so long, so that a burst of saves is one answer.
    Duration collect = std::chrono::milliseconds(5);
    std::size_t most_readers = 64;
    std::function<bool()> has_disks{};  ///< Not set: the node has none.
  };
  /// Entries of the journal that one answer covers, and frames of one part of a list.
  static constexpr std::size_t kMostEntries = 8192;
  /// Bytes of the chains of prompts in one answer.
  static constexpr std::size_t kMostChainBytes = std::size_t{512} << 10U;

  using Answer = std::function<void(std::uint64_t ticket, AdminAnswer answer)>;
  /// All references outlive it.
  RouterRequests(CacheService& service, Prefetches& prefetches, kj::Timer& timer,
                 std::function<std::optional<NodesReport>()> nodes, Answer answer,
                 const Options& options);
  ~RouterRequests() noexcept(false);
  RouterRequests(const RouterRequests&) = delete;
  RouterRequests& operator=(const RouterRequests&) = delete;

  void take(std::uint64_t ticket, const RouterQuery& query);
  [[nodiscard]] std::size_t readers() const noexcept { return waiting_.size(); }

 private:
  struct Waiting {
    std::uint64_t ticket = 0;
    RouterQuery query;
    kj::TimePoint until;
  };

  void read_journal(std::uint64_t ticket, RouterQuery query);
  void list_blocks(std::uint64_t ticket, const RouterQuery& query);
  void start_prefetch(std::uint64_t ticket, const RouterQuery& query);
  [[nodiscard]] LinksAnswer links() const;
  /// No value: there is nothing to report yet; the query's positions are then moved to where it
  /// continues.
  [[nodiscard]] std::optional<AdminAnswer> changes(RouterQuery& query) const;
  void watch();
  void answer_waiting();
  kj::Promise<void> expire_waiting();
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  Prefetches& prefetches_;
  kj::Timer& timer_;
  std::function<std::optional<NodesReport>()> nodes_;
  Answer answer_;
  const Options options_;
  std::list<Waiting> waiting_;
  bool is_watching_ = false;
  bool is_expiring_ = false;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
