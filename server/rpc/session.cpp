#include "server/rpc/session.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <kj/memory.h>

#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"
#include "cluster/peers.h"
#include "server/cache/resets.h"
#include "server/direct/direct_reads.h"
#include "server/fetches/fetches.h"
#include "server/pool/pool_keeping.h"
#include "server/rpc/in_order.h"
#include "server/rpc/job_calls.h"
#include "server/rpc/kind_calls.h"
#include "server/rpc/measured.h"
#include "server/rpc/process_watch.h"
#include "server/rpc/session_codec.h"
#include "server/ssd/ssd_tier.h"

namespace pegaflow::server {
namespace {

/// A disk that has not recorded a reset by then may never do it.
constexpr kj::Duration kRecordPatience = 2 * kj::SECONDS;

class SessionImpl final : public wire::Session::Server {
 public:
  SessionImpl(SessionContext& context, const Id128& connection, std::uint16_t version,
              std::shared_ptr<const ProcessWatch> process)
      : context_(context),
        service_(context.service),
        connection_(connection),
        process_(std::move(process)),
        fetches_(version >= kWireKnowsNodes ? context.fetches : context.local_fetches),
        peers_(version >= kWireKnowsNodes ? context.peers : nullptr),
        kind_calls_(context, connection, fetches_) {}

 protected:
  // `register` is a keyword of C++, hence the generated code's name for it.
  kj::Promise<void> register_(RegisterContext call) override {
    const Measured measured(context_, Method::kRegister);
    const auto params = call.getParams();
    if (!params.hasDirect() || !params.getDirect().hasGuards()) {
      return answer_register(call, measured, nullptr);
    }
    const auto direct = params.getDirect();
    kj::Promise<kj::Maybe<int>> exported = direct.hasExported()
                                               ? direct.getExported().getFd()
                                               : kj::Promise<kj::Maybe<int>>(kj::Maybe<int>());
    return direct.getGuards().getFd().then(
        [this, call, measured, exported = kj::mv(exported)](kj::Maybe<int> guards) mutable {
          return exported.then([this, call, measured, guards](const kj::Maybe<int>& fd) mutable {
            KJ_IF_MAYBE (number, guards) {
              return answer_register(
                  call, measured,
                  DirectReads::Descriptors{.guards = *number, .exported = fd.orDefault(-1)});
            }
            return answer_register(call, measured, nullptr);
          });
        });
  }

  kj::Promise<void> answer_register(RegisterContext& call, const Measured& measured,
                                    kj::Maybe<DirectReads::Descriptors> descriptors) {
    const auto done = read_registration(call.getParams()).and_then([&](const Registration& wanted) {
      auto registered = service_.register_rank(connection_, wanted);
      KJ_IF_MAYBE (sent, descriptors) {
        if (registered) join_direct(wanted, *sent);
      }
      return registered;
    });
    auto results = call.getResults();
    if (done) {
      // One for the session: a repeated call returns the export that the first one made.
      if (pool_ == nullptr)
        pool_ = wire::Pool::Client(kj::heap<CarriedDescriptor<wire::Pool>>(context_.pool_fd));
      KJ_IF_MAYBE (pool, pool_) results.setPool(*pool);
      results.setPoolBytes(context_.pool_bytes);
      if (context_.keeping != nullptr && !context_.keeping->pool().is_none()) {
        write_id(context_.keeping->pool(), results.initKeptPool());
      }
      results.setNamespace(done->namespace_hash.c_str());
    } else {
      write_error(done.error(), results.initRefused());
    }
    return finish(measured, done);
  }

  kj::Promise<void> attach(AttachContext call) override {
    const Measured measured(context_, Method::kAttach);
    const auto done =
        read_instance(call.getParams().getInstance()).and_then([&](const std::string& instance) {
          return service_.attach(connection_, instance, read_id(call.getParams().getScheduler()));
        });
    write_done(done, call.getResults());
    return finish(measured, done);
  }

