#include "server/peers.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "server/rpc_error.h"

namespace pegaflow {

Peers::Peers(kj::AsyncIoContext& io, const OwnNode& own, const Options& options, Lanes& lanes,
             const std::function<void()>& changed)
    : tasks_(*this) {
  for (const std::string& address : options.addresses) {
    PeerLink::Options link = options.link;
    link.address = address;
    links_.push_back(std::make_unique<PeerLink>(io, own, std::move(link), lanes, changed));
    tasks_.add(links_.back()->run());
  }
}

bool Peers::has_ready() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link->is_ready(); });
}

kj::Promise<std::vector<Peers::Owner>> Peers::owners(const Bytes32& space,
                                                     std::span<const BlockKey> keys) {
  kj::Vector<kj::Promise<Owner>> asked;
  for (const auto& link : links_) {
    if (!link->is_ready()) continue;
    asked.add(link->locate(space, keys)
                  .then([peer = link.get(), life = link->life()](Result<std::size_t>&& blocks) {
                    // Who does not answer has nothing.
                    return Owner{.peer = peer, .life = life, .blocks = blocks ? *blocks : 0};
                  }));
  }
  return kj::joinPromises(asked.releaseAsArray()).then([](kj::Array<Owner>&& answers) {
    std::vector<Owner> owners;
    for (const Owner& owner : answers) {
      if (owner.blocks != 0) owners.push_back(owner);
    }
    std::stable_sort(owners.begin(), owners.end(),
                     [](const Owner& a, const Owner& b) { return a.blocks > b.blocks; });
    return owners;
  });
}

kj::Promise<Result<void>> Peers::await_job(const Id128& node, const JobId& job, Duration patience) {
  const auto found = std::find_if(links_.begin(), links_.end(), [&](const auto& link) {
    return link->is_ready() && link->stats().node == node;
  });
  if (found == links_.end()) {
    ++waits_.unknown;
    return Result<void>(fail(Errc::kGone, "job {} is of a server that is not at hand", job.number));
  }
  ++waits_.waiting;
  return (*found)
      ->await_job(job, patience)
      .then([this](Result<void>&& result) {
        if (!result && result.error().code == Errc::kPeerLost) result.error().code = Errc::kGone;
        ++(result ? waits_.over : counter_of(result.error().code));
        return kj::mv(result);
      })
      .attach(kj::defer([this]() { --waits_.waiting; }));
}

std::uint64_t& Peers::counter_of(Errc code) {
  switch (code) {
    case Errc::kTimeout:
      return waits_.timed_out;
    case Errc::kBusy:
      return waits_.busy;
    case Errc::kRefused:
      return waits_.refused;
    default:
      return waits_.gone;
  }
}

void Peers::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "dialing a peer failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow
