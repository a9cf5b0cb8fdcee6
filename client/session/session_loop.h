#pragma once
/// \file
/// What a CacheSession does on its private thread.

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

/// A wish of the engine's scheduler on its way to the private thread.
struct SessionCommand {
  enum class Kind : std::uint8_t { kClose, kLookup, kClaim, kUnclaim, kReset, kJournal, kAwait };
  Kind kind = Kind::kClose;
  QuestionTable::Ticket ticket{};
  Id128 token{};  ///< Of a claim: the client names it.
  std::vector<BlockKey> keys{};
  Duration deadline{};
  CacheSession::Compute compute{};  ///< Of a claim.
  std::uint64_t space = 0;          ///< And the position in its journal.
  std::uint64_t position = 0;
  Id128 server{};  ///< That knows of the job.
  JobId job{};
};

/// Attaches to an instance and asks its questions. Bound to its KJ thread.
class SessionLoop final : private Link::Role {
 public:
  /// All outlive the loop.
  SessionLoop(kj::AsyncIoContext& io, const LinkOptions& options, StatusBoard& board,
              Mailbox<SessionCommand>& commands, QuestionTable& questions);

  /// Until a kClose command came. Throws for a broken invariant.
  kj::Promise<void> run();

 private:
  kj::Promise<Result<void>> begin() override;
  kj::Promise<void> end() override { return kj::READY_NOW; }

  void handle(SessionCommand&& command);
  void lookup(SessionCommand&& command);
  void claim(SessionCommand&& command);
  void reset(SessionCommand&& command);
  void journal(SessionCommand&& command);
  void await_job(SessionCommand&& command);
  void unclaim(const Id128& token);
  void answer_claim(QuestionTable::Ticket ticket, const Id128& token,
                    Result<QuestionTable::Outcome>&& outcome);

  const LinkOptions& options_;
  QuestionTable& questions_;
  Mailbox<SessionCommand>& commands_;
  Link link_;
  MailboxPump pump_;
  LoopTasks tasks_;  ///< Last: its steps use all of the above.
};

}  // namespace pegaflow