  kj::Promise<void> lookup(LookupContext call) override {
    const Measured measured(context_, Method::kLookup);
    if (has_kinds()) return kind_calls_.lookup(call, measured);
    using Counted = CacheService::Counted;
    const Counted when = fetches_.may_reach() ? Counted::kLater : Counted::kNow;
    std::span<const BlockKey> keys;
    const auto found =
        read_keys(call.getParams(), context_.keys).and_then([&](std::span<const BlockKey> read) {
          keys = read;
          return service_.lookup(connection_, keys, when);
        });
    // A lookup has no error on the wire: without an instance, or with invalid keys, it misses.
    auto results = call.getResults(capnp::MessageSize{4, 0});
    if (found) {
      results.setSealed(static_cast<std::uint32_t>(found->blocks));
      results.setComplete(found->complete);
    }
    if (found && found->complete && found->blocks != keys.size()) {
      const std::span<const BlockKey> beyond = keys.subspan(found->blocks);
      const std::size_t offered = context_.direct.offered(connection_, beyond);
      results.setOffered(static_cast<std::uint32_t>(offered));
      auto reach = fetches_.reach(connection_, beyond, hints_of(call.getParams()));
      auto there =
          context_.direct.offered_at(prefill_node_of(call.getParams()), connection_, beyond);
      if (reach != nullptr || there != nullptr) {
        return both_of(kj::mv(reach), kj::mv(there))
            .then([this, call, measured, found, offered,
                   keys = std::vector<BlockKey>(keys.begin(), keys.end())](
                      const Beyond& elsewhere) mutable {
              const std::size_t reachable = elsewhere.reachable;
              const std::size_t most = std::max(offered, elsewhere.readable);
              auto answer = call.getResults();
              answer.setReachable(static_cast<std::uint32_t>(reachable));
              answer.setOffered(
                  static_cast<std::uint32_t>(most > reachable ? most - reachable : 0));
              service_.note_lookup(connection_, keys, found->blocks, reachable);
              return finish(measured, found);
            });
      }
    }
    if (found && found->complete && when == Counted::kLater) {
      service_.note_lookup(connection_, keys, found->blocks, 0);
    }
    return finish(measured, found);
  }

  kj::Promise<void> claim(ClaimContext call) override {
    const Measured measured(context_, Method::kClaim);
    if (has_kinds()) return kind_calls_.claim(call, measured);
    const Id128 token = read_id(call.getParams().getToken());
    const auto keys = fetches_.check_unused(token).and_then(
        [&]() { return read_keys(call.getParams().getKeys(), context_.keys); });
    if (!keys || (loads_.is_idle() && keys->size() <= CacheService::kClaimSlice)) {
      return extend_claim(
          keys.and_then([&](auto each) { return service_.claim(connection_, token, each); }), token,
          keys.value_or(std::span<const BlockKey>()), call, measured);
    }
    struct State {
      std::vector<BlockKey> scratch;  // Its own: other calls run between the slices.
      std::span<const BlockKey> keys;
      Result<CacheService::Found> found;
    };
    auto state = kj::heap<State>();
    State& shared = *state;
    // It succeeded once, so it succeeds again.
    shared.keys = read_keys(call.getParams().getKeys(), shared.scratch).value();
    return loads_
        .run(context_.timer,
             [this, &shared, token]() { return claim_slice(token, shared.keys, shared.found); })
        .then([this, call, measured, token, state = kj::mv(state)]() mutable {
          return extend_claim(state->found, token, state->keys, call, measured);
        });
  }

  kj::Promise<void> unclaim(UnclaimContext call) override {
    const Id128 token = read_id(call.getParams().getToken());
    return done_in_order(loads_, Method::kUnclaim, call, [this, token]() {
      fetches_.ended(token);
      return service_.unclaim(connection_, token);
    });
  }

