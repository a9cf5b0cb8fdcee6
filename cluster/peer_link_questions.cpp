// The requests of a link to a ready node, and their deadlines.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/units.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/kj_time.h"
#include "cluster/peer_link.h"
#include "cluster/peer_link_impl.h"

namespace pegaflow::cluster {
namespace {

/// Limit of bytes queued for a peer that does not read.
constexpr std::size_t kMaxQueued = std::size_t{4} << 20;

/// Limit of leases that ended here while the link was not ready; others run out at the owner.
constexpr std::size_t kMostUnreleased = 1024;

}  // namespace

/// Errors: kPeerLost when the link is not ready; kBusy while the peer is silent.
Result<void> PeerLink::check_askable() {
  if (!is_ready()) return fail(Errc::kPeerLost, "the peer is not ready");
  if (!connection_->open.is_silent()) return {};
  ++stats_.withheld;
  return fail(Errc::kBusy, "answers of the peer are overdue");
}

void PeerLink::missed(OpenQuestions::Number question) {
  ++stats_.late;
  if (!connection_->open.missed(question) || connection_->is_watched) return;
  connection_->is_watched = true;
  connection_->calls.add(watch_silence());
}

/// Ends when the peer has answered something, or is lost.
kj::Promise<void> PeerLink::watch_silence() {
  const Duration patience = std::max(3 * options_.call_deadline, options_.least_silence);
  kj::Timer& timer = io_.provider->getTimer();
  const auto since = connection_->open.silent_since();
  if (!since) {
    connection_->is_watched = false;
    return kj::READY_NOW;
  }
  const Duration left = *since + patience - clock_.now();
  if (left > Duration::zero()) {
    return timer.afterDelay(to_kj(left)).then([this]() { return watch_silence(); });
  }
  // This process may have been suspended, with the answer in its socket: read that first.
  return timer.afterDelay(to_kj(options_.call_deadline)).then([this, since, patience]() {
    if (connection_->open.silent_since() == since) {
      drop(fmt::format("no answer for {}", format_duration(patience)));
      return kj::Promise<void>(kj::READY_NOW);
    }
    return watch_silence();
  });
}

/// Waits for an answer, for which the peer may take `work`, until one call's deadline after that.
/// `decode` receives late answers as well; their result is discarded.
template <typename T, typename Answer, typename Decode>
kj::Promise<Result<T>> PeerLink::answered(kj::Promise<Answer>&& answer, Duration work,
                                          Decode decode) {
  auto pair = kj::newPromiseAndFulfiller<Result<T>>();
  // Shared by both ends of the call, of which one runs.
  auto fulfiller =
      std::make_shared<kj::Own<kj::PromiseFulfiller<Result<T>>>>(kj::mv(pair.fulfiller));
  const std::uint64_t asked_in = life();
  const OpenQuestions::Number question = connection_->open.ask(clock_.now() + work);
  connection_->calls.add(answer
                             .then([this, question, fulfiller, decode](Answer&& response) mutable {
                               connection_->open.answered(question, clock_.now());
                               Result<T> value = decode(response, (*fulfiller)->isWaiting());
                               return value;
                             })
                             .catch_([this, question](kj::Exception&& exception) {
                               connection_->open.ended(question);
                               return Result<T>(tl::unexpected<Error>(failed(exception)));
                             })
                             .then([this, fulfiller, asked_in](Result<T>&& value) {
                               if (!value && value.error().code == Errc::kInternal) {
                                 lost(asked_in, value.error().detail);
                               }
                               (*fulfiller)->fulfill(kj::mv(value));
                             }));
  const Duration deadline = work + options_.call_deadline;
  return pair.promise
      .catch_([](kj::Exception&&) {
        // The connection ended, and with it all of its calls.
        return Result<T>(fail(Errc::kPeerLost, "the connection to the peer ended"));
      })
      .exclusiveJoin(io_.provider->getTimer().afterDelay(to_kj(deadline)).then([=, this]() {
        if (is_ready() && life() == asked_in) missed(question);
        return Result<T>(fail(Errc::kTimeout, "no answer within {}", format_duration(deadline)));
      }));
}

/// Errors: kPeerLost for a peer that does not read its requests; it is lost.
Result<void> PeerLink::check_reads() {
  if (connection_->rpc.queued_bytes() <= kMaxQueued) return {};
  lost(life(), "the peer does not read its requests");
  return fail(Errc::kPeerLost, "the peer does not read");
}

kj::Promise<Result<Lender::Prefix>> PeerLink::locate(const Bytes32& space,
                                                     std::span<const BlockKey> keys) {
  using Answer = capnp::Response<wire::Peer::LocateResults>;
  if (auto may = check_askable().and_then([this]() { return check_reads(); }); !may) {
    return Result<Prefix>(tl::unexpected<Error>(std::move(may.error())));
  }
  const Epoch epoch = epochs_.of(space);
  // An older node may have missed any reset.
  if (!knows_epochs() && !epoch.is_zero()) return Result<Prefix>(Prefix{});
  auto request = connection_->peer->locateRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  write_epoch(epoch, request.initEpoch());
  return answered<Prefix>(
      kj::Promise<Answer>(request.send()), Duration::zero(),
      [this, space, epoch, asked = keys.size()](Answer& answer, bool) -> Result<Prefix> {
        if (answer.getSealed() > asked) {
          return fail(Errc::kInternal, "the peer reports {} of {} blocks", answer.getSealed(),
                      asked);
        }
        PEGA_TRY_LET(const OnDisks on_disks,
                     read_on_disks(answer.getOnDisks(), answer.getSealed()));
        PEGA_TRY_LET(const bool is_same, is_of_epoch(space, epoch, answer.getEpoch()));
        return is_same ? Prefix{.blocks = answer.getSealed(), .on_disks = on_disks} : Prefix{};
      });
}

kj::Promise<Result<Lender::Present>> PeerLink::locate_each(const Bytes32& space,
                                                           std::span<const BlockKey> keys) {
  using Answer = capnp::Response<wire::Peer::LocateEachResults>;
  if (auto may = check_askable().and_then([this]() { return check_reads(); }); !may) {
    return Result<Present>(tl::unexpected<Error>(std::move(may.error())));
  }
  if ((connection_->features & kPeerLocatesEach) == 0) {
    return Result<Present>(
        fail(Errc::kRefused, "peer {} is too old to be asked for each block", address()));
  }
  const Epoch epoch = epochs_.of(space);
  auto request = connection_->peer->locateEachRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  write_epoch(epoch, request.initEpoch());
  return answered<Present>(
      kj::Promise<Answer>(request.send()), Duration::zero(),
      [this, space, epoch, asked = keys.size()](Answer& answer, bool) -> Result<Present> {
        PEGA_TRY_LET(std::vector<bool> has, read_present(answer.getPresent(), asked));
        PEGA_TRY_LET(const OnDisks on_disks, read_on_disks(answer.getOnDisks(), asked));
        PEGA_TRY_LET(const bool is_same, is_of_epoch(space, epoch, answer.getEpoch()));
        if (!is_same) return Present{.has = std::vector<bool>(asked)};
        return Present{.has = std::move(has), .on_disks = on_disks};
      });
}

kj::Promise<Result<LeaseGrant>> PeerLink::lease(const Bytes32& space,
                                                std::span<const BlockKey> keys, std::size_t shards,
                                                std::chrono::milliseconds time) {
  using Answer = capnp::Response<wire::Peer::LeaseResults>;
  if (auto may = check_askable(); !may) {
    return Result<LeaseGrant>(tl::unexpected<Error>(std::move(may.error())));
  }
  const Epoch epoch = epochs_.of(space);
  if (!knows_epochs() && !epoch.is_zero()) return Result<LeaseGrant>(LeaseGrant{});
  auto request = connection_->peer->leaseRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  request.setMilliseconds(static_cast<std::uint32_t>(time.count()));
  write_epoch(epoch, request.initEpoch());
  return answered<LeaseGrant>(
      kj::Promise<Answer>(request.send()), Duration::zero(),
      [this, space, epoch, shards, asked = keys.size()](Answer& answer, bool in_time) {
        return granted(space, epoch, answer, asked, shards, in_time);
      });
}

Result<LeaseGrant> PeerLink::granted(const Bytes32& space, const Epoch& epoch,
                                     wire::Peer::LeaseResults::Reader answer, std::size_t asked,
                                     std::size_t shards, bool in_time) {
  PEGA_TRY_LET(LeaseGrant grant, read_grant(answer, asked, shards));
  PEGA_TRY_LET(const bool is_same, is_of_epoch(space, epoch, answer.getEpoch()));
  if (in_time && is_same) return grant;
  if (grant.lease != 0) release(grant.lease);
  if (grant.staging != 0) end_staging(grant.staging);
  return LeaseGrant{};
}

kj::Promise<Result<LeaseGrant>> PeerLink::lease_pending(const Staging& staging,
                                                        std::chrono::milliseconds time,
                                                        std::chrono::milliseconds patience) {
  using Answer = capnp::Response<wire::Peer::LeaseResults>;
  if (auto may = check_askable(); !may) {
    return Result<LeaseGrant>(tl::unexpected<Error>(std::move(may.error())));
  }
  const Epoch epoch = epochs_.of(staging.space);
  auto request = connection_->peer->leaseRequest();
  request.setSpace(data_of(staging.space));
  request.setMilliseconds(static_cast<std::uint32_t>(time.count()));
  write_epoch(epoch, request.initEpoch());
  request.setStaging(staging.number);
  request.setPatience(static_cast<std::uint32_t>(patience.count()));
  return answered<LeaseGrant>(kj::Promise<Answer>(request.send()), patience,
                              [this, staging, epoch](Answer& answer, bool in_time) {
                                return granted(staging.space, epoch, answer, staging.pending,
                                               staging.shards, in_time);
                              });
}

void PeerLink::end_staging(std::uint64_t number) {
  if (!is_ready()) return;  // The owner ends it with the connection.
  auto request = connection_->peer->releaseRequest();
  request.setStaging(number);
  connection_->calls.add(kj::Promise<capnp::Response<wire::Done>>(request.send())
                             .then([](capnp::Response<wire::Done>&&) {},
                                   [this](kj::Exception&& exception) { failed(exception); }));
}

/// Whether an answer is of the epoch of the request, which is still that of this node.
Result<bool> PeerLink::is_of_epoch(const Bytes32& space, const Epoch& asked,
                                   wire::Epoch::Reader answer) {
  if (!knows_epochs()) return epochs_.of(space).is_zero();
  const auto theirs = read_epoch(answer);
  if (!theirs) return fail(Errc::kInternal, "{}", theirs.error().detail);
  epochs_.learn(space, *theirs);
  return *theirs == asked && epochs_.of(space) == asked;
}

kj::Promise<Result<bool>> PeerLink::confirm(std::uint64_t lease, Duration patience) {
  using Answer = capnp::Response<wire::Peer::ConfirmResults>;
  if (!is_ready()) return Result<bool>(fail(Errc::kPeerLost, "the peer is not ready"));
  if (!knows_epochs()) return Result<bool>(true);
  auto request = connection_->peer->confirmRequest();
  request.setLease(lease);
  return answered<bool>(kj::Promise<Answer>(request.send()), work_of(patience),
                        [](Answer& answer, bool) -> Result<bool> { return answer.getHeld(); });
}

kj::Promise<Result<Epoch>> PeerLink::reset(const Bytes32& space, const Epoch& epoch,
                                           Duration patience) {
  using Answer = capnp::Response<wire::Peer::ResetResults>;
  if (!is_ready()) return Result<Epoch>(fail(Errc::kPeerLost, "the peer is not ready"));
  if (!knows_epochs()) {
    return Result<Epoch>(fail(Errc::kRefused, "peer {} is too old to receive resets", address()));
  }
  auto request = connection_->peer->resetRequest();
  request.setSpace(data_of(space));
  write_epoch(epoch, request.initEpoch());
  return answered<Epoch>(kj::Promise<Answer>(request.send()), work_of(patience),
                         [](Answer& answer, bool) -> Result<Epoch> {
                           auto theirs = read_epoch(answer.getEpoch());
                           if (!theirs) theirs.error().code = Errc::kInternal;
                           return theirs;
                         });
}

Result<void> PeerLink::check_waits() {
  PEGA_TRY(check_askable());
  if (stats_.version < kPeerWireAwaitsJobs) {
    return fail(Errc::kRefused, "peer {} is too old to wait for jobs", address());
  }
  if (connection_->waits >= kMaxWaits) {
    return fail(Errc::kBusy, "{} calls wait for jobs of {} already", kMaxWaits, address());
  }
  return {};
}

kj::Promise<JobsReached> PeerLink::await_job(const JobId& job, Duration patience, bool begun) {
  using Answer = capnp::Response<wire::JobsReached>;
  auto may = check_waits();
  if (may && begun) may = check_workers();
  if (!may) return JobsReached{.ended = kj::mv(may)};
  patience = std::clamp(patience, Duration::zero(), Duration(kLongestJobWait));
  const Duration asked = std::max<Duration>(patience - options_.call_deadline, patience * 3 / 4);
  auto request = connection_->peer->awaitJobRequest();
  request.setBegun(begun);
  write_job(job, request.initJob());
  request.setMilliseconds(static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(asked).count()));
  ++connection_->waits;
  // Even if its caller gave up, the wait counts until the peer has answered.
  auto sent = kj::Promise<Answer>(request.send()).attach(kj::defer([&waits = connection_->waits]() {
    --waits;
  }));
  using Reached = Result<JobsReached>;
  return answered<JobsReached>(
             kj::mv(sent), asked,
             [](Answer& answer, bool) -> Reached {
               JobsReached reached = read_reached(answer);
               // Loses the peer, as with any other call.
               if (!reached.ended && reached.ended.error().code == Errc::kInternal) {
                 return tl::unexpected<Error>(kj::mv(reached.ended.error()));
               }
               return reached;
             })
      .then([](Reached&& answer) {
        if (answer) return kj::mv(*answer);
        return JobsReached{.ended = tl::unexpected<Error>(kj::mv(answer.error()))};
      });
}

