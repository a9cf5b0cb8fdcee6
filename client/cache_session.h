#pragma once
/// \file
/// The scheduler's side of an engine: lookups of prefixes, and claims on them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "client/link_options.h"
#include "client/session_types.h"

namespace pegaflow {

/// Queries the node's server for one engine core. No call blocks longer than its `patience`.
/// A question returns a ticket at once and its answer is taken later, because a scheduler step must
/// not wait. The session owns a private thread that connects, reconnects and attaches by itself;
/// while there is no server, or the breaker is open, a question fails at once with kPeerLost.
///
/// Thread-safe. Creating one in a process that forks afterwards is a mistake (threads do not fork).
class CacheSession {
 public:
  using Options = LinkOptions;
  using Ticket = SessionTicket;
  using Answer = SessionAnswer;
  using Compute = SessionCompute;
  using Boundaries = SessionBoundaries;
  using Journal = SessionJournal;
  using Reset = SessionReset;
  static constexpr std::size_t kMaxKeys = 8192;  ///< The limit for one question.

  /// Starts the thread; it connects in the background.
  /// Errors: kInvalidArgument for an invalid option, kInternal when no thread can start.
  static Result<std::unique_ptr<CacheSession>> start(const Options& options);

  /// Ends all claims of the session and joins the thread, within 1 s.
  ~CacheSession();

  /// Asks how many leading keys are sealed, or at one other node; holds nothing. Considers at most
  /// kMaxKeys keys.
  ///
  /// In a namespace with several kinds of blocks the keys are those of units, from the prompt's
  /// beginning on, and the answer counts units. `local_units`: the leading units that the engine
  /// has itself, a multiple of the alignment. Errors: kPeerLost when there is no server, kBusy when
  /// too many questions are pending. The answer is kRefused for local units of a server without
  /// several kinds, and kInvalidArgument for ones that do not fit the alignment.
  /// `hints` are a router's; older servers ignore them.
  Result<Ticket> lookup(std::span<const BlockKey> keys, std::size_t local_units = 0,
                        const SessionHints& hints = {});

  /// The number of answers that have arrived, and of calls of interrupt(). Thread-safe, does not
  /// block. A question that the server fails, or whose deadline passes, has an answer too.
  [[nodiscard]] std::uint64_t events() const;
  /// Sleeps until events() is no longer `seen`, for at most `patience`; whether it changed. A
  /// caller that reads events(), takes the answers that it waits for, and finds none, misses no
  /// answer here.
  bool await_event(std::uint64_t seen, Duration patience);
  /// Ends await_event() of another thread, or its next one with an older `seen`. Thread-safe.
  void interrupt();

  /// Asks for a claim on the longest sealed prefix of `keys`, and on blocks behind it that are in
  /// flight from another node: a load waits for them, and some may not come. With `compute` only
  /// those are fetched that are predicted to arrive sooner than they would be computed.
  ///
  /// With several kinds the claim is on all blocks that the longest restorable prefix needs beyond
  /// `local_units`; the answer has their ranges.
  /// Errors: as lookup().
  Result<Ticket> claim(std::span<const BlockKey> keys, const Compute& compute,
                       std::size_t local_units = 0, const SessionHints& hints = {});
  Result<Ticket> claim(std::span<const BlockKey> keys) { return claim(keys, Compute{}); }

  /// Asks for every length at which a prompt can be restored; holds nothing. Only for several
  /// kinds. Errors: as lookup(); the answer is kInvalidArgument in a namespace of one kind.
  Result<Ticket> boundaries(std::span<const BlockKey> keys, std::size_t local_units = 0);
  /// Returns its answer, as take() does.
  std::optional<Result<Boundaries>> take_boundaries(Ticket ticket,
                                                    Duration patience = Duration::zero());

  /// Returns the answer to a question, after waiting at most `patience`; no value: not yet. An
  /// answer is returned once, and the ticket is then forgotten. The error is kTimeout after the
  /// question's deadline, kPeerLost when the connection ended, kGone for an unknown ticket.
  std::optional<Result<Answer>> take(Ticket ticket, Duration patience = Duration::zero());

  /// Drops a question. A claim that its answer carries is ended at once.
  void forget(Ticket ticket);

  /// Ends a claim. Its loads continue.
  void unclaim(const Id128& token);

  /// Whether a router wants to know which blocks prompts have, as far as the server has reported.
  /// While it is not known, or none wants to, this is true at most once a second.
  [[nodiscard]] bool wants_chains();
  /// Reports to routers, through the server, which full blocks the prompt of a request has: those
  /// of the first kind of rule prefix, from the first on, at most kMaxKeys. `session` is the
  /// request's session id, of which only a hash is sent. Does not wait; it is dropped without a
  /// server that has this feature.
  void report_chain(std::string_view session, std::span<const BlockKey> keys,
                    std::uint32_t block_tokens);

  static constexpr std::uint64_t kJournalEnd = ~std::uint64_t{0};
  /// Asks for the entries since an earlier answer with this `space` and `position`. With
  /// kJournalEnd only the current position is returned; the server records no entries before a
  /// client's first such question. A block has an entry when it is sealed, and again when a client
  /// claims it or tries to save it. After a restart of the server everything is `lost`.
  /// Errors: as lookup().
  Result<Ticket> journal(std::uint64_t space, std::uint64_t position);
  /// Returns its answer, as take() does.
  std::optional<Result<Journal>> take_journal(Ticket ticket, Duration patience = Duration::zero());

  /// Waits for a job of another engine and its scheduler's earlier jobs to end: sealed or dropped.
  /// `server` is the server that stores them. The answer comes within `patience` (at most 10 s),
  /// with success or an error; in each case a lookup finds the blocks that were sealed. `begun`:
  /// only until all ranks of that engine, which is one of this node, have begun the job, so that a
  /// lookup finds what it offers.
  /// Errors: as lookup(), and kInvalidArgument for a patience that is not positive or longer.
  Result<Ticket> await_job(const Id128& server, const JobId& job, Duration patience,
                           bool begun = false);
  /// Returns its answer, as take() does: when it was sent, all jobs of that scheduler up to this
  /// number were over, or with `begun` had begun. 0: unknown, because a server is older; the job
  /// itself is over nevertheless. Further errors: kGone when that server or the engine of the job
  /// is not connected, kBusy when too many calls wait, kRefused when this node's server or that one
  /// is too old.
  std::optional<Result<std::uint64_t>> take_wait(Ticket ticket,
                                                 Duration patience = Duration::zero());

  /// Makes everything that the namespace holds unfindable. The answer comes within `deadline`; the
  /// server waits for nodes that do not confirm, so it may take half a second.
  /// Errors: as lookup().
  Result<Ticket> ask_reset(Duration deadline);
  /// Returns its answer, as take() does. After an error the reset may nevertheless have happened.
  std::optional<Result<Reset>> take_reset(Ticket ticket, Duration patience = Duration::zero());
  /// Resets and waits at most `patience` for the answer.
  /// Errors: kTimeout, kPeerLost.
  Result<Reset> reset_cache(Duration patience);

  [[nodiscard]] LinkStatus status() const;
  /// Waits at most `patience` for this state of the link; false after that. For tools and tests: an
  /// engine never waits for the cache.
  bool wait_for(LinkState state, Duration patience) const;

 private:
  class Impl;
  explicit CacheSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