  kj::Promise<void> open(OpenContext call) override {
    const Measured measured(context_, Method::kOpen);
    const auto params = call.getParams();
    const auto claim =
        service_.claim_of_kind(connection_, read_id(params.getToken()), params.getKind());
    if (!claim) return answer_open(tl::unexpected<Error>(claim.error()), call, measured);
    const Id128 token = *claim;
    const std::size_t first = params.getFirst();
    const std::size_t count = params.getCount();
    const engine::PinId pin{params.getPin()};
    if (fetches_.has_source()) {
      // Behind the claim that it may belong to.
      return loads_.run(context_.timer, []() { return false; })
          .then([this, token, first, count, pin, wait = wait_of(params)]() {
            return fetches_.open(connection_, token, first, count, pin, wait);
          })
          .then([this, call, measured](Result<Fetches::Arrived>&& arrived) mutable {
            return answer_open(arrived, call, measured);
          });
    }
    if (loads_.is_idle() && count <= CacheService::kOpenSlice) {
      return answer_open(as_arrived(service_.open(connection_, token, first, count, pin)), call,
                         measured);
    }
    auto state = kj::heap<Result<CacheService::Opened>>();
    Result<CacheService::Opened>& opened = *state;
    return loads_
        .run(context_.timer, [this, &opened, token, first, count,
                              pin]() { return open_slice(token, first, count, pin, opened); })
        .then([this, call, measured, state = kj::mv(state)]() mutable {
          return answer_open(as_arrived(std::move(*state)), call, measured);
        });
  }

  kj::Promise<void> confirm(ConfirmContext call) override {
    const Measured measured(context_, Method::kConfirm);
    return fetches_.confirm(connection_, engine::PinId{call.getParams().getPin()})
        .then([this, call, measured](Result<bool>&& held) mutable {
          if (held) {
            call.getResults().setHeld(*held);
          } else {
            write_error(held.error(), call.getResults().initError());
          }
          return finish(measured, held);
        });
  }

  kj::Promise<void> corrupt(CorruptContext call) override {
    auto places = read_numbers<std::uint32_t>(call.getParams().getPages());
    return done_in_order(
        loads_, Method::kCorrupt, call,
        [this, pin = engine::PinId{call.getParams().getPin()}, places = std::move(places)]() {
          return places.and_then(
              [&](const auto& each) { return service_.corrupt(connection_, pin, each); });
        });
  }

  kj::Promise<void> release(ReleaseContext call) override {
    const engine::PinId pin{call.getParams().getPin()};
    return done_in_order(loads_, Method::kRelease, call, [this, pin]() {
      fetches_.released(connection_, pin);
      context_.direct.released(connection_, pin);
      return service_.release(connection_, pin);
    });
  }

  kj::Promise<void> reserve(ReserveContext call) override {
    const Measured measured(context_, Method::kReserve);
    const JobId job = read_job(call.getParams().getJob());
    const std::size_t first = call.getParams().getFirst();
    const std::size_t kind = call.getParams().getKind();
    using MayRefuse = engine::BlockStore::MayRefuse;
    const auto may_refuse = call.getParams().getMayRefuse() ? MayRefuse::kYes : MayRefuse::kNo;
    struct State {
      std::vector<BlockKey> scratch;  // Its own: other calls run between the slices.
      std::span<const BlockKey> keys;
      std::span<const std::uint8_t> depths;
      Result<std::vector<std::uint32_t>> slots;
    };
    auto state = kj::heap<State>();
    State& shared = *state;
    const auto read = read_keys(call.getParams().getKeys(), shared.scratch);
    if (!read) {
      write_error(read.error(), call.getResults().initError());
      return finish(measured, read);
    }
    shared.keys = *read;
    const auto depths = call.getParams().getDepths();
    if (depths.size() != 0 && depths.size() != shared.keys.size()) {
      const Result<void> refused = fail(Errc::kInvalidArgument, "reserve: {} depths for {} keys",
                                        depths.size(), shared.keys.size());
      write_error(refused.error(), call.getResults().initError());
      return finish(measured, refused);
    }
    shared.depths = {depths.begin(), depths.size()};
    const TimePoint no_longer_than =
        context_.clock.now() + service_.reserve_patience(connection_, shared.keys.size());
    shared.slots->reserve(shared.keys.size());
    return jobs_
        .run(context_.timer,
             [this, &shared, job, kind, first, may_refuse, no_longer_than]() {
               return reserve_slice(job, kind, first, shared.keys, shared.depths, may_refuse,
                                    no_longer_than, shared.slots);
             })
        .then([this, call, measured, state = kj::mv(state)]() mutable {
          if (state->slots) {
            const auto offered =
                context_.direct.reserved(connection_, call.getParams(), state->keys, *state->slots);
            if (!offered)
              kRpcLog.debug("blocks are not offered error=\"{}\"", offered.error().detail);
          }
          answer_slots(state->slots, call);
          return finish(measured, state->slots);
        });
  }

