#include "client/cache_session.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include <poll.h>
#include <unistd.h>

#include "base/log.h"
#include "base/os/mailbox.h"
#include "base/os/thread.h"
#include "base/session_name.h"
#include "base/units.h"
#include "capnp/wire/codec.h"
#include "client/loop.h"
#include "client/session/question_table.h"
#include "client/session/session_loop.h"
#include "client/status_board.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"session"};

/// One for each request of a busy scheduler step; each may carry 256 KiB of keys.
constexpr std::size_t kMaxQuestions = 1024;

/// How often a server is asked whether its routers want chains.
constexpr std::chrono::seconds kChainInterval{1};

/// The server's own limit.
constexpr Duration kLongestWait = std::chrono::seconds(10);

using Kind = SessionCommand::Kind;

static_assert(CacheSession::kMaxKeys == kMaxKeysPerCall);

std::vector<BlockKey> first_keys(std::span<const BlockKey> keys) {
  keys = keys.first(std::min(keys.size(), CacheSession::kMaxKeys));
  return {keys.begin(), keys.end()};
}

}  // namespace

class CacheSession::Impl {
 public:
  explicit Impl(const Options& options)
      : options_(options), commands_(4 * kMaxQuestions), questions_(kMaxQuestions) {}

  Result<void> start() {
    PEGA_TRY_LET(thread_, start_thread("pega-session", [this] { thread_main(); }));
    return {};
  }

  ~Impl() {
    if (!thread_.joinable()) return;
    // The thread takes commands until it ends, so room becomes free soon.
    while (!commands_.try_send(SessionCommand{})) std::this_thread::yield();
    thread_.join();
  }

  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }

  Result<Ticket> ask(SessionCommand command) {
    PEGA_TRY(may_ask());
    PEGA_TRY_LET(const Ticket ticket, questions_.add());
    command.ticket = ticket;
    if (!commands_.try_send(std::move(command))) {
      questions_.forget(ticket);
      return fail(Errc::kBusy, "the queue of the session's thread is full");
    }
    return ticket;
  }

  std::optional<Result<QuestionTable::Outcome>> take(Ticket ticket, Duration patience) {
    return questions_.take(ticket, patience);
  }

  void forget(Ticket ticket) {
    const std::optional<QuestionTable::Outcome> answered = questions_.forget(ticket);
    if (answered && !answered->answer.token.is_none()) unclaim(answered->answer.token);
  }

  void unclaim(const Id128& token) {
    if (forked()) return;
    if (!commands_.try_send(SessionCommand{.kind = Kind::kUnclaim, .token = token})) {
      kLog.warn("command queue full, a claim stays until the server revokes it token={}",
                to_string(token));
    }
  }

  bool wants_chains() {
    if (wants_chains_) return board_.state() == LinkState::kReady;
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    auto last = chain_tried_.load();
    constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::min();
    if (last != kNever && now - last < Duration(kChainInterval).count()) return false;
    return board_.state() == LinkState::kReady && chain_tried_.compare_exchange_strong(last, now);
  }

  void report_chain(SessionCommand command) {
    // Without room for it, a router knows a prompt less.
    if (may_ask() && !commands_.try_send(std::move(command))) {
      kLog.debug("command queue full, a prompt's blocks are not reported to routers");
    }
  }

  [[nodiscard]] const StatusBoard& board() const { return board_; }
  [[nodiscard]] QuestionTable& questions() { return questions_; }

 private:
  Result<void> may_ask() const {
    if (forked()) return fail(Errc::kPeerLost, "the session belongs to the parent process");
    const LinkState state = board_.state();
    if (state == LinkState::kReady) return {};
    return fail(Errc::kPeerLost, "the link to the server is {}", to_string(state));
  }

  void thread_main() {
    std::optional<Error> broken = run_loop([this](kj::AsyncIoContext& io) {
      SessionLoop loop(io, options_, board_, commands_, questions_, wants_chains_);
      loop.run().wait(io.waitScope);
    });
    if (broken) retire(*broken);
  }

  /// Handles a broken invariant: the cache stays off, and every question fails with kPeerLost.
  void retire(const Error& why) {
    board_.set(LinkState::kRetired, to_string(why));
    kLog.error("internal error, the cache stays off instance={} error=\"{}\"", options_.instance,
               to_string(why));
    for (bool closing = false; !closing;) {
      commands_.drain([&](SessionCommand&& command) {
        closing = closing || command.kind == Kind::kClose;
        static_cast<void>(questions_.answer(
            command.ticket, fail(Errc::kPeerLost, "the cache is off: {}", why.detail)));
      });
      pollfd wanted{commands_.fd(), POLLIN, 0};
      if (!closing) ::poll(&wanted, 1, -1);
    }
  }

  const Options options_;
  const pid_t pid_ = ::getpid();
  StatusBoard board_;
  std::atomic<bool> wants_chains_ = false;
  /// When wants_chains() was last true without a router that wants them.
  std::atomic<std::int64_t> chain_tried_ = std::numeric_limits<std::int64_t>::min();
  Mailbox<SessionCommand> commands_;
  QuestionTable questions_;
  std::thread thread_;
};

Result<std::unique_ptr<CacheSession>> CacheSession::start(const Options& options) {
  PEGA_TRY(validate(options));
  auto impl = std::make_unique<Impl>(options);
  PEGA_TRY(impl->start());
  return std::unique_ptr<CacheSession>(new CacheSession(std::move(impl)));
}

CacheSession::CacheSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CacheSession::~CacheSession() {
  // A child process does not have the thread: joining it, or destroying its mutexes, never returns.
  if (impl_->forked()) static_cast<void>(impl_.release());
}

Result<CacheSession::Ticket> CacheSession::lookup(std::span<const BlockKey> keys,
                                                  std::size_t local_units,
                                                  const SessionHints& hints) {
  return impl_->ask({.kind = Kind::kLookup,
                     .keys = first_keys(keys),
                     .local_units = local_units,
                     .hints = hints});
}

Result<CacheSession::Ticket> CacheSession::claim(std::span<const BlockKey> keys,
                                                 const Compute& compute, std::size_t local_units,
                                                 const SessionHints& hints) {
  return impl_->ask({.kind = Kind::kClaim,
                     .token = Id128::random(),
                     .keys = first_keys(keys),
                     .local_units = local_units,
                     .compute = compute,
                     .hints = hints});
}

Result<CacheSession::Ticket> CacheSession::boundaries(std::span<const BlockKey> keys,
                                                      std::size_t local_units) {
  return impl_->ask(
      {.kind = Kind::kBoundaries, .keys = first_keys(keys), .local_units = local_units});
}

std::optional<Result<CacheSession::Boundaries>> CacheSession::take_boundaries(Ticket ticket,
                                                                              Duration patience) {
  std::optional<Result<QuestionTable::Outcome>> outcome = impl_->take(ticket, patience);
  if (!outcome) return std::nullopt;
  return std::move(*outcome).map(
      [](QuestionTable::Outcome&& row) { return std::move(row.boundaries); });
}

std::optional<Result<CacheSession::Answer>> CacheSession::take(Ticket ticket, Duration patience) {
  std::optional<Result<QuestionTable::Outcome>> outcome = impl_->take(ticket, patience);
  if (!outcome) return std::nullopt;
  return std::move(*outcome).map(
      [](QuestionTable::Outcome&& row) { return std::move(row.answer); });
}

std::uint64_t CacheSession::events() const { return impl_->questions().events(); }
bool CacheSession::await_event(std::uint64_t seen, Duration patience) {
  return impl_->questions().await_event(seen, patience);
}
void CacheSession::interrupt() { impl_->questions().interrupt(); }

void CacheSession::forget(Ticket ticket) { impl_->forget(ticket); }
void CacheSession::unclaim(const Id128& token) { impl_->unclaim(token); }

Result<CacheSession::Ticket> CacheSession::journal(std::uint64_t space, std::uint64_t position) {
  return impl_->ask({.kind = Kind::kJournal, .space = space, .position = position});
}

std::optional<Result<CacheSession::Journal>> CacheSession::take_journal(Ticket ticket,
                                                                        Duration patience) {
  std::optional<Result<QuestionTable::Outcome>> outcome = impl_->take(ticket, patience);
  if (!outcome) return std::nullopt;
  return std::move(*outcome).map(
      [](QuestionTable::Outcome&& row) { return std::move(row.journal); });
}

Result<CacheSession::Ticket> CacheSession::await_job(const Id128& server, const JobId& job,
                                                     Duration patience, bool begun) {
  if (patience <= Duration::zero() || patience > kLongestWait) {
    return fail(Errc::kInvalidArgument, "await_job: patience {} is not between 0 and {}",
                format_duration(patience), format_duration(kLongestWait));
  }
  return impl_->ask(
      {.kind = Kind::kAwait, .deadline = patience, .server = server, .job = job, .begun = begun});
}

std::optional<Result<std::uint64_t>> CacheSession::take_wait(Ticket ticket, Duration patience) {
  std::optional<Result<QuestionTable::Outcome>> outcome = impl_->take(ticket, patience);
  if (!outcome) return std::nullopt;
  return std::move(*outcome).map([](const QuestionTable::Outcome& row) { return row.reached; });
}

Result<CacheSession::Ticket> CacheSession::ask_reset(Duration deadline) {
  return impl_->ask({.kind = Kind::kReset, .deadline = deadline});
}

std::optional<Result<CacheSession::Reset>> CacheSession::take_reset(Ticket ticket,
                                                                    Duration patience) {
  std::optional<Result<QuestionTable::Outcome>> outcome = impl_->take(ticket, patience);
  if (!outcome) return std::nullopt;
  return std::move(*outcome).map([](QuestionTable::Outcome&& row) { return std::move(row.reset); });
}

Result<CacheSession::Reset> CacheSession::reset_cache(Duration patience) {
  PEGA_TRY_LET(const Ticket ticket, ask_reset(patience));
  // The private thread answers at the deadline; the extra second allows for a busy machine.
  auto answer = take_reset(ticket, patience + std::chrono::seconds(1));
  if (!answer) {
    impl_->forget(ticket);
    return fail(Errc::kTimeout, "reset_cache: no response");
  }
  return std::move(*answer);
}

bool CacheSession::wants_chains() { return impl_->wants_chains(); }

void CacheSession::report_chain(std::string_view session, std::span<const BlockKey> keys,
                                std::uint32_t block_tokens) {
  impl_->report_chain({.kind = Kind::kChain,
                       .keys = first_keys(keys),
                       .session = session_name(session),
                       .block_tokens = block_tokens});
}

LinkStatus CacheSession::status() const { return impl_->board().get(); }
bool CacheSession::wait_for(LinkState state, Duration patience) const {
  return impl_->board().wait_for(state, patience);
}

}  // namespace pegaflow