bool PeerLink::has_readable_workers() const noexcept {
  return is_ready() && (connection_->features & kPeerReadsMemory) != 0;
}

Result<void> PeerLink::check_workers() const {
  if ((connection_->features & kPeerReadsMemory) != 0) return {};
  return fail(Errc::kRefused, "peer {} is too old for reads out of the memory of its workers",
              address());
}

kj::Promise<Result<PeerOffer>> PeerLink::offered(const Bytes32& space,
                                                 std::span<const BlockKey> keys,
                                                 std::span<const PeerReader> readers) {
  using Answer = capnp::Response<wire::Peer::OfferedResults>;
  auto may = check_askable().and_then([this]() { return check_reads(); });
  if (may) may = check_workers();
  if (!may) return Result<PeerOffer>(tl::unexpected<Error>(std::move(may.error())));
  const Epoch epoch = epochs_.of(space);
  auto request = connection_->peer->offeredRequest(capnp::MessageSize{
      keys_words(keys.size(), BlockKey::kMaxBytes) + 16 * readers.size() + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  write_epoch(epoch, request.initEpoch());
  auto list = request.initReaders(static_cast<unsigned>(readers.size()));
  for (unsigned i = 0; i < list.size(); ++i) write_reader(readers[i], list[i]);
  return answered<PeerOffer>(
      kj::Promise<Answer>(request.send()), Duration::zero(),
      [this, space, epoch, asked = keys.size()](Answer& answer, bool) -> Result<PeerOffer> {
        const PeerOffer offer{.sealed = answer.getSealed(), .offered = answer.getOffered()};
        if (offer.sealed > asked || offer.offered > asked - offer.sealed) {
          return fail(Errc::kInternal, "the peer reports {} sealed and {} offered of {} blocks",
                      offer.sealed, offer.offered, asked);
        }
        PEGA_TRY_LET(const bool is_same, is_of_epoch(space, epoch, answer.getEpoch()));
        return is_same ? offer : PeerOffer{};
      });
}

kj::Promise<Result<PeerPiece>> PeerLink::open_next(const Bytes32& space,
                                                   std::span<const BlockKey> keys,
                                                   const PeerQuestion& question) {
  using Answer = capnp::Response<wire::Peer::OpenNextResults>;
  auto may = check_askable().and_then([this]() { return check_reads(); });
  if (may) may = check_workers();
  if (may && connection_->opens >= kMaxOpens) {
    may = fail(Errc::kBusy, "{} calls wait for blocks of workers of {} already", kMaxOpens,
               address());
  }
  if (!may) return Result<PeerPiece>(tl::unexpected<Error>(std::move(may.error())));
  const Epoch epoch = epochs_.of(space);
  auto request = connection_->peer->openNextRequest(capnp::MessageSize{
      keys_words(keys.size(), BlockKey::kMaxBytes) + question.known.size() + 48, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  write_epoch(epoch, request.initEpoch());
  write_question(question, request);
  ++connection_->opens;
  auto sent = kj::Promise<Answer>(request.send()).attach(kj::defer([&opens = connection_->opens]() {
    --opens;
  }));
  return answered<PeerPiece>(
      kj::mv(sent), question.patience,
      [this, space, epoch, asked = keys.size()](Answer& answer, bool) -> Result<PeerPiece> {
        PEGA_TRY_LET(PeerPiece piece, read_piece(answer, asked));
        PEGA_TRY_LET(const bool is_same, is_of_epoch(space, epoch, answer.getEpoch()));
        if (!is_same) return PeerPiece{.gone = std::move(piece.gone)};
        return piece;
      });
}

void PeerLink::end_read(std::uint64_t read) {
  if (!is_ready()) return;
  auto request = connection_->peer->endReadRequest();
  request.setRead(read);
  using Answer = capnp::Response<wire::Peer::EndReadResults>;
  connection_->calls.add(
      kj::Promise<Answer>(request.send())
          .then([](Answer&&) {}, [this](kj::Exception&& exception) { failed(exception); }));
}

void PeerLink::release(std::uint64_t lease) {
  if (!is_ready()) return release_later(lease);
  auto request = connection_->peer->releaseRequest();
  request.setLease(lease);
  connection_->releasing.insert(lease);
  connection_->calls.add(
      kj::Promise<capnp::Response<wire::Done>>(request.send())
          .then(
              [this, lease](capnp::Response<wire::Done>&&) { connection_->releasing.erase(lease); },
              [this](kj::Exception&& exception) { failed(exception); }));
}

void PeerLink::release_later(std::uint64_t lease) {
  if (unreleased_.size() < kMostUnreleased) unreleased_.push_back(lease);
}

}  // namespace pegaflow::cluster