  kj::Promise<void> publish(PublishContext call) override {
    const Measured measured(context_, Method::kPublish);
    const JobId job = read_job(call.getParams().getJob());
    auto checksums = read_numbers<std::uint64_t>(call.getParams().getChecksums());
    if (!checksums) {
      const Result<void> refused = tl::unexpected<Error>(std::move(checksums.error()));
      write_done(refused, call.getResults());
      return finish(measured, refused);
    }
    struct State {
      std::vector<std::uint64_t> checksums;
      Result<void> done;
    };
    auto state = kj::heap<State>(State{std::move(*checksums), {}});
    State& shared = *state;
    return jobs_
        .run(context_.timer,
             [this, &shared, job]() { return publish_slice(job, shared.checksums, shared.done); })
        .then([this, call, measured, job, state = kj::mv(state)]() mutable {
          context_.direct.job_ended(connection_, job);
          write_done(state->done, call.getResults());
          return finish(measured, state->done);
        });
  }

  kj::Promise<void> abandon(AbandonContext call) override {
    const JobId job = read_job(call.getParams().getJob());
    return done_in_order(jobs_, Method::kAbandon, call, [this, job]() {
      context_.direct.job_ended(connection_, job);
      return service_.abandon(connection_, job);
    });
  }

  kj::Promise<void> openNext(OpenNextContext call) override {
    const Measured measured(context_, Method::kOpenNext);
    return context_.direct.open_next(connection_, call)
        .then([this, call, measured](Result<void>&& opened) mutable {
          if (!opened) write_error(opened.error(), call.getResults().initError());
          return finish(measured, opened);
        });
  }

  kj::Promise<void> awaitReads(AwaitReadsContext call) override {
    const Measured measured(context_, Method::kAwaitReads);
    return context_.direct.await_reads(connection_, read_job(call.getParams().getJob()))
        .then([this, call, measured](Result<void>&& ended) mutable {
          write_done(ended, call.getResults());
          return finish(measured, ended);
        });
  }

  kj::Promise<void> awaitReader(AwaitReaderContext call) override {
    const Measured measured(context_, Method::kAwaitReader);
    return context_.direct.await_reader(connection_, call)
        .then([this, call, measured](Result<void>&& next) mutable {
          if (!next) write_error(next.error(), call.getResults().initError());
          return finish(measured, next);
        });
  }

  kj::Promise<void> ready(ReadyContext call) override {
    const Measured measured(context_, Method::kReady);
    context_.direct.ready(connection_, read_job(call.getParams().getJob()));
    const Result<void> done;
    write_done(done, call.getResults());
    return finish(measured, done);
  }

  kj::Promise<void> resetCache(ResetCacheContext call) override {
    const Measured measured(context_, Method::kResetCache);
    const auto reset = service_.reset_cache(connection_);
    if (!reset) {
      write_error(reset.error(), call.getResults().initError());
      return finish(measured, reset);
    }
    call.getResults().setGeneration(reset->generation);
    if (context_.peers == nullptr) return record_reset(call, measured, *reset);
    return spread_reset(service_, *context_.peers, context_.watches, context_.clock, reset->space)
        .then([this, call, measured, reset](std::vector<std::string>&& unconfirmed) mutable {
          auto list = call.getResults().initUnconfirmed(static_cast<unsigned>(unconfirmed.size()));
          for (unsigned i = 0; i < list.size(); ++i) list.set(i, unconfirmed[i].c_str());
          return record_reset(call, measured, *reset);
        });
  }

