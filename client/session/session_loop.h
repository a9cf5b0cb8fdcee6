#pragma once
/// \file
/// The private thread of a CacheSession.

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/block_key.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "base/os/mailbox.h"
#include "client/link.h"
#include "client/loop.h"
#include "client/session/question_table.h"

namespace pegaflow {

/// A command from the engine's scheduler to the private thread.
struct SessionCommand {
  enum class Kind : std::uint8_t {
    kClose,
    kLookup,
    kClaim,
    kBoundaries,
    kUnclaim,
    kReset,
    kJournal,
    kAwait,
    kChain
  };
  Kind kind = Kind::kClose;
  QuestionTable::Ticket ticket{};
  Id128 token{};  ///< The claim's name, chosen by the client.
  std::vector<BlockKey> keys{};
  std::size_t local_units = 0;  ///< The leading units that the engine has itself.
  Duration deadline{};
  SessionCompute compute{};  ///< For a claim.
  SessionHints hints{};      ///< For a lookup or a claim.
  std::uint64_t space = 0;   ///< For a journal, with `position`.
  std::uint64_t position = 0;
  Id128 server{};  ///< The server of the job.
  JobId job{};
  bool begun = false;              ///< Awaits the beginning of the job, not its end.
  std::uint64_t session = 0;       ///< With a chain: the name of the request's session,
  std::uint32_t block_tokens = 0;  ///< and the tokens of a block.
};

/// Attaches to an instance and sends its questions. Bound to its KJ thread.
class SessionLoop final : private Link::Role {
 public:
  /// All outlive the loop.
  SessionLoop(kj::AsyncIoContext& io, const LinkOptions& options, StatusBoard& board,
              Mailbox<SessionCommand>& commands, QuestionTable& questions,
              std::atomic<bool>& wants_chains);

  /// Resolves after a kClose command. Throws for a broken invariant.
  kj::Promise<void> run();

 private:
  kj::Promise<Result<void>> begin() override;
  kj::Promise<void> end() override { return kj::READY_NOW; }

  void handle(SessionCommand&& command);
  void lookup(SessionCommand&& command);
  void claim(SessionCommand&& command);
  void boundaries(SessionCommand&& command);
  /// Errors: kRefused for a question about several kinds to a server that has no such feature.
  [[nodiscard]] Result<void> may_ask(const SessionCommand& command) const;
  void reset(SessionCommand&& command);
  void journal(SessionCommand&& command);
  void await_job(SessionCommand&& command);
  void unclaim(const Id128& token);
  void report_chain(const SessionCommand& command);
  void answer_claim(QuestionTable::Ticket ticket, const Id128& token,
                    Result<QuestionTable::Outcome>&& outcome);

  const LinkOptions& options_;
  const StatusBoard& board_;
  QuestionTable& questions_;
  Mailbox<SessionCommand>& commands_;
  std::atomic<bool>& wants_chains_;  ///< As the server has reported.
  Link link_;
  MailboxPump pump_;
  LoopTasks tasks_;  ///< Last: its steps use all of the above.
};

}  // namespace pegaflow
