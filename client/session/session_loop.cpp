#include "client/session/session_loop.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/log.h"
#include "capnp/wire/codec.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"session"};

capnp::MessageSize size_of(std::size_t keys) {
  return {keys_words(keys, BlockKey::kMaxBytes) + 16, 0};
}

/// A time on the wire.
template <typename Time>
std::uint32_t at_most_32_bits(Time time) {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(time.count(), 0, UINT32_MAX));
}

Result<SessionJournal> read_journal(wire::Session::JournalResults::Reader answer) {
  const auto keys = answer.getKeys();
  const auto there = answer.getThere();
  if (keys.size() != there.size() * BlockKey::kMaxBytes || there.size() > kMaxJournalEntries) {
    return fail(Errc::kInternal, "{} bytes of keys for {} entries", keys.size(), there.size());
  }
  const auto kinds = answer.getKinds();
  if (kinds.size() != 0 && kinds.size() != there.size()) {
    return fail(Errc::kInternal, "{} kinds for {} entries", kinds.size(), there.size());
  }
  SessionJournal journal{.space = answer.getSpace(),
                         .position = answer.getPosition(),
                         .lost = answer.getLost(),
                         .more = answer.getMore(),
                         .keys = std::vector<BlockKey>(there.size()),
                         .there = {},
                         .kinds = std::vector<std::uint8_t>(there.size())};
  std::copy(kinds.begin(), kinds.end(), journal.kinds.begin());
  for (unsigned i = 0; i < there.size(); ++i) {
    std::memcpy(journal.keys[i].bytes.data(), keys.begin() + i * BlockKey::kMaxBytes,
                BlockKey::kMaxBytes);
    journal.there.push_back(there[i] != 0);
  }
  return journal;
}

/// The claimed blocks of each kind. `units`: the keys of the question; no kind has more blocks.
Result<std::vector<KindRange>> read_ranges(capnp::List<wire::Range>::Reader list,
                                           std::size_t units) {
  if (list.size() > kMaxKinds) {
    return fail(Errc::kInternal, "{} ranges of claimed blocks", list.size());
  }
  std::vector<KindRange> ranges;
  for (const wire::Range::Reader one : list) {
    const KindRange range{.kind = one.getKind(), .first = one.getFirst(), .count = one.getCount()};
    if (range.kind >= kMaxKinds || range.count == 0 || range.end() > units) {
      return fail(Errc::kInternal, "{} blocks of kind {} from {} on are claimed, of {} units",
                  range.count, range.kind, range.first, units);
    }
    ranges.push_back(range);
  }
  return ranges;
}

/// The bits that are set: bit i stands for i + 1 times the alignment.
SessionBoundaries read_boundaries(wire::Session::BoundariesResults::Reader answer) {
  SessionBoundaries boundaries{.complete = answer.getComplete()};
  const auto bits = answer.getRestorable();
  for (std::uint32_t i = 0; i < bits.size() * 8; ++i) {
    if ((bits[i / 8] >> (i % 8) & 1) != 0) boundaries.multiples.push_back(i + 1);
  }
  return boundaries;
}

void write_hints(const SessionHints& hints, wire::Keys::Builder keys) {
  keys.setNoNodes(hints.no_nodes);
  if (!hints.prefill_node.is_none()) write_id(hints.prefill_node, keys.initPrefillNode());
  if (hints.nodes.empty()) return;
  auto nodes = keys.initNodes(static_cast<unsigned>(hints.nodes.size()));
  for (unsigned i = 0; i < nodes.size(); ++i) write_id(hints.nodes[i], nodes[i]);
}

}  // namespace

SessionLoop::SessionLoop(kj::AsyncIoContext& io, const LinkOptions& options, StatusBoard& board,
                         Mailbox<SessionCommand>& commands, QuestionTable& questions,
                         std::atomic<bool>& wants_chains)
    : options_(options),
      board_(board),
      questions_(questions),
      commands_(commands),
      wants_chains_(wants_chains),
      link_(io, options, Link::Identity{.side = "scheduler"}, board, *this),
      pump_(io.unixEventPort, commands.fd(), [this] {
        commands_.drain([this](SessionCommand&& command) { handle(std::move(command)); });
      }) {}