  /// Answers once the disks have recorded the reset.
  kj::Promise<void> record_reset(ResetCacheContext call, const Measured& measured,
                                 const CacheService::Reset& reset) {
    if (context_.ssd == nullptr) return finish(measured, Result<CacheService::Reset>(reset));
    return context_.ssd->record_epochs()
        .exclusiveJoin(context_.timer.afterDelay(kRecordPatience).then([]() { return false; }))
        .then([this, call, measured, reset](bool is_durable) mutable {
          Result<CacheService::Reset> recorded = reset;
          if (!is_durable) {
            recorded = fail(Errc::kIo,
                            "the reset took effect, but a disk of the SSD cache did not record it; "
                            "remove its file before the next start: see the server's log");
            write_error(recorded.error(), call.getResults().initError());
          }
          return finish(measured, recorded);
        });
  }

  kj::Promise<void> journal(JournalContext call) override {
    const Measured measured(context_, Method::kJournal);
    const auto params = call.getParams();
    const auto journal = service_.journal(connection_, params.getSpace(), params.getPosition());
    if (!journal) {
      write_error(journal.error(), call.getResults().initError());
      return finish(measured, journal);
    }
    const std::size_t words =
        journal->part.entries.size() * (BlockKey::kMaxBytes + 2) / sizeof(capnp::word) + 16;
    write_journal(*journal, call.getResults(capnp::MessageSize{words, 0}));
    return finish(measured, journal);
  }

  kj::Promise<void> awaitJob(AwaitJobContext call) override {
    const Measured measured(context_, Method::kAwaitJob);
    const auto params = call.getParams();
    const JobId job = read_job(params.getJob());
    const Id128 server = read_id(params.getServer());
    const std::chrono::milliseconds patience(params.getPatienceMs());
    const auto until = params.getBegun() ? JobWaits::Until::kBegun : JobWaits::Until::kOver;
    auto over = server == context_.server
                    ? await_job_here(context_, connection_, job, patience, until)
                    : await_job_there(context_, connection_, peers_, server, job, patience, until);
    return over.then([this, call, measured](JobsReached&& reached) mutable {
      write_reached(reached, call.getResults());
      return finish(measured, reached.ended);
    });
  }

  kj::Promise<void> describe(DescribeContext call) override {
    const Measured measured(context_, Method::kDescribe);
    const auto done = service_.describe(connection_, read_engine(call.getParams()));
    write_done(done, call.getResults());
    return finish(measured, done);
  }

  kj::Promise<void> decline(DeclineContext call) override {
    const Measured measured(context_, Method::kDecline);
    const auto done = read_decline(call.getParams()).and_then([&](Decline decline) {
      return service_.decline(connection_, std::move(decline));
    });
    write_done(done, call.getResults());
    return finish(measured, done);
  }

  kj::Promise<void> boundaries(BoundariesContext call) override {
    const Measured measured(context_, Method::kBoundaries);
    const std::size_t local = call.getParams().getLocalUnits();
    const auto found =
        read_keys(call.getParams(), context_.keys).and_then([&](std::span<const BlockKey> units) {
          return service_.boundaries(connection_, units, local);
        });
    auto results = call.getResults();
    if (found) {
      results.setComplete(found->complete);
      const std::vector<std::byte>& bits = found->restorable;
      auto restorable = results.initRestorable(static_cast<unsigned>(bits.size()));
      std::transform(bits.begin(), bits.end(), restorable.begin(), std::to_integer<kj::byte>);
    } else {
      write_error(found.error(), results.initError());
    }
    return finish(measured, found);
  }

  kj::Promise<void> reportChain(ReportChainContext call) override {
    const Measured measured(context_, Method::kReportChain);
    const auto wanted = read_chain(call.getParams()).and_then([&](PromptChain chain) {
      return service_.report_chain(connection_, std::move(chain));
    });
    auto results = call.getResults(capnp::MessageSize{4, 0});
    if (wanted) {
      results.setWanted(*wanted);
    } else {
      write_error(wanted.error(), results.initError());
    }
    return finish(measured, wanted);
  }

  kj::Promise<void> goodbye(GoodbyeContext call) override {
    return done_in_order(jobs_, Method::kGoodbye, call, [this]() {
      context_.direct.left(connection_);
      return service_.goodbye(connection_);
    });
  }

 private:
  /// Whether the namespace of the caller's instance has several kinds of blocks. False for callers
  /// without an instance, whose calls fail later.
  [[nodiscard]] bool has_kinds() { return service_.has_kinds(connection_).value_or(false); }

  /// Engines of its group may read the worker's memory from now on. Without that it is a worker
  /// like others.
  void join_direct(const Registration& wanted, DirectReads::Descriptors descriptors) {
    if (!wanted.direct || process_ == nullptr || process_->pidfd() < 0) return;
    descriptors.process = process_->pidfd();
    const auto joined =
        context_.direct.joined(connection_, wanted.shard, *wanted.direct, descriptors);
    if (!joined) kRpcLog.warn("no direct reads error=\"{}\"", joined.error().detail);
  }

  template <typename T>
  kj::Promise<void> finish(const Measured& measured, const Result<T>& result) {
    measured.ended(result);
    context_.background.poke();
    return kj::READY_NOW;
  }

  /// Responds with the result of `act`, behind earlier calls that take several event-loop
  /// iterations.
  template <typename Call, typename Act>
  kj::Promise<void> done_in_order(InOrder& order, Method method, Call call, Act act) {
    const Measured measured(context_, method);
    if (order.is_idle()) {
      const Result<void> done = act();
      write_done(done, call.getResults());
      return finish(measured, done);
    }
    auto state = kj::heap<Result<void>>();
    Result<void>& done = *state;
    return order
        .run(context_.timer,
             [&done, act = std::move(act)]() mutable {
               done = act();
               return false;
             })
        .then([this, call, measured, state = kj::mv(state)]() mutable {
          write_done(*state, call.getResults());
          return finish(measured, *state);
        });
  }

  /// Extends the claim by blocks that are not local, where there are any, and responds.
  kj::Promise<void> extend_claim(const Result<CacheService::Found>& found, const Id128& token,
                                 std::span<const BlockKey> keys, ClaimContext call,
                                 const Measured& measured) {
    if (!found || !found->complete || found->blocks == keys.size()) {
      return answer_claim(found, {}, call, measured);
    }
    const cluster::ComputeTime compute = compute_time_of(call.getParams());
    const FetchHints hints = hints_of(call.getParams().getKeys());
    KJ_IF_MAYBE (extended,
                 fetches_.extend(connection_, token, keys, found->blocks, compute, hints)) {
      return extended->then(
          [this, call, measured, found](const Fetches::Extension& extension) mutable {
            return answer_claim(found, extension, call, measured);
          });
    }
    return answer_claim(found, {}, call, measured);
  }

  kj::Promise<void> answer_claim(const Result<CacheService::Found>& found,
                                 const Fetches::Extension& extension, ClaimContext call,
                                 const Measured& measured) {
    auto results = call.getResults();
    if (found) {
      results.setReady(static_cast<std::uint32_t>(found->blocks));
      results.setComplete(found->complete);
      results.setComing(static_cast<std::uint32_t>(extension.blocks));
      results.setFirstMicros(to_micros(extension.arrival.first));
      results.setLastMicros(to_micros(extension.arrival.last));
    } else {
      write_error(found.error(), results.initError());
    }
    return finish(measured, found);
  }

  kj::Promise<void> answer_open(const Result<Fetches::Arrived>& arrived, OpenContext call,
                                const Measured& measured) {
    if (arrived) {
      write_arrived(*arrived, call.getResults(capnp::MessageSize{words_of(*arrived), 0}));
    } else {
      write_error(arrived.error(), call.getResults().initError());
    }
    return finish(measured, arrived);
  }

