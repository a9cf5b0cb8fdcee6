#include "server/resets.h"

#include <algorithm>
#include <utility>

#include <kj/vector.h>

#include "base/log.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"peers"};

struct Answer {
  std::string address;
  bool is_confirmed = false;
  Epoch epoch;  ///< That the peer has then.
};

/// Rounds in which two nodes that reset again and again may answer with a newer epoch.
constexpr unsigned kMostRounds = 4;

kj::Promise<std::vector<std::string>> round(CacheService& service, Lenders& peers,
                                            const Clock& clock, const Bytes32& space, TimePoint end,
                                            unsigned rounds) {
  const Epoch epoch = service.epochs().of(space);
  kj::Vector<kj::Promise<Answer>> asked;
  for (Lender* const peer : peers.all()) {
    if (peer->is_this_node()) continue;
    auto answer = peer->reset(space, epoch, std::max(Duration::zero(), end - clock.now()));
    asked.add(answer.then([address = peer->address()](Result<Epoch>&& answered) {
      return Answer{.address = address,
                    .is_confirmed = answered.has_value(),
                    .epoch = answered ? *answered : Epoch{}};
    }));
  }
  return kj::joinPromises(asked.releaseAsArray())
      .then([&service, &peers, &clock, space, end, rounds,
             epoch](kj::Array<Answer>&& answers) -> kj::Promise<std::vector<std::string>> {
        std::vector<std::string> unconfirmed;
        bool is_newer_known = false;
        for (const Answer& answer : answers) {
          if (!answer.is_confirmed || answer.epoch < epoch) unconfirmed.push_back(answer.address);
          if (answer.is_confirmed && answer.epoch > epoch) {
            is_newer_known = true;
            service.epochs().learn(space, answer.epoch);
          }
        }
        if (is_newer_known) {
          service.epochs().raise(space);
          if (rounds > 1 && clock.now() < end) {
            return round(service, peers, clock, space, end, rounds - 1);
          }
          for (const Answer& answer : answers) {
            if (std::find(unconfirmed.begin(), unconfirmed.end(), answer.address) ==
                unconfirmed.end()) {
              unconfirmed.push_back(answer.address);
            }
          }
        }
        for (const std::string& address : unconfirmed) {
          kLog.warn("a reset is not confirmed, blocks of this namespace are not read peer={}",
                    address);
        }
        service.note_unconfirmed(unconfirmed.size());
        return unconfirmed;
      });
}

}  // namespace

kj::Promise<std::vector<std::string>> spread_reset(CacheService& service, Lenders& peers,
                                                   const Clock& clock, const Bytes32& space,
                                                   Duration deadline) {
  return round(service, peers, clock, space, clock.now() + deadline, kMostRounds);
}

}  // namespace pegaflow
