#pragma once
/// \file
/// The choice of an engine for a request, by one cost in seconds.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/clock.h"
#include "base/error.h"
#include "index/placement/decision.h"
#include "index/placement/rates.h"
#include "index/placement/record.h"

namespace pegaflow::index {

struct PlacementState;

/// Chooses engines, and accounts for what was placed where.
///
/// The cost of engine e for a request of n tokens, in seconds:
///
///     cost = max(queue, fetch) + prefill + delay + decode + space + room
///
/// for the cheapest source among {none} and the pools that hold the longest prefixes. The choice is
/// random, from a seeded generator, among candidates within max(2 ms, 5 %) of the least cost that
/// pull the fewest bytes. docs/routing.md explains each term.
///
/// Thread-bound; no I/O and no clock: time is a parameter, and it must not go backwards. All memory
/// is allocated at the start; a decision allocates nothing.
class Placement {
 public:
  using Options = PlacementOptions;
  /// Errors: kInvalidArgument that names the option and its range.
  static Result<std::unique_ptr<Placement>> create(const Options& options);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  // ---- the fleet

  /// Errors: kOutOfCapacity at max_engines; kInvalidArgument when its node is unknown.
  Result<EngineId> add_engine(const EngineSetup& setup);
  /// Forgets the engine and what was placed there. Unknown ids are no error.
  void remove_engine(EngineId engine);
  /// Errors: kOutOfCapacity at max_nodes.
  Result<NodeId> add_node();
  /// Engines of the node stay, without a pool.
  void remove_node(NodeId node);

  /// The engine uses the pool of `node` from now on; kNoNode: none. Unknown ids are no error.
  void set_node(EngineId engine, NodeId node);

  /// The measured link from the pool of `from` to the node `to` (the servers' `/links`). Values
  /// that are not finite or not above 0 are ignored.
  void set_link(NodeId from, NodeId to, LinkRate rate);
  /// The measured loads from a node's own pool into its engines.
  void set_pool(NodeId node, LinkRate rate);
  void set_bytes_per_token(double bytes);
  void set_load(EngineId engine, const EngineLoad& load, TimePoint now);

  // ---- decisions

  /// Chooses one of the request's candidates. Changes no account: see placed().
  /// Errors: kInvalidArgument when no candidate is an engine, or the prompt has no token or no
  /// block size.
  Result<Decision> choose(const PlacementRequest& request, TimePoint now);

  /// Chooses a prefill and a decode engine: the best pair among the 4 best of each, or one decode
  /// engine alone when that costs no more. `decode.prompt_tokens` equals that of `prefill`.
  /// Errors: as choose(), for both lists.
  Result<PairDecision> choose_pair(const PlacementRequest& prefill, const PlacementRequest& decode,
                                   TimePoint now);

  /// Chooses the decode engine for a prompt that the prefill engine `from` has computed: by the
  /// transfer and the load, at random among near-equals. Of the decision `decode`, `transfer`,
  /// `cost` and `pairs` are set.
  /// Errors: as choose(), and kInvalidArgument when `from` or all candidates have no node.
  Result<PairDecision> choose_decode(EngineId from, const PlacementRequest& decode, TimePoint now);

  // ---- accounts

  /// Records that the request `id` goes where `terms` says, and returns the record for the other
  /// routers. `id` is unique among this router's requests in flight.
  /// Errors: kBusy at max_requests: the request may be sent all the same, uncounted.
  Result<PlacementRecord> placed(std::uint64_t id, const Terms& terms, std::uint32_t prompt_tokens,
                                 TimePoint now);
  /// The first token came: the prefill leaves the queue, and its engine's rate learns from it.
  /// Unknown ids (timed out) are no error; false for them.
  bool first_token(std::uint64_t id, TimePoint now);
  /// The prompt was computed at an unknown time before, as with an answer that is not streamed: the
  /// prefill leaves the queue and teaches no rate. False: unknown, or its first token came before.
  bool computed(std::uint64_t id, TimePoint now);
  /// Its engine evicted so many tokens that the request was to reuse, before it began with it: it
  /// computes them too. Unknown ids, and those with a first token, are no error.
  void lost(std::uint64_t id, std::uint32_t tokens);
  /// The request ended, in whatever way. A request that ends before its first token teaches
  /// nothing.
  bool done(std::uint64_t id, TimePoint now);
  /// The cached tokens that the engine reported for a request, before done().
  void reported_cached(std::uint64_t id, std::uint32_t cached_tokens);

  /// A record of another router. Records of unknown engines, and of this router, are ignored.
  void apply(const PlacementRecord& record, TimePoint now);
  /// A heartbeat of another router: replaces its sums for the engine.
  void apply(const EngineSums& sums, TimePoint now);
  /// The other live routers, in the order in which all of them choose when requests reach several
  /// of them at one instant: those before this one, and those after it. See Turns.
  void set_turns(std::span<const RouterId> before, std::span<const RouterId> after);
  /// Whether the choice for a request that arrived at this time need not wait for their records.
  [[nodiscard]] bool is_turn(TimePoint arrived) const;
  /// The time for which it waits for them at most: a share of the least time in which a candidate
  /// computes the prompt.
  [[nodiscard]] Duration turn_limit(const PlacementRequest& request) const;
  /// The time at which its wait ends, if nothing is placed meanwhile; `limit` is its turn_limit().
  [[nodiscard]] TimePoint turn_end(TimePoint arrived, Duration limit) const;
  /// Forgets another router, as when its heartbeats stop.
  void forget_router(RouterId router, TimePoint now);
  /// This router's own sums for an engine, for its heartbeat.
  [[nodiscard]] EngineSums sums(EngineId engine) const;

  /// Ends requests whose time limit passed, `limit` at most; call it once a second or more often.
  /// Returns the number of requests that it ended.
  std::size_t expire(TimePoint now, std::size_t limit = 1024);

  // ---- for metrics and /routes

  [[nodiscard]] const PrefillRate& rate(EngineId engine) const;
  [[nodiscard]] PredictionError& error(EngineId engine);
  [[nodiscard]] double queue_seconds(EngineId engine, TimePoint now) const;
  [[nodiscard]] LinkRate link(NodeId from, NodeId to) const;

  using Stats = PlacementStats;
  [[nodiscard]] Stats stats() const;

 private:
  explicit Placement(std::unique_ptr<PlacementState> state);
  std::unique_ptr<PlacementState> state_;
};

}  // namespace pegaflow::index
