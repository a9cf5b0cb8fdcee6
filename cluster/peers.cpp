#include "cluster/peers.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow::cluster {

Peers::Peers(kj::AsyncIoContext& io, const OwnNode& own, Epochs& epochs, const Options& options,
             Lanes& lanes, const std::function<void()>& changed)
    : tasks_(*this) {
  for (const std::string& address : options.addresses) {
    PeerLink::Options link = options.link;
    link.address = address;
    links_.push_back(std::make_unique<PeerLink>(io, own, epochs, std::move(link), lanes, changed));
    add(*links_.back());
    tasks_.add(links_.back()->run());
  }
}

bool Peers::has_ready() const {
  return Lenders::has_ready() && std::all_of(links_.begin(), links_.end(),
                                             [](const auto& link) { return link->was_tried(); });
}

bool Peers::names(const Id128& node, const std::string& address) const {
  return std::any_of(links_.begin(), links_.end(), [&](const auto& link) {
    if (link->is_this_node()) return false;
    return link->stats().node == node || (!link->is_ready() && link->address() == address);
  });
}

PeerLink* Peers::ready_link(const Id128& node) const {
  const auto found = std::find_if(links_.begin(), links_.end(), [&](const auto& link) {
    return link->is_ready() && link->stats().node == node;
  });
  return found == links_.end() ? nullptr : found->get();
}

kj::Promise<JobsReached> Peers::await_job(const Id128& node, const JobId& job, Duration patience,
                                          bool begun) {
  PeerLink* const link = ready_link(node);
  if (link == nullptr) {
    ++waits_.unknown;
    return JobsReached{
        .ended = fail(Errc::kGone, "job {} belongs to a server that is not connected", job.number)};
  }
  ++waits_.waiting;
  return link->await_job(job, patience, begun)
      .then([this](JobsReached&& reached) {
        Result<void>& ended = reached.ended;
        if (!ended && ended.error().code == Errc::kPeerLost) ended.error().code = Errc::kGone;
        ++(ended ? waits_.over : counter_of(ended.error().code));
        return kj::mv(reached);
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

}  // namespace pegaflow::cluster