kj::Promise<void> SessionLoop::run() {
  return link_.run().exclusiveJoin(pump_.run()).exclusiveJoin(tasks_.failure());
}

kj::Promise<Result<void>> SessionLoop::begin() {
  auto request = link_.session().attachRequest();
  request.setInstance(options_.instance.c_str());
  write_id(options_.scheduler, request.initScheduler());
  return link_
      .call(kj::mv(request), options_.connect_deadline, "attach",
            [](auto& answer) { return read_done(answer); })
      .then([this](Result<void>&& attached) {
        if (attached) tasks_.add(link_.describe(DeviceReport()));
        return kj::mv(attached);
      });
}

void SessionLoop::handle(SessionCommand&& command) {
  switch (command.kind) {
    case SessionCommand::Kind::kClose:
      return link_.close();
    case SessionCommand::Kind::kUnclaim:
      return unclaim(command.token);
    case SessionCommand::Kind::kChain:
      return report_chain(command);
    case SessionCommand::Kind::kLookup:
    case SessionCommand::Kind::kClaim:
    case SessionCommand::Kind::kBoundaries:
    case SessionCommand::Kind::kReset:
    case SessionCommand::Kind::kJournal:
    case SessionCommand::Kind::kAwait:
      break;
  }
  if (Result<void> may = may_ask(command); !may) {
    static_cast<void>(
        questions_.answer(command.ticket, tl::unexpected<Error>(std::move(may.error()))));
    return;
  }
  if (command.kind == SessionCommand::Kind::kLookup) return lookup(std::move(command));
  if (command.kind == SessionCommand::Kind::kClaim) return claim(std::move(command));
  if (command.kind == SessionCommand::Kind::kBoundaries) return boundaries(std::move(command));
  if (command.kind == SessionCommand::Kind::kJournal) return journal(std::move(command));
  if (command.kind == SessionCommand::Kind::kAwait) return await_job(std::move(command));
  reset(std::move(command));
}

Result<void> SessionLoop::may_ask(const SessionCommand& command) const {
  PEGA_TRY(link_.may_ask());
  const bool needs_kinds =
      command.local_units != 0 || command.kind == SessionCommand::Kind::kBoundaries;
  if (!needs_kinds || link_.server_has(kFeatureKinds)) return {};
  return fail(Errc::kRefused,
              "the server ({}) does not support several kinds of blocks: upgrade the server",
              board_.get().server_build);
}

void SessionLoop::lookup(SessionCommand&& command) {
  auto request = link_.session().lookupRequest(size_of(command.keys.size()));
  write_keys(command.keys, BlockKey::kMaxBytes, request);
  request.setLocalUnits(static_cast<std::uint32_t>(command.local_units));
  write_hints(command.hints, request);
  const std::size_t asked = command.keys.size();
  tasks_.add(link_
                 .call(kj::mv(request), options_.lookup_deadline, "lookup",
                       [asked](auto& answer) -> Result<QuestionTable::Outcome> {
                         const std::size_t here = answer.getSealed();
                         const std::size_t elsewhere = answer.getReachable();
                         const std::size_t offered = answer.getOffered();
                         if (here > asked || elsewhere > asked - here || offered > asked - here) {
                           return fail(Errc::kInternal,
                                       "{} of {} keys are sealed, {} at another node, {} offered",
                                       here, asked, elsewhere, offered);
                         }
                         return QuestionTable::Outcome{.answer = {.blocks = here + elsewhere,
                                                                  .complete = answer.getComplete(),
                                                                  .token = Id128{},
                                                                  .coming = elsewhere,
                                                                  .offered = offered}};
                       })
                 .then([this, ticket = command.ticket](Result<QuestionTable::Outcome>&& outcome) {
                   static_cast<void>(questions_.answer(ticket, std::move(outcome)));
                 }));
}

