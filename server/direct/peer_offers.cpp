#include "server/direct/peer_offers.h"

#include <algorithm>
#include <iterator>

#include "capnp/wire/kj_time.h"
#include "server/cache/cache_service.h"
#include "server/direct/direct_reads.h"
#include "server/direct/far_reads.h"

namespace pegaflow::server {

struct PeerOffers::Opening {
  Call call;
  TimePoint deadline{};
  bool is_cancelled = false;
  kj::Own<kj::PromiseFulfiller<void>> cancel{};  ///< While it waits.
};

PeerOffer PeerOffers::offered(const Bytes32& space, std::span<const BlockKey> keys,
                              std::span<const PeerReader> readers) const {
  const auto wants = service_.wants_by_name(space);
  if (!wants) return {};
  std::vector<Offers::Reader> workers;
  for (const PeerReader& reader : readers) {
    workers.push_back({.group = reader.group, .shard = reader.shard, .is_there = true});
  }
  PeerOffer offer{.sealed = service_.present(space, keys)};
  offer.offered = direct_.offers().count(workers, wants->generation, keys.subspan(offer.sealed));
  return offer;
}

kj::Promise<Result<PeerPiece>> PeerOffers::open_next(Call call) {
  const Read name{call.connection, call.question.read};
  if (waiting_.contains(name)) {
    return Result<PeerPiece>(
        fail(Errc::kInvalidArgument, "openNext: read {} waits already", name.second));
  }
  if (waits_of(call.connection) >= kMostWaits) {
    return Result<PeerPiece>(fail(Errc::kBusy, "{} calls wait for blocks already", kMostWaits));
  }
  const TimePoint deadline = clock_.now() + call.question.patience;
  return try_open(
      std::make_shared<Opening>(Opening{.call = std::move(call), .deadline = deadline}));
}

kj::Promise<Result<PeerPiece>> PeerOffers::try_open(const OneOpening& opening) {
  const Read name{opening->call.connection, opening->call.question.read};
  waiting_.erase(name);
  if (opening->is_cancelled) {
    return Result<PeerPiece>(fail(Errc::kCancelled, "read {} was ended before a block arrived",
                                  opening->call.question.read));
  }
  PeerPiece piece = look(*opening);
  const TimePoint now = clock_.now();
  if (!piece.blocks.empty() || piece.sealed != 0 || now >= opening->deadline) {
    for (const std::uint64_t known : opening->call.question.known) {
      if (!direct_.offers().has(SourceId{known})) piece.gone.push_back(known);
    }
    return Result<PeerPiece>(std::move(piece));
  }
  waiting_.emplace(name, opening);
  auto cancel = kj::newPromiseAndFulfiller<void>();
  opening->cancel = kj::mv(cancel.fulfiller);
  const Duration pause = std::min<Duration>(opening->deadline - now, DirectReads::kRetry);
  return direct_.next_change()
      .exclusiveJoin(kj::mv(cancel.promise))
      .exclusiveJoin(timer_.afterDelay(to_kj(pause)))
      .then([this, opening]() { return try_open(opening); });
}

PeerPiece PeerOffers::look(const Opening& opening) {
  const Call& call = opening.call;
  const PeerQuestion& question = call.question;
  PeerPiece piece;
  const auto wants = service_.wants_by_name(call.space);
  if (!wants) return piece;
  if (!question.pool_only) {
    const Offers::Reader reader{
        .group = question.reader.group, .shard = question.reader.shard, .is_there = true};
    if (const auto found = direct_.begin_read(call.connection, reader, wants->generation, call.keys,
                                              question.read)) {
      piece.blocks = found->blocks;
      piece.source = static_cast<std::uint64_t>(found->source->id);
      piece.guards = guards_of(*found);
      if (std::ranges::find(question.known, piece.source) == question.known.end()) {
        piece.memory = found->source->memory.for_other_nodes();
      }
      return piece;
    }
  }
  piece.sealed = service_.present(call.space, call.keys);
  return piece;
}

std::size_t PeerOffers::waits_of(const Id128& connection) const {
  return static_cast<std::size_t>(std::distance(waiting_.lower_bound({connection, 0}),
                                                waiting_.upper_bound({connection, UINT64_MAX})));
}

void PeerOffers::end_read(const Id128& connection, std::uint64_t read) {
  direct_.end_read(connection, read);
  const auto waits = waiting_.find({connection, read});
  if (waits == waiting_.end()) return;
  waits->second->is_cancelled = true;
  waits->second->cancel->fulfill();
}

void PeerOffers::left(const Id128& connection) {
  for (auto each = waiting_.lower_bound({connection, 0});
       each != waiting_.end() && each->first.first == connection; ++each) {
    each->second->is_cancelled = true;
    each->second->cancel->fulfill();
  }
  direct_.left(connection);
}

}  // namespace pegaflow::server
