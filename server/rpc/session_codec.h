#pragma once
/// \file
/// The parameters and results of Session on the wire, as the services have them.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/clock.h"
#include "capnp/cache.capnp.h"
#include "capnp/wire/codec.h"
#include "cluster/source_rate.h"
#include "server/cache/cache_service.h"
#include "server/fetches/fetches.h"

namespace pegaflow::server {

/// The longest wait of an open for blocks, whatever its caller requests.
inline constexpr std::chrono::milliseconds kLongestPatience{10000};

/// Limit of the names in an open; the rest is ignored.
inline constexpr std::size_t kMostKnownPools = 256;

inline void write_slots(std::span<const std::uint32_t> from,
                        capnp::List<std::uint32_t>::Builder to) {
  for (unsigned i = 0; i < to.size(); ++i) to.set(i, from[i]);
}

/// Encodes a time; the longest is more than an hour.
inline std::uint32_t to_micros(Duration time) {
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(micros, 0, UINT32_MAX));
}

inline wire::Late to_wire(Fetches::Late late) {
  switch (late) {
    case Fetches::Late::kNo:
      break;
    case Fetches::Late::kStuck:
      return wire::Late::STUCK;
    case Fetches::Late::kSlow:
      return wire::Late::SLOW;
  }
  return wire::Late::NO;
}

inline Fetches::Wait wait_of(const wire::Session::OpenParams::Reader& params) {
  Fetches::Wait wait{.patience = std::min<std::chrono::milliseconds>(
                         std::chrono::milliseconds(params.getPatienceMs()), kLongestPatience)};
  if (const std::uint32_t worth = params.getWorthMicros(); worth == kWorthForever) {
    wait.worth = Fetches::Wait::kForever;
  } else if (worth != 0) {
    wait.worth = std::chrono::microseconds(worth);
  }
  wait.computing = std::chrono::microseconds(params.getComputeMicros());
  wait.through_pool = params.getThroughPool();
  const auto known = params.getKnown();
  wait.known.reserve(std::min<std::size_t>(known.size(), kMostKnownPools));
  for (const std::uint64_t name : known) {
    if (wait.known.size() == kMostKnownPools) break;
    wait.known.push_back(name);
  }
  return wait;
}

inline cluster::ComputeTime compute_time_of(const wire::Session::ClaimParams::Reader& params) {
  return {.delay = std::chrono::microseconds(params.getComputeDelayMicros()),
          .per_block = std::chrono::nanoseconds(params.getComputeBlockNanos())};
}

inline FetchHints hints_of(const wire::Keys::Reader& keys) {
  FetchHints hints{.nodes = {}, .no_nodes = keys.getNoNodes()};
  for (const wire::Id128::Reader node : keys.getNodes()) {
    if (hints.nodes.size() == FetchHints::kMost) break;
    if (const Id128 id = read_id(node); !id.is_none()) hints.nodes.push_back(id);
  }
  return hints;
}

/// The node of the engine that computes the prompt; none if the call does not name one.
inline Id128 prefill_node_of(const wire::Keys::Reader& keys) {
  return keys.hasPrefillNode() ? read_id(keys.getPrefillNode()) : Id128{};
}

/// The blocks that a lookup finds beyond those of this node.
struct Beyond {
  std::size_t reachable = 0;  ///< That another node has.
  std::size_t readable = 0;   ///< That another node has or its workers offer.
};
inline kj::Promise<Beyond> both_of(kj::Maybe<kj::Promise<std::size_t>>&& reachable,
                                   kj::Maybe<kj::Promise<std::size_t>>&& readable) {
  kj::Promise<std::size_t> first = std::size_t{0};
  KJ_IF_MAYBE (each, reachable) first = kj::mv(*each);
  kj::Promise<std::size_t> second = std::size_t{0};
  KJ_IF_MAYBE (each, readable) second = kj::mv(*each);
  return first.then([second = kj::mv(second)](std::size_t one) mutable {
    return second.then(
        [one](std::size_t other) { return Beyond{.reachable = one, .readable = other}; });
  });
}