void SessionLoop::claim(SessionCommand&& command) {
  auto request = link_.session().claimRequest(size_of(command.keys.size()));
  write_id(command.token, request.initToken());
  auto keys = request.initKeys();
  write_keys(command.keys, BlockKey::kMaxBytes, keys);
  keys.setLocalUnits(static_cast<std::uint32_t>(command.local_units));
  write_hints(command.hints, keys);
  request.setComputeDelayMicros(at_most_32_bits(
      std::chrono::duration_cast<std::chrono::microseconds>(command.compute.delay)));
  request.setComputeBlockNanos(at_most_32_bits(command.compute.per_block));
  const std::size_t asked = command.keys.size();
  tasks_.add(
      link_
          .call(kj::mv(request), options_.lookup_deadline, "claim",
                [asked, token = command.token](auto& answer) -> Result<QuestionTable::Outcome> {
                  if (answer.hasError()) {
                    return tl::unexpected<Error>(read_error(answer.getError()));
                  }
                  const std::size_t ready = answer.getReady();
                  const std::size_t coming = answer.getComing();
                  if (ready > asked || coming > asked - ready) {
                    return fail(Errc::kInternal, "{} and {} of {} keys are claimed", ready, coming,
                                asked);
                  }
                  const std::size_t blocks = ready + coming;
                  PEGA_TRY_LET(auto ranges, read_ranges(answer.getRanges(), asked));
                  return QuestionTable::Outcome{
                      .answer = {.blocks = blocks,
                                 .complete = answer.getComplete(),
                                 .token = blocks > 0 ? token : Id128{},
                                 .coming = coming,
                                 .first = std::chrono::microseconds(answer.getFirstMicros()),
                                 .last = std::chrono::microseconds(answer.getLastMicros()),
                                 .ranges = std::move(ranges)}};
                })
          .then([this, ticket = command.ticket,
                 token = command.token](Result<QuestionTable::Outcome>&& outcome) {
            answer_claim(ticket, token, std::move(outcome));
          }));
}

void SessionLoop::answer_claim(QuestionTable::Ticket ticket, const Id128& token,
                               Result<QuestionTable::Outcome>&& outcome) {
  // After a missed deadline the server may still make the claim: the next call ends it.
  const bool may_hold =
      outcome ? outcome->answer.blocks > 0 : outcome.error().code == Errc::kTimeout;
  const bool late = !outcome;
  if (!questions_.answer(ticket, std::move(outcome)) || late) {
    if (may_hold) unclaim(token);
  }
}

void SessionLoop::boundaries(SessionCommand&& command) {
  auto request = link_.session().boundariesRequest(size_of(command.keys.size()));
  write_keys(command.keys, BlockKey::kMaxBytes, request);
  request.setLocalUnits(static_cast<std::uint32_t>(command.local_units));
  tasks_.add(link_
                 .call(kj::mv(request), options_.lookup_deadline, "boundaries",
                       [](auto& answer) -> Result<QuestionTable::Outcome> {
                         if (answer.hasError()) {
                           return tl::unexpected<Error>(read_error(answer.getError()));
                         }
                         return QuestionTable::Outcome{.boundaries = read_boundaries(answer)};
                       })
                 .then([this, ticket = command.ticket](Result<QuestionTable::Outcome>&& outcome) {
                   static_cast<void>(questions_.answer(ticket, std::move(outcome)));
                 }));
}

void SessionLoop::reset(SessionCommand&& command) {
  tasks_.add(link_
                 .call(link_.session().resetCacheRequest(), command.deadline, "reset_cache",
                       [](auto& answer) -> Result<QuestionTable::Outcome> {
                         if (answer.hasError()) {
                           return tl::unexpected<Error>(read_error(answer.getError()));
                         }
                         SessionReset reset{.generation = answer.getGeneration()};
                         for (const auto node : answer.getUnconfirmed()) {
                           reset.unconfirmed.emplace_back(node.cStr());
                         }
                         return QuestionTable::Outcome{.reset = std::move(reset)};
                       })
                 .then([this, ticket = command.ticket](Result<QuestionTable::Outcome>&& outcome) {
                   static_cast<void>(questions_.answer(ticket, std::move(outcome)));
                 }));
}

void SessionLoop::journal(SessionCommand&& command) {
  auto request = link_.session().journalRequest();
  request.setSpace(command.space);
  request.setPosition(command.position);
  tasks_.add(link_
                 .call(kj::mv(request), options_.lookup_deadline, "journal",
                       [](auto& answer) -> Result<QuestionTable::Outcome> {
                         if (answer.hasError()) {
                           return tl::unexpected<Error>(read_error(answer.getError()));
                         }
                         PEGA_TRY_LET(SessionJournal journal, read_journal(answer));
                         return QuestionTable::Outcome{.journal = std::move(journal)};
                       })
                 .then([this, ticket = command.ticket](Result<QuestionTable::Outcome>&& outcome) {
                   static_cast<void>(questions_.answer(ticket, std::move(outcome)));
                 }));
}

void SessionLoop::await_job(SessionCommand&& command) {
  if (link_.version() < kWireAwaitsJobs) {
    static_cast<void>(questions_.answer(command.ticket,
                                        fail(Errc::kRefused, "await_job: the server is too old")));
    return;
  }
  if (command.begun && !link_.server_has(kFeatureDirect)) {
    static_cast<void>(questions_.answer(
        command.ticket,
        fail(Errc::kRefused,
             "await_job: the server ({}) does not report the beginning of jobs: upgrade the server",
             board_.get().server_build)));
    return;
  }
  auto request = link_.session().awaitJobRequest();
  write_id(command.server, request.initServer());
  write_job(command.job, request.initJob());
  request.setBegun(command.begun);
  request.setPatienceMs(static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(command.deadline).count()));
  // The server responds within that time; beyond it the deadline of any other question applies.
  tasks_.add(link_
                 .call(kj::mv(request), command.deadline + options_.lookup_deadline, "await_job",
                       [](auto& answer) {
                         const JobsReached reached = read_reached(answer);
                         return reached.ended.map([&reached] {
                           return QuestionTable::Outcome{.reached = reached.up_to};
                         });
                       })
                 .then([this, ticket = command.ticket](Result<QuestionTable::Outcome>&& outcome) {
                   static_cast<void>(questions_.answer(ticket, std::move(outcome)));
                 }));
}

void SessionLoop::unclaim(const Id128& token) {
  if (!link_.is_connected()) return;  // Claims end with their connection.
  auto request = link_.session().unclaimRequest();
  write_id(token, request.initToken());
  tasks_.add(link_
                 .call(kj::mv(request), options_.lookup_deadline, "unclaim",
                       [](auto& answer) { return read_done(answer); })
                 .then([](Result<void>&& done) {
                   // The claim ends with its connection, or is revoked when its room is needed.
                   if (!done) kLog.debug("unclaim failed error=\"{}\"", to_string(done.error()));
                 }));
}

void SessionLoop::report_chain(const SessionCommand& command) {
  if (!link_.server_has(kFeatureChains) || !link_.may_ask()) {
    wants_chains_ = false;
    return;
  }
  const auto bytes = static_cast<unsigned>(command.keys.size() * sizeof(std::uint64_t));
  auto request = link_.session().reportChainRequest(capnp::MessageSize{bytes / 8 + 16, 0});
  request.setSession(command.session);
  request.setBlockTokens(command.block_tokens);
  auto keys = request.initKeys(bytes);
  for (unsigned i = 0; i < bytes; ++i) {
    const std::uint64_t low = command.keys[i / 8].low_bits();
    keys[i] = static_cast<kj::byte>(low >> (8 * (i % 8)));
  }
  tasks_.add(link_
                 .call(kj::mv(request), options_.lookup_deadline, "report_chain",
                       [](auto& answer) -> Result<bool> {
                         if (answer.hasError()) {
                           return tl::unexpected<Error>(read_error(answer.getError()));
                         }
                         return answer.getWanted();
                       })
                 .then([this](Result<bool>&& wanted) {
                   wants_chains_ = wanted.value_or(false);
                   if (!wanted) {
                     kLog.debug("report_chain failed error=\"{}\"", to_string(wanted.error()));
                   }
                 }));
}

}  // namespace pegaflow
