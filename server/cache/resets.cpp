#include "server/cache/resets.h"

#include <algorithm>
#include <utility>

#include <kj/vector.h>

#include "base/log.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"peers"};

struct Answer {
  std::string address;
  bool is_confirmed = false;
  Epoch epoch;  ///< The peer's, with this reset.
};

/// Limit of rounds, for two nodes that reset the namespace again and again.
constexpr unsigned kMostRounds = 4;

/// One reset, until all nodes have answered.
struct Spread {
  CacheService& service;
  cluster::Lenders& peers;
  cluster::EpochWatches* watches;
  const Clock& clock;
  Bytes32 space;
  TimePoint end;

  kj::Promise<std::vector<std::string>> round(unsigned rounds);
  /// Sends the epoch to all peers.
  kj::Promise<kj::Array<Answer>> ask_peers(const Epoch& epoch);
  /// Returns the names of dialers that have not fetched the epochs of this node. A newer epoch of
  /// one of them is then known here.
  kj::Promise<std::vector<std::string>> await_dialers();
  std::vector<std::string> report(std::vector<std::string> unconfirmed);
  [[nodiscard]] Duration left() const { return std::max(Duration::zero(), end - clock.now()); }
};

kj::Promise<kj::Array<Answer>> Spread::ask_peers(const Epoch& epoch) {
  kj::Vector<kj::Promise<Answer>> asked;
  for (cluster::Lender* const peer : peers.all()) {
    if (peer->is_this_node()) continue;
    auto answer = peer->reset(space, epoch, left());
    asked.add(answer.then([address = peer->address()](Result<Epoch>&& answered) {
      return Answer{.address = address,
                    .is_confirmed = answered.has_value(),
                    .epoch = answered ? *answered : Epoch{}};
    }));
  }
  return kj::joinPromises(asked.releaseAsArray());
}

kj::Promise<std::vector<std::string>> Spread::await_dialers() {
  if (watches == nullptr || !watches->has_unasked()) return std::vector<std::string>();
  return watches->spread(left());
}

kj::Promise<std::vector<std::string>> Spread::round(unsigned rounds) {
  const Epoch epoch = service.epochs().of(space);
  const bool has_dialers = watches != nullptr && watches->has_unasked();
  return ask_peers(epoch).then([this, epoch, rounds, has_dialers](kj::Array<Answer>&& answers) {
    bool is_newer_known = false;
    for (const Answer& answer : answers) {
      if (!answer.is_confirmed || answer.epoch <= epoch) continue;
      is_newer_known = true;
      service.epochs().learn(space, answer.epoch);
    }
    auto dialers = is_newer_known
                       ? kj::Promise<std::vector<std::string>>(std::vector<std::string>())
                       : await_dialers();
    return dialers.then(
        [this, epoch, rounds, has_dialers, is_newer_known, answers = kj::mv(answers)](
            std::vector<std::string>&& unconfirmed) -> kj::Promise<std::vector<std::string>> {
          // The epochs of dialers were learned from their requests.
          const bool is_raised =
              is_newer_known || (has_dialers && service.epochs().of(space) > epoch);
          if (is_raised) {
            const bool is_above = service.epochs().raise(space).has_value();
            if (is_above && rounds > 1 && left() > Duration::zero()) return round(rounds - 1);
          }
          for (const Answer& answer : answers) {
            if (is_raised || !answer.is_confirmed || answer.epoch < epoch) {
              unconfirmed.push_back(answer.address);
            }
          }
          if (!is_raised) return report(kj::mv(unconfirmed));
          // No time is left, or there is no greater epoch: no dialer has the last one.
          return await_dialers().then(
              [this, unconfirmed = kj::mv(unconfirmed)](std::vector<std::string>&& behind) mutable {
                unconfirmed.insert(unconfirmed.end(), behind.begin(), behind.end());
                return report(kj::mv(unconfirmed));
              });
        });
  });
}

std::vector<std::string> Spread::report(std::vector<std::string> unconfirmed) {
  std::sort(unconfirmed.begin(), unconfirmed.end());
  unconfirmed.erase(std::unique(unconfirmed.begin(), unconfirmed.end()), unconfirmed.end());
  for (const std::string& address : unconfirmed) {
    kLog.warn("a reset is not confirmed, blocks of this namespace are not read peer={}", address);
  }
  service.note_unconfirmed(unconfirmed.size());
  return unconfirmed;
}

}  // namespace

kj::Promise<std::vector<std::string>> spread_reset(CacheService& service, cluster::Lenders& peers,
                                                   cluster::EpochWatches* watches,
                                                   const Clock& clock, const Bytes32& space,
                                                   Duration deadline) {
  auto spread = kj::heap<Spread>(Spread{.service = service,
                                        .peers = peers,
                                        .watches = watches,
                                        .clock = clock,
                                        .space = space,
                                        .end = clock.now() + deadline});
  Spread& one = *spread;
  return one.round(kMostRounds).attach(kj::mv(spread));
}

}  // namespace pegaflow::server
