#pragma once
/// \file
/// The scheduler's side of an engine: which prefixes the cache has, and claims on them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "client/link_options.h"

namespace pegaflow {

/// Asks the node's server on behalf of one engine core. Never blocks longer than it is told to.
///
/// Questions are asked by ticket and answered later, because a scheduler step must not wait. The
/// session owns a private thread that connects, reconnects and attaches by itself; while there is
/// no server, or the breaker is open, a question fails at once with kPeerLost.
///
/// Thread-safe. Creating one in a process that forks afterwards is a mistake (threads do not fork).
class CacheSession {
 public:
  using Options = LinkOptions;
  enum class Ticket : std::uint64_t {};
  static constexpr std::size_t kMaxKeys = 8192;  ///< That a question looks at.

  /// Starts the thread; it connects in the background.
  /// Errors: kInvalidArgument for an option without sense, kInternal when no thread can start.
  static Result<std::unique_ptr<CacheSession>> start(const Options& options);

  /// Ends all claims of the session and joins the thread, within 1 s.
  ~CacheSession();

  struct Answer {
    std::size_t blocks = 0;  ///< Leading keys that are sealed, here or at another node, or claimed.
    bool complete = false;   ///< All ranks of the instance are connected; else blocks is 0.
    Id128 token;             ///< Of the claim; none for a lookup or an empty claim.
    std::size_t coming = 0;  ///< Of the blocks, those at the end that another node has.
    /// Of a claim: when the first and the last of them are predicted to arrive, counted from the
    /// answer; 0: not known.
    Duration first{};
    Duration last{};
  };

  /// Asks how many leading keys are sealed, or at one other node; holds nothing. At most kMaxKeys;
  /// later ones are not looked at. Errors: kPeerLost when there is no server, kBusy when too many
  /// questions are under way.
  Result<Ticket> lookup(std::span<const BlockKey> keys);

  /// How long the engine computes what it does not load.
  struct Compute {
    Duration delay{};      ///< Before it begins.
    Duration per_block{};  ///< 0: not known.
  };
  /// Asks for a claim on the longest sealed prefix of `keys`, and on blocks behind it that are in
  /// flight from another node: a load waits for them, and some may not come. With `compute` only
  /// those are fetched that are predicted to arrive sooner than they would be computed.
  /// Errors: as lookup().
  Result<Ticket> claim(std::span<const BlockKey> keys, const Compute& compute);
  Result<Ticket> claim(std::span<const BlockKey> keys) { return claim(keys, Compute{}); }

  /// The answer to a question, waiting at most `patience` for it; no value: not yet. An answer is
  /// handed out once, and the ticket is then forgotten. The error is kTimeout after the question's
  /// deadline, kPeerLost when the connection ended, kGone for an unknown ticket.
  std::optional<Result<Answer>> take(Ticket ticket, Duration patience = Duration::zero());

  /// Nobody will take this answer. A claim that arrives for it is ended at once.
  void forget(Ticket ticket);

  /// Ends a claim. Its loads go on.
  void unclaim(const Id128& token);

  /// What the cache says of the blocks of our namespace, one statement a key.
  struct Journal {
    std::uint64_t space = 0;  ///< And where to go on: for the next question.
    std::uint64_t position = 0;
    bool lost = false;           ///< Statements before these are missing: all may be gone.
    bool more = false;           ///< There are more: ask again.
    std::vector<BlockKey> keys;  ///< In the order in which the statements became true.
    std::vector<bool> there;     ///< A key each: its block became findable; false: it ceased to be.
  };
  static constexpr std::uint64_t kJournalEnd = ~std::uint64_t{0};
  /// Asks what has been said since an earlier answer gave `space` and `position`. With kJournalEnd
  /// only where that is now; the server notes nothing before the first such question of anybody.
  /// That a block is there is said when it is sealed, and again when somebody claims it or wants to
  /// save it. After another server was started all is `lost`.
  /// Errors: as lookup().
  Result<Ticket> journal(std::uint64_t space, std::uint64_t position);
  /// The answer to it, as take().
  std::optional<Result<Journal>> take_journal(Ticket ticket, Duration patience = Duration::zero());

  /// Asks to be told once that job of another engine, and its scheduler's jobs before it, are over:
  /// sealed or dropped. `server` is where they are saved. The answer comes within `patience` (at
  /// most 10 s), with success or an error; in each case a lookup finds what there is.
  /// Errors: as lookup(), and kInvalidArgument for a patience that is not positive or longer.
  Result<Ticket> await_job(const Id128& server, const JobId& job, Duration patience);
  /// The answer to it, as take(). Further errors: kGone when that server or the engine of the job
  /// is not there, kBusy when too many wait, kRefused when a server, ours or that, is too old.
  std::optional<Result<void>> take_wait(Ticket ticket, Duration patience = Duration::zero());

  /// Outcome of a reset that the server of this session has done.
  struct Reset {
    std::uint64_t generation = 0;
    /// Addresses of nodes that did not confirm it in time: their own engines may still find what
    /// was saved before, until those nodes can be reached.
    std::vector<std::string> unconfirmed = {};
  };

  /// Makes everything that the namespace holds unfindable. The answer comes within `deadline`; the
  /// server waits for nodes that do not confirm, so it may take half a second.
  /// Errors: as lookup().
  Result<Ticket> ask_reset(Duration deadline);
  /// The answer to it, as take(). After an error the reset may have happened all the same.
  std::optional<Result<Reset>> take_reset(Ticket ticket, Duration patience = Duration::zero());
  /// Both at once. Waits at most `patience`.
  /// Errors: kTimeout, kPeerLost.
  Result<Reset> reset_cache(Duration patience);

  [[nodiscard]] LinkStatus status() const;
  /// Waits at most `patience` until the link stands so; false if it does not. For tools and tests:
  /// an engine never waits for us.
  bool wait_for(LinkState state, Duration patience) const;

 private:
  class Impl;
  explicit CacheSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
