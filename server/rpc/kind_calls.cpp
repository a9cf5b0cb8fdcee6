#include "server/rpc/kind_calls.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "capnp/wire/codec.h"
#include "server/cache/background.h"
#include "server/rpc/session_codec.h"

namespace pegaflow::server {

kj::Promise<void> KindCalls::lookup(LookupContext& call, const Measured& measured) {
  const std::size_t local = call.getParams().getLocalUnits();
  using Counted = CacheService::Counted;
  const Counted when = fetches_.may_reach() ? Counted::kLater : Counted::kNow;
  const auto found =
      read_keys(call.getParams(), context_.keys).and_then([&](std::span<const BlockKey> units) {
        return service_.restorable(connection_, units, local, when);
      });
  auto results = call.getResults(capnp::MessageSize{4, 0});
  if (found) {
    results.setSealed(static_cast<std::uint32_t>(found->units));
    results.setComplete(found->complete);
  }
  if (found && found->complete) {
    // They were read once, so they can be read again.
    const auto units = read_keys(call.getParams(), context_.keys).value();
    KJ_IF_MAYBE (reach, fetches_.reach_kinds(connection_, units, local)) {
      return reach->then([this, call, measured, found, local,
                          units = std::vector<BlockKey>(units.begin(), units.end())](
                             std::size_t reachable) mutable {
        const std::size_t more = std::max(reachable, found->units) - found->units;
        call.getResults().setReachable(static_cast<std::uint32_t>(more));
        service_.note_restorable(connection_, units, local, found->units, reachable);
        return finish(measured, found);
      });
    }
    if (when == Counted::kLater) {
      service_.note_restorable(connection_, units, local, found->units, 0);
    }
  }
  return finish(measured, found);
}

kj::Promise<void> KindCalls::claim(ClaimContext& call, const Measured& measured) {
  const auto params = call.getParams();
  const Id128 token = read_id(params.getToken());
  if (const auto units = read_keys(params.getKeys(), context_.keys)) {
    const std::size_t local = params.getKeys().getLocalUnits();
    KJ_IF_MAYBE (made,
                 fetches_.claim_kinds(connection_, token, *units, local, compute_time_of(params))) {
      return made->then([this, call, measured](Fetches::ClaimOfKinds&& claim) mutable {
        // A claim that has ended meanwhile would be held until the connection ends.
        const bool is_made = claim.claimed.units != 0;
        if (!is_made && !claim.is_ended) return claim_here(call, measured);
        auto results = call.getResults();
        results.setComing(static_cast<std::uint32_t>(claim.claimed.units));
        results.setFirstMicros(to_micros(claim.arrival.first));
        results.setLastMicros(to_micros(claim.arrival.last));
        results.setComplete(true);
        write_ranges(claim.claimed, results);
        return finish(measured, Result<void>());
      });
    }
  }
  return claim_here(call, measured);
}

kj::Promise<void> KindCalls::claim_here(ClaimContext& call, const Measured& measured) {
  const auto params = call.getParams();
  const auto found =
      read_keys(params.getKeys(), context_.keys).and_then([&](std::span<const BlockKey> units) {
        return service_.claim_restorable(connection_, read_id(params.getToken()), units,
                                         params.getKeys().getLocalUnits());
      });
  auto results = call.getResults();
  if (!found) {
    write_error(found.error(), results.initError());
    return finish(measured, found);
  }
  results.setReady(static_cast<std::uint32_t>(found->units));
  results.setComplete(found->complete);
  write_ranges(*found, results);
  return finish(measured, found);
}

template <typename T>
kj::Promise<void> KindCalls::finish(const Measured& measured, const Result<T>& result) {
  measured.ended(result);
  context_.background.poke();
  return kj::READY_NOW;
}

}  // namespace pegaflow::server