/// Errors: kInvalidArgument for keys that are not 8 bytes each, or too many.
inline Result<PromptChain> read_chain(const wire::Session::ReportChainParams::Reader& params) {
  const auto bytes = params.getKeys();
  constexpr std::size_t kBytes = sizeof(std::uint64_t);
  if (bytes.size() % kBytes != 0 || bytes.size() / kBytes > kMaxKeysPerCall) {
    return fail(Errc::kInvalidArgument,
                "reportChain: {} bytes of keys; a key has 8, the limit is {}", bytes.size(),
                kMaxKeysPerCall);
  }
  PromptChain chain{.session = params.getSession(), .block_tokens = params.getBlockTokens()};
  chain.keys.resize(bytes.size() / kBytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    chain.keys[i / kBytes] |= std::uint64_t{bytes[i]} << (8 * (i % kBytes));
  }
  return chain;
}

/// The answer to an open of blocks that are all here.
inline Result<Fetches::Arrived> as_arrived(Result<CacheService::Opened>&& opened) {
  return std::move(opened).map(
      [](CacheService::Opened&& here) { return Fetches::Arrived{.opened = std::move(here)}; });
}

/// The size of its message, without what may be large in rare cases.
inline std::size_t words_of(const Fetches::Arrived& arrived) {
  const CacheService::Opened& opened = arrived.opened;
  const std::size_t here = opened.slots.size() / 2 + opened.checksums.size() + 8;
  return arrived.in_pool ? here + arrived.in_pool->pages.size() / 2 + 56 : here;
}

inline void write_arrived(const Fetches::Arrived& arrived,
                          wire::Session::OpenResults::Builder results) {
  const CacheService::Opened& opened = arrived.opened;
  write_slots(opened.slots, results.initSlots(static_cast<unsigned>(opened.slots.size())));
  const auto checksums = static_cast<unsigned>(opened.checksums.size());
  if (checksums != 0) {
    write_numbers<std::uint64_t>(opened.checksums, results.initChecksums(checksums));
  }
  results.setComing(static_cast<std::uint32_t>(opened.coming));
  results.setLate(to_wire(arrived.late));
  if (!arrived.in_pool) return;
  const PoolReads::Opened& in_pool = *arrived.in_pool;
  write_slots(in_pool.pages, results.initPages(static_cast<unsigned>(in_pool.pages.size())));
  results.setSource(in_pool.source);
  if (in_pool.fabric) write_fabric(*in_pool.fabric, results.initFabric());
}

inline void write_journal(const CacheService::Journal& journal,
                          wire::Session::JournalResults::Builder results) {
  const std::vector<engine::BlockStore::JournalEntry>& entries = journal.part.entries;
  results.setSpace(journal.space);
  results.setPosition(journal.part.next);
  results.setLost(journal.part.has_lost);
  results.setMore(journal.part.has_more);
  auto keys = results.initKeys(static_cast<unsigned>(entries.size() * BlockKey::kMaxBytes));
  auto there = results.initThere(static_cast<unsigned>(entries.size()));
  const bool has_kinds = std::any_of(entries.begin(), entries.end(),
                                     [](const auto& entry) { return entry.place != 0; });
  capnp::Data::Builder kinds;
  if (has_kinds) kinds = results.initKinds(static_cast<unsigned>(entries.size()));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    std::memcpy(keys.begin() + i * BlockKey::kMaxBytes, entries[i].key.bytes.data(),
                BlockKey::kMaxBytes);
    there[i] = entries[i].is_present ? 1 : 0;
    if (has_kinds) kinds[i] = entries[i].place;
  }
}

inline void write_ranges(const CacheService::Restorable& claimed,
                         wire::Session::ClaimResults::Builder results) {
  auto ranges = results.initRanges(static_cast<unsigned>(claimed.ranges.size()));
  for (unsigned i = 0; i < ranges.size(); ++i) {
    ranges[i].setKind(static_cast<std::uint8_t>(claimed.ranges[i].kind));
    ranges[i].setFirst(static_cast<std::uint32_t>(claimed.ranges[i].blocks.first));
    ranges[i].setCount(static_cast<std::uint32_t>(claimed.ranges[i].blocks.count));
  }
}

}  // namespace pegaflow::server
