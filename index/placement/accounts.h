#pragma once
/// \file
/// Requests that were placed on each engine and have not ended: the router's own requests, and
/// those of other routers.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"
#include "index/placement/record.h"

namespace pegaflow::index {

/// Requests in flight and, for each engine, the wait that they cause.
///
/// An engine computes the prefills of its account in the order of their placement; one whose blocks
/// are not there yet delays those behind it. Times are seconds on one monotonic scale, given by the
/// caller.
///
/// Thread-bound. All memory is allocated by the constructor; a full account refuses.
class Accounts {
 public:
  struct Options {
    std::uint32_t max_engines = 0;
    std::uint32_t max_requests = 0;
    std::uint32_t max_routers = 0;
  };
  explicit Accounts(const Options& options);

  /// One request in flight.
  struct Request {
    std::uint64_t id = 0;
    RouterId router = 0;
    EngineId engine = kNoEngine;
    std::uint32_t prompt_tokens = 0;
    std::uint32_t uncached_tokens = 0;
    double prefill = 0;                  ///< Predicted seconds of computation.
    double placed = 0;                   ///< Time of the placement.
    double ready = 0;                    ///< Predicted time when its blocks are at the engine.
    double first = 0;                    ///< Predicted time of its first token.
    double expires = 0;                  ///< Time at which it is ended without a message.
    std::uint32_t predicted_cached = 0;  ///< Tokens.
    bool decodes = false;
  };

  /// Errors: kBusy when max_requests are in flight; kInvalidArgument when the request is known.
  Result<void> add(const Request& request);

  /// A request that was the next one of its engine, for the engine's rate.
  struct Served {
    std::uint32_t uncached_tokens = 0;
    double seconds = 0;     ///< Since the engine could begin with it.
    double predicted = 0;   ///< Predicted time from placement to first token.
    double measured = 0;    ///< That time.
    bool in_order = false;  ///< It was the next one: `seconds` is of this request alone.
  };
  /// Moves a request from the queue to the decodes. No value: unknown, or it decodes already.
  std::optional<Served> first_token(RouterId router, std::uint64_t id, double now);
  /// Changes what a request in the queue has to compute. Others are left as they are.
  void set_work(RouterId router, std::uint64_t id, std::uint32_t uncached_tokens, double prefill);
  /// Ends a request and returns it. No value: unknown.
  std::optional<Request> end(RouterId router, std::uint64_t id, double now);
  /// The request, until the next call that changes the account; null when it is unknown. Only
  /// `expires` may be changed through it.
  [[nodiscard]] Request* find(RouterId router, std::uint64_t id) noexcept;
  [[nodiscard]] const Request* find(RouterId router, std::uint64_t id) const noexcept;

  /// Corrects what is known of another router by its own sums: surplus prefills end, the oldest
  /// first; missing ones are added to the wait as tokens. True when it changed anything.
  bool heal(const EngineSums& sums, double now);
  void forget_router(RouterId router, double now);
  void forget_engine(EngineId engine);
  /// Ends at most `limit` requests that expired before `now`; looks at 4 x `limit` at most.
  std::size_t expire(double now, std::size_t limit);

  /// Seconds until an engine has computed what was placed there. `tokens_per_second` converts the
  /// tokens that only a heartbeat reported.
  [[nodiscard]] double wait(EngineId engine, double now, double tokens_per_second) const noexcept;
  [[nodiscard]] std::uint32_t prefills(EngineId engine) const noexcept;
  [[nodiscard]] std::uint32_t decodes(EngineId engine) const noexcept;
  /// Mean predicted computation of the requests in the queue of the engine; 0 without one.
  [[nodiscard]] double mean_prefill(EngineId engine) const noexcept;
  /// The sums of one router as the account has them.
  [[nodiscard]] EngineSums sums(RouterId router, EngineId engine) const noexcept;
  [[nodiscard]] std::size_t size() const noexcept { return used_; }

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  struct Entry {
    Request request;
    std::uint32_t next = kNone;  ///< In the queue of its engine, or in the list of free entries.
    std::uint32_t previous = kNone;
    bool used = false;
  };
  struct Queue {
    std::uint32_t head = kNone;
    std::uint32_t tail = kNone;
    std::uint32_t length = 0;
    double began = 0;    ///< When the engine could begin with the head.
    double drained = 0;  ///< When all are computed, as predicted.
    double behind = 0;   ///< Computation of all but the head.
    double work = 0;     ///< Computation of all.
  };
  /// The part of one router at one engine.
  struct Share {
    std::uint32_t prefills = 0;
    std::uint32_t decodes = 0;
    std::uint64_t tokens = 0;
    std::int64_t missing_tokens = 0;  ///< Reported by the last heartbeat, and not in `tokens`.
    std::int32_t missing_decodes = 0;
  };

  [[nodiscard]] std::size_t home(RouterId router, std::uint64_t id) const noexcept;
  [[nodiscard]] std::uint32_t lookup(RouterId router, std::uint64_t id) const noexcept;
  /// Whether the engine must have computed this request before those behind it. One of another
  /// router that was placed at nearly the same time may have arrived there first.
  [[nodiscard]] bool is_next(std::uint32_t index) const;
  void unlink_place(std::uint32_t index) noexcept;
  void remove(std::uint32_t index, double now);
  void leave_queue(std::uint32_t index, double now);
  void predict(EngineId engine);
  [[nodiscard]] Share& share(RouterId router, EngineId engine) noexcept {
    return shares_[static_cast<std::size_t>(router) * options_.max_engines + engine];
  }
  [[nodiscard]] const Share& share(RouterId router, EngineId engine) const noexcept {
    return shares_[static_cast<std::size_t>(router) * options_.max_engines + engine];
  }

  Options options_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> places_;  ///< Open addressing from (router, id) to entry.
  std::vector<Queue> queues_;
  std::vector<Share> shares_;
  std::vector<std::int64_t> missing_tokens_;  ///< By engine: of all routers.
  std::uint32_t free_ = kNone;
  std::uint32_t used_ = 0;
  std::uint32_t ever_used_ = 0;     ///< Entries beyond this were never used.
  std::uint32_t next_checked_ = 0;  ///< Where expire() goes on.
};

}  // namespace pegaflow::index