  /// True while there are keys left to claim.
  bool claim_slice(const Id128& token, std::span<const BlockKey> keys,
                   Result<CacheService::Found>& found) {
    const std::size_t done = found->blocks;
    const auto part = keys.subspan(done, std::min(CacheService::kClaimSlice, keys.size() - done));
    auto slice = done == 0 ? service_.claim(connection_, token, part)
                           : service_.claim_more(connection_, token, part);
    if (!slice || !slice->complete) {  // The claim of the earlier slices has ended, too.
      found = std::move(slice);
      return false;
    }
    *found = {.blocks = done + slice->blocks, .complete = true};
    return slice->blocks == part.size() && found->blocks < keys.size();
  }

  /// True while there are blocks left to pin.
  bool open_slice(const Id128& token, std::size_t first, std::size_t count, engine::PinId pin,
                  Result<CacheService::Opened>& opened) {
    auto slice = service_.open(connection_, token, first, count, pin);
    if (!slice) {
      // The caller gets no page, so the pages of earlier slices are not read.
      if (!opened->slots.empty()) (void)service_.release(connection_, pin);
      opened = std::move(slice);
      return false;
    }
    opened->append(std::move(*slice));
    return opened->slots.size() < count;
  }

  template <typename Call>
  static void answer_slots(const Result<std::vector<std::uint32_t>>& slots, Call& call) {
    if (slots) {
      auto results = call.getResults(capnp::MessageSize{slots->size() / 2 + 8, 0});
      write_slots(*slots, results.initSlots(static_cast<unsigned>(slots->size())));
    } else {
      write_error(slots.error(), call.getResults().initError());
    }
  }

  /// True while there are keys left to reserve. A slice may end early, or reserve nothing, where
  /// large blocks wait for small ones to make room.
  bool reserve_slice(const JobId& job, std::size_t kind, std::size_t first,
                     std::span<const BlockKey> keys, std::span<const std::uint8_t> depths,
                     engine::BlockStore::MayRefuse may_refuse, TimePoint no_longer_than,
                     Result<std::vector<std::uint32_t>>& slots) {
    const std::size_t done = slots->size();
    const std::size_t count = std::min(CacheService::kSliceBlocks, keys.size() - done);
    const bool may_wait = context_.clock.now() < no_longer_than;
    auto slice = service_.reserve(
        connection_, job, first + done, keys.subspan(done, count), done + count < keys.size(),
        may_wait ? engine::BlockStore::NoRoom::kStop : engine::BlockStore::NoRoom::kSkip, kind,
        depths.empty() ? depths : depths.subspan(done, count), may_refuse);
    if (!slice) {
      // The caller gets no slot, so the slots of earlier slices are not written.
      if (done != 0) (void)service_.abandon(connection_, job);
      slots = tl::unexpected<Error>(std::move(slice.error()));
      return false;
    }
    slots->insert(slots->end(), slice->begin(), slice->end());
    context_.background.poke();
    return slots->size() < keys.size();
  }

  /// True while there are blocks left to seal.
  bool publish_slice(const JobId& job, std::vector<std::uint64_t>& checksums, Result<void>& done) {
    // All checksums are stored before the first block is found.
    auto left = service_.publish(connection_, job, std::exchange(checksums, {}));
    if (!left) {
      done = tl::unexpected<Error>(std::move(left.error()));
      return false;
    }
    return *left != 0;
  }

  SessionContext& context_;
  CacheService& service_;
  Id128 connection_;
  std::shared_ptr<const ProcessWatch> process_;  ///< Null: it cannot be watched.
  Fetches& fetches_;
  cluster::Peers* peers_;  ///< Null: no other nodes, or the client knows none.
  KindCalls kind_calls_;
  InOrder jobs_;                        ///< Reserve, publish, abandon.
  InOrder loads_;                       ///< Claim and open, and the calls that end them.
  kj::Maybe<wire::Pool::Client> pool_;  ///< Once it has registered.
};

}  // namespace

wire::Session::Client make_session(SessionContext& context, const Id128& connection,
                                   std::uint16_t version,
                                   std::shared_ptr<const ProcessWatch> process) {
  return kj::heap<SessionImpl>(context, connection, version, std::move(process));
}

}  // namespace pegaflow::server
