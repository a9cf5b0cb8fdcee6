#include "server/peers.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "server/rpc_error.h"

namespace pegaflow {

Peers::Peers(kj::AsyncIoContext& io, const OwnNode& own, const Options& options, Fabric& fabric,
             const std::function<void()>& changed)
    : tasks_(*this) {
  for (const std::string& address : options.addresses) {
    PeerLink::Options link = options.link;
    link.address = address;
    links_.push_back(std::make_unique<PeerLink>(io, own, std::move(link), fabric, changed));
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

void Peers::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "dialing a peer failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow
